"""What one rank sends to the others in a step, and receives: hidden states between layers, and parts of them inside.

The ranks of one layer all do the same in the same order. Attention is gathered by heads before its last matrix, which
all ranks have; of a feed-forward network the outputs are added up. Both leave every rank with the same bits, so that
what follows is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from elastic.engines.pipeline.path import LayerPart, StagePlan
from elastic.engines.pipeline.transport import Key, StepFailure, Transport
from elastic.errors import StateError
from elastic.kvcache.score_terms import ScoreTerms
from elastic.planning.sharding.heads import heads_of

Awaited = tuple[str, torch.Tensor, Key]
"""Who sends it, a tensor like it, its key."""
Receive = Callable[[Sequence[Awaited]], list[torch.Tensor]]


class StepExchange:
    """The exchanges of one rank's forward pass of one step."""

    def __init__(self, plan: StagePlan, transport: Transport, step: int, receive: Receive) -> None:
        """`receive` waits for all that it is asked for, while other threads may compute."""
        self._plan, self._transport, self._step, self._receive = plan, transport, step, receive
        self._layer = self._site = 0
        self.part: LayerPart
        """This rank's of the present layer."""

    # -- between layers

    def begin(self, layer: int) -> LayerPart:
        """Begin a layer that this rank computes, and return its part of it."""
        self._layer, self._site, self.part = layer, 0, self._plan.layers[layer]
        return self.part

    def end(self, hidden: torch.Tensor) -> None:
        """End the present layer, and send what it returned to the ranks that need it, [1, tokens, hidden size]."""
        for rank in self._plan.sends.get(self._layer, ()):
            self._transport.send(rank, hidden, Key(self._step, self._layer + 1))
        self._layer += 1

    def hidden_for(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return what a layer is given, [1, tokens, hidden size]: another rank's, or else `hidden`."""
        if layer not in self._plan.receives:
            return hidden
        return self._receive([(self._plan.receives[layer], hidden, Key(self._step, layer))])[0]

    def fail(self, failure: StepFailure) -> None:
        """Tell the ranks that wait for this one, or will, that nothing comes."""
        for rank in self._plan.awaited_by(self._layer):
            with suppress(StateError):  # it has gone itself
                self._transport.fail(rank, self._step, failure)

    # -- inside a layer

    def summed(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum over the layer's ranks of tensors of any shape, one of each rank.

        They are added up in the order of the ranks' first shards, and rounded once.
        """
        wide = torch.promote_types(partial.dtype, torch.float32)
        total, *others = self._swap(partial, dict.fromkeys(self.part.shards, partial.shape)).values()
        total = total.to(wide)
        for other in others:
            total = total + other
        return total.to(partial.dtype)

    def gathered(self, heads: torch.Tensor, count: int) -> torch.Tensor:
        """Return all heads, [1, new, count, dim], of those of this rank's shards [1, new, own heads, dim]."""
        part = self.part
        theirs = {rank: _heads(shards, len(part.ranks), count, heads.device) for rank, shards in part.shards.items()}
        shapes = {rank: (*heads.shape[:2], some, heads.shape[3]) for rank, (some, _) in theirs.items()}
        everything = heads.new_empty(*heads.shape[:2], count, heads.shape[3])
        for rank, others in self._swap(heads, shapes).items():
            everything[:, :, theirs[rank][1]] = others
        return everything

    def _swap(self, own: torch.Tensor, shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        """Send a tensor to the layer's other ranks and return theirs, of these shapes, beside it, in order of ranks.

        A rank that has no element of it neither sends nor is waited for.
        """
        self._site += 1
        key = Key(self._step, self._layer, self._site)
        others = [rank for rank in shapes if rank != self._plan.rank]
        if own.numel():
            for rank in others:
                self._transport.send(rank, own, key)
        likes = {rank: own.new_empty(shapes[rank]) for rank in others}
        awaited = [(rank, like, key) for rank, like in likes.items() if like.numel()]
        came = dict(zip((rank for rank, *_ in awaited), self._receive(awaited), strict=True)) if awaited else {}
        tensors = {**likes, **came, self._plan.rank: own}
        return {rank: tensors[rank] for rank in shapes}


@dataclass(eq=False)
class ShardedCache:
    """An engine's cache as a forward pass sees it that shares layers with other ranks: all heads, few of them here."""

    cache: Any
    exchange: StepExchange

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        terms: ScoreTerms | None = None,
    ) -> torch.Tensor:
        """Attend in one layer; shapes as of `RequestSlice.attend`, of all heads."""
        part = self.exchange.part
        if part.whole:
            all_heads: torch.Tensor = self.cache.attend(layer, query, key, value, scaling, terms=terms)
            return all_heads
        heads = self.cache.attend(layer, query, key, value, scaling, part.own, len(part.ranks), terms)
        return self.exchange.gathered(heads, query.shape[1])


@lru_cache(maxsize=1024)
def _heads(shards: tuple[int, ...], of: int, count: int, device: torch.device) -> tuple[int, slice | torch.Tensor]:
    """Return how many of all heads are those of shards, and their index: a slice where they are side by side.

    Others are made once: a copy to a GPU would wait, each time, for all that is queued there.
    """
    places = heads_of(shards, of, count)
    if places and places[-1] - places[0] == len(places) - 1:
        return len(places), slice(places[0], places[-1] + 1)
    return len(places), torch.tensor(places, dtype=torch.int64, device=device)
