"""What a model loses with some of its layers quantized, for many sets of layers at once."""

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
    """The score of the logits, [sequences, tokens, vocabulary], for each set of quantized layers.

    What sets have in common up to a layer is run once.
    """
    if trace.why_not_alone(quantize(0), IncrementalForward(trace, layers, quantize).attempt(0)) is not None:
        return {s: score(trace.whole({p: quantize(p) for p in s})) for s in map(frozenset, sets)}
    found: dict[Layers, Score] = {}

    def visit(i: int, hidden: torch.Tensor, below: list[Layers]) -> None:
        if i == len(layers):
            found[below[0]] = score(trace.head(hidden))
            return
        for quantized in (False, True):
            here = [s for s in below if (i in s) == quantized]
            if here:
                visit(i + 1, trace.run(i, quantize(i) if quantized else layers[i], hidden), here)

    visit(0, trace.states[0], sorted({frozenset(s) for s in sets}, key=sorted))
    return found


def prefixes(order: Sequence[int]) -> list[Layers]:
    """The sets of quantized layers on the way through an order: none, the first, ... all."""
    return [frozenset(order[:k]) for k in range(len(order) + 1)]


def nats(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The mean negative log-likelihood of each sequence's tokens after its first, float64 [sequences]."""
    rows = [
        nn.functional.cross_entropy(row[:-1].float(), own[1:].to(row.device), reduction="none").double().mean()
        for row, own in zip(logits, ids, strict=True)
    ]
    return torch.stack(rows)
