"""Layers of an instance change their rank while the instance serves: keys and values are copied in rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from elastic import clock
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
from elastic.cluster.fleet.groups.group import LayerFlip
from elastic.cluster.fleet.groups.ranks import Ranks
from elastic.config import require
from elastic.engines.core.kv_state import LayersKV
from elastic.engines.pipeline.path import LayerPath, Way
from elastic.engines.pipeline.written_blocks import Blocks
from elastic.errors import ElasticError, require_count, require_flag

MOST_ROUNDS = 5


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
        require_flag(self.coordinated, "coordinated")
        require_count(self.layers_per_step, "layers_per_step")


@dataclass(frozen=True)
class FlipDone:
    """What a flip cost."""

    path: LayerPath
    moved_bytes: int
    copy_s: float
    """What it took to make room for them and to copy them, the end of it while the instance stood still."""
    stalled_ms: float


def flip_layers(
    ranks: Ranks, path: LayerPath, flips: Sequence[LayerFlip], *, coordinated: bool, hurried: bool = False
) -> FlipDone:
    """Have layers of an instance computed by other ranks from now on, all of them at one pause of it.

    Whatever it raises, also at one of several ranks, all is as before at all of them, unless a rank is lost. Raises
    `CapacityError` where there is no room, `StateError` for a copy that failed, `RankLost`.
    """
    home, coming = path.home, _by_target(flips)
    goal = path.redirected({shard: flip.target for flip in flips for shard in flip.shards})
    with ranks.flipping((home, *path.helpers, *goal.helpers)):
        exchange = ranks.ask(home, BeginExchange(tuple(shard for flip in flips for shard in flip.shards), hurried))
        prepared, began_s = list[str](), clock.now()
        try:
            asked = {
                rank: PrepareLayers(home, shards, exchange, coordinated, hurried) for rank, shards in coming.items()
            }
            _prepare(ranks, asked, prepared)
            moved_bytes, sources = _copy(ranks, flips, coordinated)
            copy_s = clock.now() - began_s
            told = {way: there for way, there in sources.items() if way[0] != home}
            flipped = ranks.ask(home, FlipLayers(goal, told, hurried))
        except ElasticError:
            _undo(ranks, home, {rank: coming[rank] for rank in prepared})
            raise
    copy_s += flipped.stalled_ms / 1e3
    return FlipDone(goal, moved_bytes + flipped.copied_bytes, copy_s, flipped.stalled_ms)


def _by_target(flips: Sequence[LayerFlip]) -> dict[str, tuple[int, ...]]:
    """Return the shards that come to each rank."""
    coming: dict[str, tuple[int, ...]] = {}
    for flip in flips:
        coming[flip.target] = (*coming.get(flip.target, ()), *flip.shards)
    return coming


def _prepare(ranks: Ranks, questions: Mapping[str, PrepareLayers], prepared: list[str]) -> None:
    """Have ranks make room side by side; note who has. Raises the first error when all have answered."""
    answers = ranks.answers(questions.items())
    errors = {rank: answer for rank, answer in zip(questions, answers, strict=True) if isinstance(answer, ElasticError)}
    prepared += [rank for rank in questions if rank not in errors]
    for error in errors.values():
        raise error


def _copy(ranks: Ranks, flips: Sequence[LayerFlip], coordinated: bool) -> tuple[int, dict[Way, LayersKV]]:
    """Copy what there is, then what was written meanwhile, as long as it becomes less; return bytes, and where it lies.

    Even if it is nothing: the home need not ask then, who waits for answers between two of its steps.
    """
    moved_bytes, before, sources = 0, None, dict[Way, LayersKV]()
    for _ in range(MOST_ROUNDS):
        blocks = ranks.ask(flips[0].home, WrittenBlocks())
        count = sum(map(len, blocks))
        if sources and not count:
            break
        copied, sources = _copy_blocks(ranks, flips, blocks, coordinated)
        moved_bytes += copied
        if before is not None and count >= before:
            break
        before = count
    return moved_bytes, sources


def _copy_blocks(
    ranks: Ranks, flips: Sequence[LayerFlip], blocks: Blocks, coordinated: bool
) -> tuple[int, dict[Way, LayersKV]]:
    """Have the ranks that layers go to copy blocks side by side; return bytes, and where all of it lies.

    Sources are asked each time: they may have sectors that are new. A part of the KV cache that several shards need
    comes from one of its ranks.
    """
    sources = ranks.ask_each([(flip.source, LayersMemory(flip.home, flip.shards)) for flip in flips])
    copies: list[tuple[str, CopyLayers]] = []
    taken: set[tuple[str, int]] = set()
    for flip, source in zip(flips, sources, strict=True):
        pages = {part: there for part, there in source.pages.items() if (flip.target, part) not in taken}
        taken.update((flip.target, part) for part in pages)
        if pages:
            there = replace(source, pages=pages)
            copies.append((flip.target, CopyLayers(flip.home, flip.shards, there, blocks, coordinated)))
    ways = [(flip.source, flip.target) for flip in flips]
    return sum(ranks.ask_each(copies)), dict(zip(ways, sources, strict=True))


def _undo(ranks: Ranks, home: str, prepared: Mapping[str, tuple[int, ...]]) -> None:
    with suppress(ElasticError):  # it was lost, and the exchange with it
        ranks.ask(home, EndExchange())
    for rank, shards in prepared.items():
        with suppress(ElasticError):
            ranks.ask(rank, GiveUpLayers(home, shards))
