"""The books of an engine's requests: what they hold and may still need, so that all that are admitted can end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastic.kvcache.storage.admission import RequestDemand, reserved_sectors


class AdmissionLedger:
    """Demands of live requests, and of the largest one that waits. Guarded by the lock of the block memory.

    Sums are kept until `changed` or `sectors_changed` says that they may be others. `allocators` are transformers', one
    for each kind of layers; they have memory before the first question.
    """

    def __init__(self, allocators: Sequence[Any]) -> None:
        self._allocators = allocators
        self.none = (0,) * len(allocators)
        """No block of any kind."""
        self.most_tokens: dict[str, int] = {}
        """The most tokens of every request that was announced and has not ended."""
        self._waiting: set[str] = set()  # those of them that hold nothing yet
        self._demands: dict[str, RequestDemand] = {}  # of requests whose blocks have not changed since
        self._shared_version = 0  # of who shares what, when these were made
        self._promised: int | None = 0  # sectors; None: to be counted again
        self._reusable: list[int] | None = None  # sectors by allocator; None: to be counted again

    def announce(self, request: str, tokens: int) -> None:
        """Expect a request that will hold so many tokens at the most."""
        self.most_tokens[request] = tokens
        self._waiting.add(request)
        self._promised = None

    def end(self, request: str) -> None:
        """Forget a request, whose blocks were freed."""
        self.most_tokens.pop(request, None)
        self._waiting.discard(request)
        self.changed(request)

    def changed(self, request: str) -> None:
        """Note that the blocks of a request are not what they were."""
        if any(allocator.block_table.get(request) for allocator in self._allocators):
            self._waiting.discard(request)
        self._demands.pop(request, None)
        self._reusable = self._promised = None

    def sectors_changed(self) -> None:
        """Note that sectors were allocated or given back: what is reusable stays so."""
        self._promised = None

    def reusable_changed(self) -> None:
        """Note that blocks kept for reuse were taken or given up."""
        self._reusable = self._promised = None

    def sectors_for(self, tokens: int) -> int:
        """Count the sectors that one request of so many tokens needs for itself."""
        return self._reserved([RequestDemand(self.none, self._blocks_of(tokens))], self.none)

    def is_safe(self, request: str, blocks: Sequence[int], room: int) -> bool:
        """Return whether all that live could still end, one after another, if a request got these blocks of each kind.

        `room` is how many sectors are to be had.
        """
        others = [demand for name, demand in self._live_demands().items() if name != request]
        free = [free - taken for free, taken in zip(self._free_blocks(), blocks, strict=True)]
        return self._reserved([*others, self.demand(request, blocks)], free) <= room

    def promised_sectors(self) -> int:
        """Count the sectors that live requests must still get, or the largest waiting one, alone."""
        if self._promised is None:
            live = self._reserved(list(self._live_demands().values()), self._free_blocks())
            largest = max((self.most_tokens[name] for name in self._waiting), default=0)
            memory = self._allocators[0].pool.memory
            self._promised = max(live, self.sectors_for(largest) - memory.used_pages // memory.sector_pages)
        return self._promised

    def reusable_sectors(self) -> int:
        """Count the allocated sectors that hold only blocks kept for reuse."""
        return sum(self._reusable_by_allocator())

    def demand(self, request: str, more: Sequence[int]) -> RequestDemand:
        """Return the demand of a request that gets `more` blocks of each kind."""
        held, needed, shared = [], [], []
        totals = self._blocks_of(self.most_tokens[request])
        for allocator, extra, total in zip(self._allocators, more, totals, strict=True):
            table = allocator.block_table.get(request, ())
            shared.append(frozenset(block for block in table if block in allocator.ledger.shared_ref_counts))
            held.append(len(table) - len(shared[-1]) + extra)
            needed.append(max(0, total - len(table) - extra))
        return RequestDemand(tuple(held), tuple(needed), tuple(shared))

    def _live_demands(self) -> dict[str, RequestDemand]:
        """Return the demand of every request that holds blocks; those that did not change are not counted again."""
        version = sum(allocator.ledger.version for allocator in self._allocators)
        unchanged = self._demands if version == self._shared_version else {}
        names = {name for allocator in self._allocators for name in allocator.block_table}
        self._demands = {name: unchanged.get(name) or self.demand(name, self.none) for name in names}
        self._shared_version = version
        return self._demands

    def _reserved(self, demands: Sequence[RequestDemand], free_blocks: Sequence[int]) -> int:
        return reserved_sectors(demands, free_blocks, [allocator.blocks_per_sector for allocator in self._allocators])

    def _blocks_of(self, tokens: int) -> tuple[int, ...]:
        return tuple(allocator._compute_blocks_needed(0, tokens, 0) for allocator in self._allocators)

    def _free_blocks(self) -> list[int]:
        """Count by allocator the blocks in sectors that live requests need, those kept for reuse included."""
        return [
            a.pool.count_free_blocks(a.index) + len(a.ledger.cached_blocks) - reusable * a.blocks_per_sector
            for a, reusable in zip(self._allocators, self._reusable_by_allocator(), strict=True)
        ]

    def _reusable_by_allocator(self) -> list[int]:
        if self._reusable is None:
            self._reusable = [allocator.reusable_sectors() for allocator in self._allocators]
        return self._reusable
