"""Requests that move between engines with their keys and values: the part of an engine that gives and takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from elastic.engines.core.kv_state import KVFormat, KVReport, KVSource, SectorPages, SequenceKV
from elastic.engines.core.step import SequenceState


class EngineLoad(NamedTuple):
    """How much an engine has to do, and how much more it could hold."""

    running: int
    """Sequences that have blocks."""
    waiting: int
    """Sequences that were not in a step yet."""
    free_blocks: int
    """Blocks that could be given now, after what live sequences are promised; where groups of layers have blocks of
    several sizes, those of the first."""
    total_blocks: int
    """The same at the limit that is in force, with nothing there."""
    steps: int
    """Steps that were begun so far."""


class MovingRequests:
    """What a rank asks of its engine. Thread-safe; not for listeners, which run on the engine's own thread."""

    kv_format: KVFormat
    on_step: Callable[[KVReport], None] | None = None
    """Set before `start`: told what has changed after each step, once its outputs were told and before any block that
    came free has another owner; on the engine's thread, which waits for it."""

    def kv_source(self) -> KVSource | None:
        """Say where other processes of the host can read the KV cache; None: they cannot, it is on a GPU."""
        raise NotImplementedError

    def load(self) -> EngineLoad:
        """Return how much there is to do; as of a moment ago, if somebody changes the memory now."""
        raise NotImplementedError

    def locate(self, request: str) -> tuple[SequenceKV, ...]:
        """Say where the KV of a request's answers lies, of those that have blocks; between two steps."""
        raise NotImplementedError

    def sectors_of(self, sequences: Iterable[SequenceKV]) -> tuple[SectorPages, ...]:
        """Return the pages of the sectors in which blocks of sequences are."""
        raise NotImplementedError

    def receive(self, states: Sequence[SequenceState], kv: Sequence[SequenceKV], source: KVSource) -> int:
        """Copy the KV of a request that may come; return bytes."""
        raise NotImplementedError

    def give_up(self, request: str) -> None:
        """Free what was received for a request that does not come; unknown: nothing happens."""
        raise NotImplementedError

    def hand_over(self, request: str) -> tuple[tuple[SequenceState, ...], tuple[SequenceKV, ...]] | None:
        """Stop a request between two steps and hold its blocks; None: it is unknown or has ended."""
        raise NotImplementedError

    def release(self, request: str) -> None:
        """Free the blocks of a request that was handed over; unknown: nothing happens."""
        raise NotImplementedError

    def take_back(self, request: str) -> None:
        """Go on with a request that was handed over. Raises `StateError` if it was not."""
        raise NotImplementedError
