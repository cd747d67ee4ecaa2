"""Layers of an instance change their rank while the instance serves: keys and values are copied in rounds."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from elastic.cluster.control.stage_questions import (
    BeginExchange,
    CopyLayers,
    EndExchange,
    FlipLayers,
    GiveUpLayers,
    LayersMemory,
    PrepareLayers,
    WrittenBlocks,
)
from elastic.cluster.fleet.groups.ranks import Ranks
from elastic.cluster.fleet.groups.transition import LayerFlip
from elastic.config import require
from elastic.engines.core.kv_state import LayersKV
from elastic.engines.pipeline.path import LayerPath
from elastic.errors import ElasticError

MOST_ROUNDS = 4


@dataclass(frozen=True)
class ExchangeForm:
    """How keys, values and weights go from rank to rank."""

    exchange: Literal["live", "stall"] = "live"
    """`live`: instances go on, but for the moment at which a layer flips. `stall`, the paper's form: they stop before
    the first copy and go on after the last flip. (KunServe, section 4.2)"""
    coordinated: bool = True
    """Whether copies go in chunks, and let pass what the ranks compute and send meanwhile. (KunServe, section 4.2)"""
    layers_per_step: int | None = None
    """How many layers of an instance change their rank at one pause of it, at the most; fewer where there is room for
    fewer. None: as many as there is room for. (AMOEBA, section 4.2.3)"""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for an unknown form."""
        require(self.exchange in ("live", "stall"), "exchange", self.exchange, "'live' or 'stall'")
        most = self.layers_per_step
        require(most is None or (type(most) is int and most >= 1), "layers_per_step", most, "a whole number, or None")


@dataclass(frozen=True)
class FlipDone:
    """What a flip cost."""

    path: LayerPath
    moved_bytes: int
    stalled_ms: float


def flip_layers(ranks: Ranks, path: LayerPath, flip: LayerFlip, *, coordinated: bool = True) -> FlipDone:
    """Have layers computed by another rank from now on. Whatever it raises, all is as before, unless a rank is lost.

    Raises `CapacityError` where there is no room, `StateError` for a copy that failed, `RankLost`.
    """
    shards, goal = flip.shards, path.moved(flip.shards, flip.target)
    exchange = ranks.ask(flip.home, BeginExchange(shards))
    prepared = False
    try:
        ranks.ask(flip.target, PrepareLayers(flip.home, shards, exchange))
        prepared = True
        moved_bytes, source = _copy(ranks, flip, coordinated, all_at_once=path.copies == 1)
        flipped = ranks.ask(flip.home, FlipLayers(goal, source if flip.source != flip.home else None))
    except ElasticError:
        _undo(ranks, flip, prepared)
        raise
    return FlipDone(goal, moved_bytes + flipped.copied_bytes, flipped.stalled_ms)


def _copy(ranks: Ranks, flip: LayerFlip, coordinated: bool, *, all_at_once: bool) -> tuple[int, LayersKV | None]:
    """Copy what there is, then what was written meanwhile, as long as it becomes less.

    Returns bytes, and where it lies, as far as that was asked. Of several copies of a layer, the home says also of what
    there is whose it is (`all_at_once`: there is one).
    """
    moved_bytes, before, source = 0, None, None
    if all_at_once:
        source = ranks.ask(flip.source, LayersMemory(flip.home, flip.shards))
        moved_bytes = ranks.ask(flip.target, CopyLayers(flip.home, flip.shards, source, coordinated=coordinated))
    for _ in range(MOST_ROUNDS):
        blocks = ranks.ask(flip.home, WrittenBlocks())
        count = sum(map(len, blocks))
        if not count:
            break
        source = ranks.ask(flip.source, LayersMemory(flip.home, flip.shards))  # with sectors that are new
        moved_bytes += ranks.ask(flip.target, CopyLayers(flip.home, flip.shards, source, blocks, coordinated))
        if before is not None and count >= before:
            break
        before = count
    return int(moved_bytes), source


def _undo(ranks: Ranks, flip: LayerFlip, prepared: bool) -> None:
    with suppress(ElasticError):  # it was lost, and the exchange with it
        ranks.ask(flip.home, EndExchange())
    if prepared:
        with suppress(ElasticError):
            ranks.ask(flip.target, GiveUpLayers(flip.home, flip.shards))
