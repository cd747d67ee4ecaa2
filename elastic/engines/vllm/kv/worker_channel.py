"""The workers' side: a rank maps and unmaps sectors as it is told, and tells what its KV limit allows."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from typing import ClassVar, Protocol

from elastic.controller.sensors.request_metrics import RequestMetrics
from elastic.engines.vllm.agreement import RankAgreement, RankReport
from elastic.engines.vllm.kv.orders import (
    Handshake,
    RankState,
    RequestEvent,
    StepOrders,
    StepReport,
    StepTokens,
    find_orders,
)
from elastic.engines.vllm.kv.prefixes import Weights
from elastic.engines.vllm.kv.sectors import KVSectors
from elastic.errors import ElasticError
from elastic.hooks.forward_gate import ForwardGate
from elastic.kvcache.storage.pool import KVPool
from elastic.memory.backends.shared_file import share
from elastic.memory.pages.background import janitor
from elastic.memory.pages.finalizers import call_at_death
from elastic.types import SharedFile

logger = logging.getLogger(__name__)
RETRY_S = 1.0
"""After pages could not be mapped though the budget has them, none are asked for so long; then they are again."""


class ReportedModel(Protocol):
    """What is used of the model of a rank."""

    rank: int
    kv: KVPool
    gate: ForwardGate
    counters: RequestMetrics
    actions: RankAgreement
    weights: Callable[[], Weights]

    @property
    def working(self) -> bool:
        """Whether actions are under way, or ranks have something to agree on."""

    @property
    def waiting(self) -> bool:
        """Whether actions are deferred or not done, or a controller has layers to bring back."""

    def close(self) -> None:
        """Give all pages back."""


class WorkerChannel:
    """One rank's end. `before_step` and `report` are called by the thread that steps, sectors are mapped beside it."""

    local: ClassVar[dict[SharedFile | None, WorkerChannel]] = {}
    """Those of this process, by the file in their handshake."""

    def __init__(self, model: ReportedModel, sectors: KVSectors) -> None:
        self.model = model
        self.sectors = sectors
        self._wake_file = os.memfd_create("elastic-wakes", os.MFD_CLOEXEC)  # without a name: it goes with its users
        call_at_death(self, os.close, self._wake_file)
        self._shared_file = share(self._wake_file)
        self.on_change: Callable[[], object] = lambda: None
        """Called from any thread when there may be something to tell, though no step is under way."""
        self.used_bytes = self.capacity_bytes = 0
        self.weights = model.weights
        self._following = threading.Lock()
        self._sequence = self._wakes = 0
        self._mapping = self._closed = False
        self._failed = False  # less than RETRY_S ago
        self._error = ""  # of the last failure; empty: the last try had none
        self._told: RankState | None = None
        self._reports = 0
        self._looked: tuple[object, ...] = ()  # what differs where the state does, unless `changed` was called
        self._stale = True  # it was: there may be something else to tell
        model.kv.engine_usage = lambda: (self.used_bytes, self.capacity_bytes)
        self._map_to(self._state().target)
        self.local[self._shared_file] = self

    def handshake(self) -> Handshake:
        """Tell the scheduler's side what there is before the first step."""
        guaranteed = self.model.kv.limits.floor // self.sectors.sector_pages
        per_sector = self.sectors.blocks_per_sector
        return Handshake(self.model.rank, self._state(), per_sector, guaranteed, self._error, self._shared_file)

    def before_step(self, metadata: object) -> None:
        """Carry out the orders in a step's metadata, if there are any. No forward pass of this rank is under way."""
        orders = metadata if isinstance(metadata, StepOrders) else find_orders(metadata)
        if orders is None:
            return
        self._wakes = orders.wakes
        self.used_bytes = orders.used_blocks * self.sectors.block_bytes
        self.capacity_bytes = orders.capacity_blocks * self.sectors.block_bytes
        if any(orders.actions):
            self.model.actions.execute(orders.actions)
        if orders.requests:
            _count(self.model.counters, orders.requests)
        if orders.sequence > self._sequence:
            with self._following:
                if orders.sequence > self._sequence and not self._mapping:  # steps and `settle` are of two threads
                    self._follow(orders)

    def report(self) -> StepReport | None:
        """Tell how this rank is; None if that was told already, or it is closed.

        Most steps change nothing, and behind one every line of code is a cache miss: so little is looked at then, and
        without functions for it.
        """
        model, kv = self.model, self.model.kv
        orders = self._sequence, self._wakes, self._mapping, self._failed
        looked = *orders, kv.limits, kv.pool.free_pages, model.gate.commits, model.working
        if looked == self._looked and not (self._stale or model.actions.pending):
            return None
        self._looked, self._stale = looked, False  # before the state is read: what changes meanwhile is looked at again
        state = self._state(model.actions.report())
        if self._closed or state == self._told:
            return None
        self._told = state._replace(actions=None)  # those are news, also if they are the same again
        self._reports += 1
        return StepReport({model.rank: state._replace(number=self._reports)})

    def changed(self) -> None:
        """Note that the KV limit may have moved, or the model come to rest. Safe from any thread, under any lock."""
        self._stale = True
        janitor.submit(self.on_change)

    def wake(self) -> None:
        """Have the scheduler's side ask this rank again how it is: before an engine waits, or a request enters."""
        os.write(self._wake_file, b"!")

    def close(self) -> None:
        """Give the KV cache's pages back, and be forgotten. Can be called twice."""
        self._closed = True
        self.on_change = lambda: None
        self.local.pop(self._shared_file, None)
        self.sectors.close()

    def _follow(self, orders: StepOrders) -> None:
        if orders.sectors < self.sectors.mapped:
            self.sectors.unmap_to(orders.sectors)
        if orders.sectors == self.sectors.mapped:
            self._sequence = orders.sequence
            return
        self._mapping = True
        janitor.submit(lambda: self._map_beside(orders))

    def _map_beside(self, orders: StepOrders) -> None:
        """Map what was ordered, on a thread of its own, while requests run in the sectors that are there."""
        try:
            if not self._failed:
                self._map_to(orders.sectors)
        finally:
            self._sequence = orders.sequence
            self._mapping = False
            self.changed()

    def _map_to(self, sectors: int) -> None:
        """Map sectors, as far as there are pages."""
        try:
            while self.sectors.mapped < sectors and self.sectors.map():
                pass
            self._error = ""
        except ElasticError as error:
            if not self._error:  # a warning for all that follow
                logger.warning("%d of %d sectors of KV cache are mapped: %s", self.sectors.mapped, sectors, str(error))
            self._failed, self._error = True, str(error)
            retry = threading.Timer(RETRY_S, self._retry)
            retry.daemon = True
            retry.start()

    def _retry(self) -> None:
        """Ask for pages again, also where no step would."""
        self._failed = False
        self.changed()

    def _state(self, actions: RankReport | None = None) -> RankState:
        kv, sectors = self.model.kv, self.sectors
        with kv.lock:
            reachable = sectors.mapped
            if not self._failed:
                reachable = min(sectors.count, sectors.mapped + kv.pool.free_pages // sectors.sector_pages)
            target = min(reachable, kv.limits.open // sectors.sector_pages)
            most = min(reachable, kv.limits.maximum // sectors.sector_pages)
            mapped = sectors.mapped
        working = self.model.working or self._mapping
        unsettled = working or self.model.waiting or self._failed
        return RankState(self._sequence, mapped, target, most, unsettled, working, actions, self.weights(), self._wakes)


def _count(counters: RequestMetrics, events: Iterable[RequestEvent | StepTokens]) -> None:
    """Have the controller's counters know what happened to requests."""
    for event in events:
        if isinstance(event, StepTokens):
            counters.produced_together(event.tokens, event.at_s)
        elif event.what == "arrived":
            counters.arrived(event.request, event.tokens, event.at_s)
        elif event.what == "scheduled":
            counters.scheduled(event.request, event.at_s)
        elif event.what == "preempted":
            counters.preempted()
        else:
            counters.ended(event.request, event.what, event.at_s)
