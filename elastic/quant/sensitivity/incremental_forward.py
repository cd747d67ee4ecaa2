"""f^(Q) and f^(Q + {p}) on one batch, for a set Q of quantized layers that grows and any candidate p.

What a layer was given is kept, so that a pass with layer p replaced starts at p; and so is the way of every candidate
from there on: when layer c is chosen, what a candidate before c went through up to c is still true, and its next pass
starts at c. Nothing that is known is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from elastic.quant.sensitivity.layer_trace import LayerTrace, first, replaced_forwards

Quantize = Callable[[int], nn.Module]
"""The index of a layer -> the quantized layer."""
_CHUNK = 1 << 18


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """The cosine over the last dimension, in float64, summed over all others."""
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    chunks = -(-a.numel() // _CHUNK)
    parts = [_cosines(x.double(), y.double()).sum() for x, y in zip(a.chunk(chunks), b.chunk(chunks), strict=True)]
    return float(torch.stack(parts).sum())


@dataclass
class IncrementalForward:
    """f^(Q) on one batch, layer by layer, and on its way f^(Q + {p}) for each candidate p, as far as it is known."""

    trace: LayerTrace
    layers: Sequence[nn.Module]
    variants: Quantize
    keeps: bool = True
    """Whether ways are kept when their candidate was not chosen."""

    chosen: set[int] = field(default_factory=set)
    _ways: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.states = list(self.trace.states)
        self.logits = self.trace.logits
        self.tokens = self.trace.ids.numel()

    def local(self, p: int) -> tuple[float, float]:
        """LTS and LRS of layer p, each summed over the tokens. Nothing may be chosen yet."""
        given, full = self.trace.states[p], self.trace.outputs[p]
        scores = cosine(full, given), cosine(full, self._step(p)[0])
        self.lost(p)
        return scores

    def attempt(self, p: int) -> torch.Tensor:
        """The logits with layer p among the chosen ones. No layer before p is run."""
        way = self._step(p)
        for i in range(p + len(way), len(self.layers)):
            layer = self.variants(i) if i in self.chosen else self.layers[i]
            way.append(self.trace.run(i, layer, way[-1]))
        return self.trace.head(way[-1])

    def choose(self, p: int, logits: torch.Tensor) -> None:
        """Layer p, which was attempted last with these logits, is quantized from now on."""
        self.chosen.add(p)
        self.states[p + 1 :] = self._ways.pop(p)
        self.logits = logits
        for candidate, way in self._ways.items():
            del way[max(0, p - candidate) :]

    def lost(self, p: int) -> None:
        """Layer p is not the best of this round."""
        if not self.keeps:
            self._ways.pop(p, None)

    def go_on_from(self, chosen: Sequence[int]) -> None:
        """As after `choose` for each of these layers."""
        self.chosen.update(chosen)
        self._ways.clear()
        for i in range(min(chosen, default=len(self.layers)), len(self.layers)):
            layer = self.variants(i) if i in self.chosen else self.layers[i]
            self.states[i + 1] = self.trace.run(i, layer, self.states[i])
        self.logits = self.trace.head(self.states[-1])

    def _step(self, p: int) -> list[torch.Tensor]:
        """The way of a candidate, at least to what it returns itself."""
        way = self._ways.setdefault(p, [])
        if not way:
            way.append(self.trace.run(p, self.variants(p), self.states[p]))
        return way


@dataclass
class FullForward:
    """The same for a model whose layers cannot run one by one: each candidate takes a pass through the whole model."""

    trace: LayerTrace
    layers: Sequence[nn.Module]
    variants: Quantize

    chosen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.logits = self.trace.logits
        self.tokens = self.trace.ids.numel()

    def local(self, p: int) -> tuple[float, float]:
        """LTS and LRS of layer p, each summed over the tokens, from a plain pass in which layer p is run twice."""
        layer, quantized, found = self.layers[p], self.variants(p), []
        full = layer.forward

        def both(*args: Any, **kwargs: Any) -> Any:
            found.append(quantized(*args, **kwargs))
            return full(*args, **kwargs)

        with replaced_forwards({layer: both}):
            self.trace.whole({})
        return cosine(self.trace.outputs[p], self.trace.states[p]), cosine(self.trace.outputs[p], first(found[0]))

    def attempt(self, p: int) -> torch.Tensor:
        """The logits with layer p among the chosen ones."""
        return self.trace.whole({q: self.variants(q) for q in (*self.chosen, p)})

    def choose(self, p: int, logits: torch.Tensor) -> None:
        """Layer p, which was attempted with these logits, is quantized from now on."""
        self.chosen.add(p)
        self.logits = logits

    def lost(self, p: int) -> None:
        """Layer p is not the best of this round."""

    def go_on_from(self, chosen: Sequence[int]) -> None:
        """As after `choose` for each of these layers."""
        self.chosen.update(chosen)
        self.logits = self.trace.whole({q: self.variants(q) for q in chosen})


def _cosines(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    squares = torch.linalg.vecdot(a, a) * torch.linalg.vecdot(b, b)
    return torch.clamp(torch.linalg.vecdot(a, b) / squares.clamp(min=1e-300).sqrt(), -1, 1)
