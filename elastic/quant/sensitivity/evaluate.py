"""The loss of a model with some of its layers quantized, for many sets of layers at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import nn

from elastic.quant.sensitivity.incremental_forward import IncrementalForward
from elastic.quant.sensitivity.layer_trace import LayerTrace

Score = TypeVar("Score")
Layers = frozenset[int]


def score_sets(
    trace: LayerTrace,
    layers: Sequence[nn.Module],
    quantize: Callable[[int], nn.Module],
    sets: Iterable[Iterable[int]],
    score: Callable[[torch.Tensor], Score],
) -> dict[Layers, Score]:
    """Score the logits for each set of quantized layers.

    score: logits [sequences, tokens, vocabulary], in the dtype of the model -> anything. Layers that sets have in
    common at their beginning are run once.
    """
    if trace.shared_state_of(quantize(0), IncrementalForward(trace, layers, quantize).attempt(0)) is not None:
        return {s: score(trace.whole({p: quantize(p) for p in s})) for s in map(frozenset, sets)}
    scores: dict[Layers, Score] = {}

    def visit(i: int, hidden: torch.Tensor, candidates: list[Layers]) -> None:
        """Score the sets that agree on all layers before i, from hidden: [sequences, tokens, hidden]."""
        if i == len(layers):
            scores[candidates[0]] = score(trace.head(hidden))
            return
        for quantized in (False, True):
            alike = [s for s in candidates if (i in s) == quantized]
            if alike:
                visit(i + 1, trace.run(i, quantize(i) if quantized else layers[i], hidden), alike)

    visit(0, trace.states[0], sorted({frozenset(s) for s in sets}, key=sorted))
    return scores


def prefixes(order: Sequence[int]) -> list[Layers]:
    """Return the sets of quantized layers as an order proceeds: none, the first, ... all."""
    return [frozenset(order[:k]) for k in range(len(order) + 1)]


def nats(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean negative log-likelihood of each sequence's tokens after its first, in nats, float64 [sequences].

    logits: [sequences, tokens, vocabulary], any float dtype. ids: [sequences, tokens], int64.
    """
    rows = [
        nn.functional.cross_entropy(row[:-1].float(), tokens[1:].to(row.device), reduction="none").double().mean()
        for row, tokens in zip(logits, ids, strict=True)
    ]
    return torch.stack(rows)
