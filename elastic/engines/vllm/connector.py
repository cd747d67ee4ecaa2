"""A KV connector that moves no KV: vLLM's public channel between its scheduler and its workers, here for pages.

In a worker it gives vLLM's one allocation our memory and reports; beside the scheduler it publishes and withdraws
blocks, and admits by promise. The worker carries orders out itself, before the step that they came with.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
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
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.request import Request

from elastic.engines.vllm.assembly import model_of
from elastic.engines.vllm.kv.orders import Handshake, StepOrders, StepReport
from elastic.engines.vllm.kv.sectors import KVSectors, blocks_per_sector, regions_of
from elastic.engines.vllm.kv.worker_channel import WorkerChannel
from elastic.engines.vllm.metrics import CapacityPromMetrics, CapacityStats
from elastic.engines.vllm.scheduler_side import SchedulerSide

KVConnectorMetadata.register(StepOrders)
KVConnectorWorkerMetadata.register(StepReport)
KVConnectorHandshakeMetadata.register(Handshake)


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
            self.channel = WorkerChannel(model, sectors)
            model.join(self.channel)
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

    has_connector_metadata = staticmethod(bool)
    """Returns False, as `bool()` does: no layer is to wait for keys and values. Each asks, so it is no Python code."""

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
        if self.scheduler is not None and not self.scheduler.requests:
            self.scheduler.step_ended()
        return ()

    def has_pending_block_frees(self) -> bool:
        """Whether a request without a block is to sit a step out, instead of another losing its own."""
        return self.scheduler is not None and self.scheduler.coordinator.blocks_coming

    def has_pending_push_work(self) -> bool:
        """Whether the engine is to go on stepping without requests."""
        return self.scheduler is not None and self.scheduler.busy

    # -- metrics

    def get_kv_connector_stats(self) -> CapacityStats | None:
        """Return the figures that have changed, None if none has."""
        side = self.scheduler
        return side.new_figures() if side is not None and side.figures_due else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, int] | None = None) -> CapacityStats:
        """Return figures as they came from another process."""
        return CapacityStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> CapacityPromMetrics:
        """Return the metrics for Prometheus."""
        return CapacityPromMetrics(*args)


def virtual_bytes(vllm_config: VllmConfig, specs: Mapping[str, KVCacheSpec], budget_bytes: int, page_bytes: int) -> int:
    """Return the largest KV cache, in bytes, that fits a budget and is cut into sectors of whole pages."""
    groups = get_kv_cache_groups(vllm_config, dict(specs))
    config = get_kv_cache_config_from_groups(vllm_config, groups, budget_bytes)
    if not config.kv_cache_tensors or not config.num_blocks:
        return budget_bytes
    block_bytes = config.kv_cache_tensors[0].size // config.num_blocks
    sector = blocks_per_sector([region.block_bytes for region in regions_of(config.kv_cache_tensors)], page_bytes)
    return int(config.num_blocks // sector * sector * block_bytes)
