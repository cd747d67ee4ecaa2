"""Logits f(Q + {p}) of one batch, for a set Q of quantized layers that grows and any candidate p.

The input of each layer is kept, so that a pass with layer p replaced starts at p; and so are the states of every
candidate from there on: when layer c is chosen, those of a candidate before c are still true up to c, and its next pass
starts at c. Nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from elastic.quant.sensitivity.layer_trace import LayerTrace, first, replaced_forwards

Quantize = Callable[[int], nn.Module]
"""The index of a layer -> the quantized layer."""
_CHUNK = 1 << 18


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the cosine over the last dimension of two [..., hidden], in float64, summed over all others."""
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    chunks = -(-a.numel() // _CHUNK)
    sums = []
    for x, y in zip(a.chunk(chunks), b.chunk(chunks), strict=True):
        x, y = x.double(), y.double()
        squares = torch.linalg.vecdot(x, x) * torch.linalg.vecdot(y, y)
        cosines = torch.clamp(torch.linalg.vecdot(x, y) / squares.clamp(min=1e-300).sqrt(), -1, 1)
        sums.append(cosines.sum())
    return float(torch.stack(sums).sum())


class FullForward:
    """One batch with a growing set of quantized layers; each candidate takes a pass through the whole model."""

    def __init__(self, trace: LayerTrace, layers: Sequence[nn.Module], variants: Quantize) -> None:
        self.trace = trace
        self.layers = layers
        self.variants = variants
        self.chosen: set[int] = set()
        self.logits = trace.logits
        """The logits with the chosen layers quantized, [sequences, tokens, vocabulary]."""
        self.tokens = trace.ids.numel()

    def local(self, p: int) -> tuple[float, float]:
        """Return LTS and LRS of layer p, each summed over the tokens, from a plain pass in which layer p runs twice."""
        layer, quantized, results = self.layers[p], self.variants(p), []
        full = layer.forward

        def both(*args: Any, **kwargs: Any) -> Any:
            results.append(quantized(*args, **kwargs))
            return full(*args, **kwargs)

        with replaced_forwards({layer: both}):
            self.trace.whole({})
        return cosine(self.trace.outputs[p], self.trace.states[p]), cosine(self.trace.outputs[p], first(results[0]))

    def attempt(self, p: int) -> torch.Tensor:
        """Return the logits with layer p quantized too, [sequences, tokens, vocabulary]."""
        return self.trace.whole({q: self.variants(q) for q in (*self.chosen, p)})

    def choose(self, p: int, logits: torch.Tensor) -> None:
        """Keep layer p quantized from now on; `logits`, [sequences, tokens, vocabulary], are those of its attempt."""
        self.chosen.add(p)
        self.logits = logits

    def discard(self, p: int) -> None:
        """Give up what was kept of layer p, which was not the best of this round."""

    def resume(self, chosen: Sequence[int]) -> None:
        """Continue as if each of these layers had been chosen."""
        self.chosen.update(chosen)
        self.logits = self.trace.whole({q: self.variants(q) for q in chosen})


class IncrementalForward(FullForward):
    """The same layer by layer, for models that allow it: no layer is run whose input has not changed."""

    def __init__(
        self, trace: LayerTrace, layers: Sequence[nn.Module], variants: Quantize, *, keeps: bool = True
    ) -> None:
        super().__init__(trace, layers, variants)
        self.states = list(trace.states)
        """The input of each layer and the output of the last, [sequences, tokens, hidden], with the chosen ones."""
        self._keeps = keeps
        """True if states are kept of candidates that were not chosen."""
        self._candidates: dict[int, list[torch.Tensor]] = {}
        """Candidate -> what it and the layers after it return, as far as it is known."""

    def local(self, p: int) -> tuple[float, float]:
        """Return LTS and LRS of layer p, each summed over the tokens. Nothing may be chosen yet."""
        full = self.trace.outputs[p]
        scores = cosine(full, self.trace.states[p]), cosine(full, self._outputs(p)[0])
        self.discard(p)
        return scores

    def attempt(self, p: int) -> torch.Tensor:
        """Return the logits with layer p quantized too, [sequences, tokens, vocabulary]. No layer before p is run."""
        outputs = self._outputs(p)
        for i in range(p + len(outputs), len(self.layers)):
            outputs.append(self._run(i, outputs[-1]))
        return self.trace.head(outputs[-1])

    def choose(self, p: int, logits: torch.Tensor) -> None:
        """Keep layer p quantized from now on; `logits`, [sequences, tokens, vocabulary], are those of its attempt."""
        super().choose(p, logits)
        self.states[p + 1 :] = self._candidates.pop(p)
        for candidate, outputs in self._candidates.items():
            del outputs[max(0, p - candidate) :]

    def discard(self, p: int) -> None:
        """Give up what was kept of layer p, unless there is memory to keep it."""
        if not self._keeps:
            self._candidates.pop(p, None)

    def resume(self, chosen: Sequence[int]) -> None:
        """Continue as if each of these layers had been chosen."""
        self.chosen.update(chosen)
        self._candidates.clear()
        for i in range(min(chosen, default=len(self.layers)), len(self.layers)):
            self.states[i + 1] = self._run(i, self.states[i])
        self.logits = self.trace.head(self.states[-1])

    def _outputs(self, p: int) -> list[torch.Tensor]:
        """Return what is known of a candidate's outputs, at least its own."""
        outputs = self._candidates.setdefault(p, [])
        if not outputs:
            outputs.append(self.trace.run(p, self.variants(p), self.states[p]))
        return outputs

    def _run(self, i: int, hidden: torch.Tensor) -> torch.Tensor:
        """Run layer i, quantized if it is chosen."""
        return self.trace.run(i, self.variants(i) if i in self.chosen else self.layers[i], hidden)
