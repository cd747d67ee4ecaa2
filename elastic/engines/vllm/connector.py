"""A KV connector that moves no KV: vLLM's public channel between its scheduler and its workers, here for pages.

In a worker it gives vLLM's one allocation our memory and reports; beside the scheduler it publishes and withdraws
blocks, and admits by promise. The worker carries orders out itself, before the step that they came with.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MambaSpec
from vllm.v1.request import Request, RequestStatus

from elastic.engines.vllm.agreement import Coordinator
from elastic.engines.vllm.assembly import model_of
from elastic.engines.vllm.kv.admission import GroupDemand, PromiseLedger
from elastic.engines.vllm.kv.capacity import BlockCapacity
from elastic.engines.vllm.kv.coordinator import CapacityCoordinator
from elastic.engines.vllm.kv.orders import Handshake, RequestEvent, StepOrders, StepReport
from elastic.engines.vllm.kv.sectors import KVSectors, blocks_per_sector, regions_of
from elastic.engines.vllm.kv.worker_channel import WorkerChannel

KVConnectorMetadata.register(StepOrders)
KVConnectorWorkerMetadata.register(StepReport)
KVConnectorHandshakeMetadata.register(Handshake)

IDLE_S = 0.005
"""Between the steps of an engine without requests that waits for a rank."""


class ElasticConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Hands each of vLLM's calls to the side that this one is."""

    requires_kv_delivery = False

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.channel: WorkerChannel | None = None
        self.scheduler: SchedulerSide | None = None
        if role is KVConnectorRole.WORKER:
            model = model_of(vllm_config)
            sectors = KVSectors(model.kv, kv_cache_config.kv_cache_tensors, kv_cache_config.num_blocks)
            self.channel = model.channel = WorkerChannel(model, sectors)
        else:
            self.scheduler = SchedulerSide(vllm_config, kv_cache_config)

    # -- in a worker

    def get_mem_pool_context(self) -> AbstractContextManager[None] | None:
        """Have vLLM allocate its KV cache in our range."""
        return self.channel.sectors.allocation() if self.channel else None

    def get_handshake_metadata(self) -> Handshake | None:
        """Tell the scheduler's side what this rank has."""
        return self.channel.handshake() if self.channel else None

    def build_connector_worker_meta(self) -> StepReport | None:
        """Tell the scheduler's side what changed with this step."""
        return self.channel.report() if self.channel else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Load nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Save nothing."""

    def wait_for_save(self) -> None:
        """Save nothing."""

    def shutdown(self) -> None:
        """End either side."""
        if self.channel:
            self.channel.close()
        if self.scheduler:
            self.scheduler.close()

    # -- beside the scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take charge of how many of vLLM's blocks may be used."""
        if self.scheduler:
            self.scheduler.bind(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """Begin with what the ranks of all pipeline stages have."""
        if self.scheduler:
            self.scheduler.connect([m for m in metadata.values() if isinstance(m, Handshake)])

    def on_new_request(self, request: Request) -> None:
        """Note an arrival."""
        if self.scheduler:
            self.scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return 0, or None for a request that is to wait: vLLM then looks at the next one."""
        return (0 if self.scheduler is None or self.scheduler.may_enter(request) else None), False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """Promise a request the blocks that it may come to need."""
        if self.scheduler:
            self.scheduler.entered(request)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        """Take a promise back; the blocks are freed at once."""
        if self.scheduler:
            self.scheduler.left(request)
        return False, None

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        """Do the same in a model with several groups of layers."""
        return self.request_finished(request, [])

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        """Decide what the ranks do before the step that was scheduled."""
        assert self.scheduler is not None
        return self.scheduler.next_orders(idle=not scheduler_output.total_num_scheduled_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in the ranks' reports."""
        if self.scheduler and isinstance(connector_output.kv_connector_worker_meta, StepReport):
            self.scheduler.receive(connector_output.kv_connector_worker_meta)

    def take_events(self) -> tuple[()]:
        """Report no events; vLLM calls this at the end of a step, when the blocks of ended requests are free."""
        if self.scheduler:
            self.scheduler.step_ended()
        return ()

    def has_pending_block_frees(self) -> bool:
        """Whether a request without a block is to sit a step out, instead of another losing its own."""
        return self.scheduler is not None and self.scheduler.coordinator.blocks_coming

    def has_pending_push_work(self) -> bool:
        """Whether the engine is to go on stepping without requests."""
        return self.scheduler is not None and self.scheduler.busy


@dataclass
class _Told:
    """A request that lives, and what was told of it."""

    request: Request
    tokens: int = 0
    preemptions: int = 0


class SchedulerSide:
    """What is kept beside vLLM's scheduler: the coordinator, the requests that live, and what is told of them.

    `lock` keeps apart the thread that steps and, in an idle engine, the one that settles what a step would.
    """

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._promise = bool(extra.get("promise", True))
        self._counts = bool(extra.get("count_requests", True))
        self._wake_file: str | None = extra.get("wake_file")
        self._woken_ns = 0
        self._ledger = promise_ledger(vllm_config, kv_cache_config)
        self._requests: dict[str, _Told] = {}  # those that live
        self._events: list[RequestEvent] = []
        self._idle = True
        self._local: WorkerChannel | None = None
        self._agreement = Coordinator(vllm_config.parallel_config.world_size)
        self.lock = threading.RLock()
        self.coordinator: CapacityCoordinator

    def bind(self, pool: Any) -> None:
        """Begin with no block but vLLM's null block."""
        self.coordinator = CapacityCoordinator(BlockCapacity(pool), self._ledger if self._promise else None)

    def connect(self, handshakes: Sequence[Handshake]) -> None:
        """Begin with the blocks that the ranks have mapped."""
        self.coordinator.connect(handshakes)
        if len(handshakes) == 1 and (channel := WorkerChannel.local.get(handshakes[0].process)):
            self._local = channel
            channel.on_change = self.settle

    # -- requests

    def arrived(self, request: Request) -> None:
        """Note a request before it has any block."""
        with self.lock:
            self._idle = False
            self._requests[request.request_id] = _Told(request)
            arrived_s = time.perf_counter() - max(0.0, time.time() - request.arrival_time)
            self._tell("arrived", request, request.num_prompt_tokens, arrived_s)

    def may_enter(self, request: Request) -> bool:
        """Whether all that live, and this one, can still get every block that they may need."""
        promises = self.coordinator.promises
        return promises is None or promises.may_enter(request.request_id, _tokens(request), self.coordinator.room)

    def entered(self, request: Request) -> None:
        """Note that a request has its first blocks, or again some after it was preempted."""
        self._ledger.enter(request.request_id, _tokens(request))
        self._tell("scheduled", request)

    def left(self, request: Request) -> None:
        """Note that a request ends; its blocks are freed after this."""
        self._ledger.leave(request.request_id)
        told = self._requests.pop(request.request_id, None)
        if told is not None:
            self._tell_progress(told)
        aborted = request.status is RequestStatus.FINISHED_ABORTED
        self._tell("cancelled" if aborted else "completed", request)

    # -- steps

    def next_orders(self, *, idle: bool) -> StepOrders:
        """Decide what the ranks do before the step that was just scheduled."""
        with self.lock:
            self._woken_ns = self._last_wake()
            for told in self._requests.values():
                self._tell_progress(told)
            events, self._events = self._events, []
            before = self.coordinator.sequence
            orders = self.coordinator.next_orders(idle=idle, actions=self._agreement.orders(), requests=events)
        if idle and self.coordinator.sequence == before:
            time.sleep(IDLE_S)
        return orders

    def receive(self, report: StepReport) -> None:
        """Take in what ranks tell after a step."""
        with self.lock:
            for rank, state in report.ranks.items():
                if state.actions is not None:
                    self._agreement.receive(rank, state.actions)
            self.coordinator.receive(report)

    def step_ended(self) -> None:
        """Note the end of a step: without requests, what would need more steps is settled here."""
        if not self._requests:
            self._idle = True
            self.settle()

    def settle(self) -> None:
        """Do what steps would do for the one rank, if it lives in this process and no request is there.

        An engine in the caller's process takes no step while it has no request. Called from any thread.
        """
        channel = self._local
        if channel is None or not self._idle:
            return
        with self.lock:
            self.coordinator.capacity.withdraw_freed()
            while self._idle:
                before = self.coordinator.sequence
                channel.before_step(self.coordinator.next_orders(idle=True))
                report = channel.report()
                if report is not None:
                    self.coordinator.receive(report)
                elif self.coordinator.sequence == before:
                    return

    @property
    def busy(self) -> bool:
        """Whether steps are needed though no request is there."""
        return self.coordinator.busy or self._agreement.pending or self._last_wake() != self._woken_ns

    def close(self) -> None:
        """Be settled no more. Can be called twice."""
        if self._local is not None:
            self._local.on_change = lambda: None
            self._local = None

    def _last_wake(self) -> int:
        """Return when the wake file was last touched; 0: never."""
        try:
            return os.stat(self._wake_file).st_mtime_ns if self._wake_file else 0
        except FileNotFoundError:
            return 0

    def _tell_progress(self, told: _Told) -> None:
        """Tell of the tokens and preemptions of a request that were not told of yet."""
        request, tokens, preemptions = told.request, told.tokens, told.preemptions
        told.tokens, told.preemptions = request.num_output_tokens, request.num_preemptions
        if told.tokens > tokens:
            self._tell("produced", request, told.tokens - tokens)
        if told.preemptions > preemptions:
            self._tell("preempted", request)

    def _tell(self, what: Any, request: Request, tokens: int = 0, at_s: float | None = None) -> None:
        if self._counts:
            at_s = time.perf_counter() if at_s is None else at_s
            self._events.append(RequestEvent(what, request.request_id, tokens, at_s))


def promise_ledger(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> PromiseLedger:
    """Make the ledger of a model's groups of layers; for those that drop old tokens by vLLM's own bound."""
    longest = vllm_config.model_config.max_model_len
    speculative = vllm_config.speculative_config
    drafts = speculative.num_speculative_tokens if speculative is not None else 0
    groups = []
    for group in kv_cache_config.kv_cache_groups:
        spec, most, extra = group.kv_cache_spec, None, 0
        if hasattr(spec, "max_admission_blocks_per_request"):
            most = spec.max_admission_blocks_per_request(
                max_in_flight_tokens=vllm_config.max_in_flight_tokens, max_model_len=longest
            )
        if isinstance(spec, MambaSpec):
            extra = spec.num_speculative_blocks + 2  # the states before and after a step, kept for prefixes
        groups.append(GroupDemand(spec.block_size, most, extra))
    return PromiseLedger(groups, longest=longest, lookahead=1 + 2 * drafts)


def virtual_bytes(vllm_config: VllmConfig, specs: Mapping[str, KVCacheSpec], budget_bytes: int, page_bytes: int) -> int:
    """Return the largest KV cache, in bytes, that fits a budget and is cut into sectors of whole pages."""
    groups = get_kv_cache_groups(vllm_config, dict(specs))
    config = get_kv_cache_config_from_groups(vllm_config, groups, budget_bytes)
    if not config.kv_cache_tensors or not config.num_blocks:
        return budget_bytes
    block_bytes = config.kv_cache_tensors[0].size // config.num_blocks
    sector = blocks_per_sector([region.block_bytes for region in regions_of(config.kv_cache_tensors)], page_bytes)
    return int(config.num_blocks // sector * sector * block_bytes)


def _tokens(request: Request) -> int:
    """Count the tokens that a request may come to have."""
    return int(request.num_prompt_tokens + (request.max_tokens or 0))
