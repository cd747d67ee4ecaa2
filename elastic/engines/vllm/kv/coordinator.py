"""The scheduler's side: how many sectors all ranks map, and how many blocks of them vLLM's scheduler may use.

Blocks are published when every rank has mapped their sectors, and withdrawn before any rank unmaps them (law 7). One
order is under way at a time; what a rank could not map, no rank keeps.
"""

from __future__ import annotations

from collections.abc import Iterable

from elastic.engines.vllm.agreement import ActionOrders
from elastic.engines.vllm.kv.admission import PromiseLedger
from elastic.engines.vllm.kv.capacity import BlockCapacity
from elastic.engines.vllm.kv.orders import Handshake, RankState, RequestEvent, StepOrders, StepReport, StepTokens
from elastic.engines.vllm.kv.prefixes import Weights
from elastic.errors import ConfigError


class CapacityCoordinator:
    """Decides before each step. A `ledger` that does not bind: vLLM admits requests as it does alone."""

    def __init__(self, capacity: BlockCapacity, ledger: PromiseLedger) -> None:
        self.capacity = capacity
        self.ledger = ledger
        self.promises = ledger if ledger.binding else None
        self.ranks: dict[int, RankState] = {}
        self.weights: list[Weights] = []
        """What each rank computes with, as it told last."""
        self.wakes = 0
        """How often ranks had asked to be looked at when all last told how they are."""
        self.settled = True
        """Whether every rank has carried out the last order."""
        self._target = self._most = 1  # sectors that all ranks may have, as `RankState` says
        self._has_more = False  # any rank, than `mapped`
        self.sequence = 0
        self.ordered = 0
        """Sectors of the last order."""
        self.mapped = 0
        """Sectors that every rank has, and keeps until it is told."""
        self.blocks_per_sector = 1
        self.moved_blocks = 0
        self.moving = False
        """Whether a scheduler moves cached blocks that are in the way, so that they need not be evicted."""

    def connect(self, handshakes: Iterable[Handshake]) -> None:
        """Begin with what the ranks have. Raises `ConfigError` where they cannot serve together, or not at all."""
        ranks = sorted(handshakes, key=lambda handshake: handshake.rank)
        sizes = {handshake.blocks_per_sector for handshake in ranks}
        if len(sizes) != 1:
            raise ConfigError(f"ranks have sectors of {sorted(sizes)} blocks; give all the same page size")
        self.blocks_per_sector = sizes.pop()
        guaranteed = min(handshake.guaranteed_sectors for handshake in ranks) * self.blocks_per_sector - 1
        if self.ledger.largest > guaranteed:
            raise ConfigError(
                f"a request as long as max_model_len needs {self.ledger.largest} blocks, and beside all weights the "
                f"budget has {max(0, guaranteed)}; lower max_model_len or raise the budget"
            )
        for rank in ranks:
            blocks = rank.state.mapped * self.blocks_per_sector - 1
            if rank.error and blocks < max(1, self.ledger.largest):
                raise ConfigError(
                    f"rank {rank.rank} has memory for {max(0, blocks)} blocks of KV cache, fewer than a request as "
                    f"long as max_model_len needs, though its budget allows more: {rank.error}"
                )
        self.ordered = min(handshake.state.mapped for handshake in ranks)
        self._hear({handshake.rank: handshake.state for handshake in ranks})

    def receive(self, report: StepReport) -> None:
        """Take in what ranks tell after a step."""
        newer = {rank: state for rank, state in report.ranks.items() if state.number >= self.ranks[rank].number}
        self._hear({**self.ranks, **newer})

    def next_orders(
        self, *, actions: ActionOrders | None = None, requests: Iterable[RequestEvent | StepTokens] = (), wakes: int = 0
    ) -> StepOrders:
        """Decide what all ranks do before the step that was just scheduled."""
        self._adjust()
        if self.settled:
            self._order()
        usable, actions = self.capacity.usable, actions or ActionOrders()
        return StepOrders(self.sequence, self.ordered, self.taken, usable, actions, tuple(requests), wakes)

    @property
    def taken(self) -> int:
        """Blocks that requests have, or were promised."""
        return max(self.capacity.used, 0 if self.promises is None else self.promises.total)

    @property
    def wanted(self) -> int:
        """Sectors for new requests: what every rank's limit allows, or what one alone needs."""
        alone = self.ledger.alone
        return max(1, self._target, min(self._sectors(alone), self._most) if alone else 0)

    @property
    def needed(self) -> int:
        """Sectors that there should be: requests that live keep what they were promised."""
        return max(self.wanted, self._sectors(self.promises.total) if self.promises is not None else 1)

    @property
    def room(self) -> int:
        """Blocks for all requests together, if one more enters."""
        return min(self.capacity.limit, self.wanted * self.blocks_per_sector) - 1

    @property
    def busy(self) -> bool:
        """Whether steps are needed though no request is there, or all that are there are paused.

        What waits for blocks that paused requests have is no reason.
        """
        if self.capacity.used:
            return self._working or self._next != self.mapped
        return self.settling or any(state.unsettled for state in self.ranks.values())

    @property
    def settling(self) -> bool:
        """Whether steps without requests change what is mapped, or end an action."""
        return self._working or self.needed != self.mapped

    @property
    def _working(self) -> bool:
        return not self.settled or any(state.working for state in self.ranks.values())

    def _sectors(self, blocks: int) -> int:
        """Count the sectors for so many blocks and the null block."""
        return -(-(blocks + 1) // self.blocks_per_sector)

    def _hear(self, ranks: dict[int, RankState]) -> None:
        """Go by what ranks told."""
        self.ranks, states = ranks, [state for _, state in sorted(ranks.items())]
        self.weights = [state.weights for state in states]
        self.wakes = min(state.wakes for state in states)
        self.settled = all(state.sequence == self.sequence for state in states)
        self._target, self._most = min(state.target for state in states), min(state.most for state in states)
        if self.settled:
            self.mapped = min(state.mapped for state in states)
        self._has_more = any(state.mapped > self.mapped for state in states)
        self._adjust()

    def _adjust(self) -> None:
        """Publish or withdraw blocks, by what is mapped everywhere."""
        self.capacity.set_limit(min(self.mapped, self.needed) * self.blocks_per_sector, evict=not self.moving)

    @property
    def _next(self) -> int:
        """Sectors for the next order: more are mapped, or those unmapped in which nothing is left."""
        kept = -(-self.capacity.end // self.blocks_per_sector)
        return self.needed if self.needed > self.mapped else kept

    def _order(self) -> None:
        """Order what is not mapped so, by all ranks: one that has more than the others is to unmap it."""
        sectors = self._next
        if sectors != self.mapped or self._has_more:
            self.sequence += 1
            self.settled = False
            self.ordered = sectors
            self.mapped = min(self.mapped, sectors)
