"""The log of an instance: what its home sends, in order, to each rank that computes layers of it.

A rank does what the items say one after another; the home learns of an error by `Failed`. What an item is about is
ordered by that alone: a step behind a `Flip` is computed by the new path, one before it by the old one, and no rank
waits for another at it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from elastic.engines.core.block_pool import BlockMoves
from elastic.engines.core.kv_state import LayersKV
from elastic.engines.core.step import ScheduledChunk
from elastic.engines.pipeline.path import LayerPath


class LogConnection(Protocol):
    """One end of a log; `cluster.control.connection.Connection` is one. Messages come whole, once and in order."""

    def send(self, message: Any) -> None:
        """Send a message. Raises `StateError` after either end was closed."""

    def receive(self) -> Any:
        """Wait for the next message. Raises `EOFError` after an end, when all that was sent before has been received.

        Raises `StateError` for what is no message.
        """

    def close(self) -> None:
        """End it for both; whoever waits in `receive` returns. Can be called twice."""


class SectorRef(NamedTuple):
    """A sector of the home's KV cache: ranks have the same ones, each for its layers."""

    group: int
    sector: int


@dataclass(frozen=True)
class StepItem:
    """Compute a step: those of its layers that the rank has."""

    number: int
    epoch: int
    """Of the path that it is computed by. A rank refuses one that is not its own."""
    copy: int
    """Of the path's layers, the one that its sequences go by."""
    chunks: tuple[ScheduledChunk, ...]
    """With the blocks of a sequence that the rank has not heard of, all of them."""
    added: tuple[str, ...] = ()
    """Sequences that begin, or that it has not heard of."""
    removed: tuple[str, ...] = ()
    """Sequences that it can forget, before anything else."""
    mapped: tuple[SectorRef, ...] = ()
    """Sectors that the step's blocks may be in, mapped before it; they are within what the rank has allotted."""
    unmapped: tuple[SectorRef, ...] = ()
    """Sectors that were given back, before it, and before `mapped`."""


@dataclass(frozen=True)
class CopyItem:
    """Copy what was written since the last copy. The rank answers `Copied`; it has prepared, and knows the sectors."""

    shards: tuple[int, ...]
    """Of layers."""
    source: LayersKV
    blocks: tuple[tuple[int, ...], ...]
    """Of each group."""
    mapped: tuple[SectorRef, ...] = ()
    """Sectors that were mapped since it prepared."""
    unmapped: tuple[SectorRef, ...] = ()
    flips: bool = False
    """Whether the `FlipItem` follows without an answer, no step being in flight: a rank that could not copy ends."""


@dataclass(frozen=True)
class FlipItem:
    """From now on steps go by another path. Ranks keep what they have of shards that they compute no more: see
    `ReleaseItem`."""

    path: LayerPath
    sequences: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...] = ()
    """All live sequences and their blocks by group, for a rank that has a part in another copy than before."""


@dataclass(frozen=True)
class ReleaseItem:
    """Drop the keys and values of these shards, which other ranks compute: all of them have copied what they needed."""

    shards: tuple[int, ...]


@dataclass(frozen=True)
class ForgetItem:
    """Forget sequences, and map and unmap sectors, when no step may come soon."""

    removed: tuple[str, ...] = ()
    mapped: tuple[SectorRef, ...] = ()
    unmapped: tuple[SectorRef, ...] = ()


@dataclass(frozen=True)
class CopyBlocksItem:
    """Have blocks have what is in others, too, in the rank's layers. The rank answers `Copied`."""

    moves: BlockMoves


@dataclass(frozen=True)
class MoveBlocksItem:
    """Sequences have those blocks from now on: all ranks have copied them."""

    moves: BlockMoves


@dataclass(frozen=True)
class AskItem:
    """Say where the keys and values of shards lie, as of now: the rank answers `LayersKV`, or `QuestionRefused`."""

    shards: tuple[int, ...]


@dataclass(frozen=True)
class EndItem:
    """The rank computes no layer of the instance any more: its memory for it comes free."""


@dataclass(frozen=True)
class Copied:
    """Rank to home: what a `CopyItem` copied, in bytes; or why it could not."""

    nbytes: int
    error: str = ""


@dataclass(frozen=True)
class Located:
    """Rank to home, unasked: the pages of sectors that were mapped, before anything is computed in them.

    So that it is known where keys and values are when the rank is killed, and others can still read its memory.
    """

    position: int
    """The items that had been sent when the newest of these sectors were to be mapped."""
    pages: Mapping[int, Mapping[int, tuple[int, ...]]] = field(repr=False, hash=False)
    """Part of the KV cache -> sector -> its pages of the rank's place, in order."""


@dataclass(frozen=True)
class Failed:
    """Rank to home: a step could not be computed. Nothing of it is sampled."""

    number: int
    error: str


@dataclass(frozen=True)
class QuestionRefused:
    """Rank to home: why a question has no answer."""

    error: str


@dataclass(frozen=True)
class ExchangeStart:
    """The state of a home's memory and of its logs when layers begin to change their rank."""

    mapped: tuple[SectorRef, ...] = field(repr=False)
    positions: dict[str, int] = field(default_factory=dict, hash=False)
    """Rank -> the items that were sent to it by then."""


LogItem = (
    StepItem | CopyItem | FlipItem | ReleaseItem | ForgetItem | CopyBlocksItem | MoveBlocksItem | AskItem | EndItem
)
