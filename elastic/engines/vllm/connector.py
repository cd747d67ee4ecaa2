"""A KV connector that moves no KV: vLLM's public channel between its scheduler and its workers, here for pages.

In a worker it gives vLLM's one allocation our memory and reports; beside the scheduler it publishes and withdraws
blocks, and admits by promise. The worker carries orders out itself, before the step that they came with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Never

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

from elastic.engines.vllm.assembly import model_of
from elastic.engines.vllm.kv.orders import Handshake, StepOrders, StepReport
from elastic.engines.vllm.kv.sectors import KVSectors, blocks_per_sector, regions_of
from elastic.engines.vllm.kv.worker_channel import WorkerChannel
from elastic.engines.vllm.metrics import CapacityPromMetrics, CapacityStats
from elastic.engines.vllm.planned_cache import planned_cache
from elastic.engines.vllm.scheduler_side import SchedulerSide
from elastic.errors import StateError

KVConnectorMetadata.register(StepOrders)
KVConnectorWorkerMetadata.register(StepReport)
KVConnectorHandshakeMetadata.register(Handshake)


def _refuse_in_worker(*_: object, **__: object) -> Never:
    raise StateError("a worker's connector is asked what the scheduler decides; ask the one beside the scheduler")


class ElasticConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Has each of vLLM's calls go to what does it, in a worker or beside the scheduler, with no function between.

    It does so by attributes of the instance, which go before methods of a subclass.
    """

    requires_kv_delivery = False
    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = staticmethod("".format)
    """Move nothing: `"".format` takes whatever it is given, and is no Python code in a step."""
    has_connector_metadata = staticmethod(bool)
    """Returns False, as `bool()` does: no layer is to wait for keys and values. Each asks, so it is no Python code."""
    get_num_new_matched_tokens = update_state_after_alloc = build_connector_meta = _refuse_in_worker
    request_finished_all_groups = _refuse_in_worker
    """These are asked of the scheduler's side alone, which has its own."""
    build_kv_connector_stats = CapacityStats
    build_prom_metrics = CapacityPromMetrics

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.scheduler: SchedulerSide | None = None
        """What is kept beside the scheduler; None in a worker."""
        if role is KVConnectorRole.WORKER:
            model = model_of(vllm_config)
            sectors = KVSectors(model.kv, kv_cache_config.kv_cache_tensors, kv_cache_config.num_blocks)
            channel = WorkerChannel(model, sectors)
            model.channel = channel
            self.__dict__.update(
                get_mem_pool_context=sectors.allocation,
                get_handshake_metadata=channel.handshake,
                build_connector_worker_meta=channel.report,
                shutdown=channel.close,
            )
            return
        side = self.scheduler = SchedulerSide(vllm_config, kv_cache_config)
        self.__dict__.update(
            bind_gpu_block_pool=side.bind,
            set_xfer_handshake_metadata_pp_aware=side.connect,
            on_new_request=side.arrived,
            get_num_new_matched_tokens=side.may_enter,
            update_state_after_alloc=side.entered,
            request_finished=side.left,
            request_finished_all_groups=side.left,
            build_connector_meta=side.next_orders,
            update_connector_output=side.receive,
            take_events=side.step_ended,
            has_pending_block_frees=side.awaits_blocks,
            has_pending_push_work=side.busy,
            get_kv_connector_stats=side.new_figures,
            shutdown=side.close,
        )


def virtual_bytes(vllm_config: VllmConfig, specs: Mapping[str, KVCacheSpec], budget_bytes: int, page_bytes: int) -> int:
    """Return the largest KV cache, in bytes, that fits a budget and is cut into sectors of whole pages."""
    config = planned_cache(vllm_config, dict(specs), budget_bytes)
    if not config.kv_cache_tensors or not config.num_blocks:
        return budget_bytes
    block_bytes = config.kv_cache_tensors[0].size // config.num_blocks
    sector = blocks_per_sector([region.block_bytes for region in regions_of(config.kv_cache_tensors)], page_bytes)
    return int(config.num_blocks // sector * sector * block_bytes)
