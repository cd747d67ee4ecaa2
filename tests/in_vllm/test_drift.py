"""What is used of vLLM still has the parameters that it had: run on the newest version, it says what has drifted."""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from elastic import ConfigError
from elastic.engines.vllm.support import PROBES

USED: dict[str, dict[str, list[str]]] = {
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        "KVConnectorBase_V1.bind_gpu_block_pool": ["gpu_block_pool"],
        "KVConnectorBase_V1.build_connector_meta": ["scheduler_output"],
        "KVConnectorBase_V1.build_connector_worker_meta": [],
        "KVConnectorBase_V1.get_handshake_metadata": [],
        "KVConnectorBase_V1.get_mem_pool_context": [],
        "KVConnectorBase_V1.get_num_new_matched_tokens": ["request", "num_computed_tokens"],
        "KVConnectorBase_V1.has_pending_block_frees": [],
        "KVConnectorBase_V1.has_pending_push_work": [],
        "KVConnectorBase_V1.on_new_request": ["request"],
        "KVConnectorBase_V1.request_finished": ["request", "block_ids"],
        "KVConnectorBase_V1.set_xfer_handshake_metadata_pp_aware": ["metadata"],
        "KVConnectorBase_V1.take_events": [],
        "KVConnectorBase_V1.update_connector_output": ["connector_output"],
        "KVConnectorBase_V1.update_state_after_alloc": ["request", "blocks", "num_external_tokens"],
        "SupportsHMA.request_finished_all_groups": ["request", "block_ids"],
    },
    "vllm.v1.engine.core_client": {
        "AsyncMPClient._call_utility_async": ["method", "args", "engine"],
    },
    "vllm.v1.core.block_pool": {
        "BlockPool.get_new_blocks": ["num_blocks"],
        "BlockPool.get_num_free_blocks": [],
        "BlockPool.move_block_hashes": ["src_block", "dst_block"],
        "BlockPool._maybe_evict_cached_block": ["block"],
    },
    "vllm.v1.core.kv_cache_utils": {
        "FreeKVCacheBlockQueue.append": ["block"],
        "FreeKVCacheBlockQueue.get_all_free_blocks": [],
        "FreeKVCacheBlockQueue.prepend_n": ["blocks"],
        "FreeKVCacheBlockQueue.remove": ["block"],
        "KVCacheBlockCopy": ["src_block_id", "dst_block_id"],
        "get_kv_cache_config_from_groups": ["vllm_config", "kv_cache_groups", "available_memory"],
        "get_kv_cache_groups": ["vllm_config", "kv_cache_spec"],
    },
    "vllm.v1.core.sched.scheduler": {
        "Scheduler.finish_requests": ["request_ids", "finished_status"],
        "Scheduler.schedule": ["throttle_prefills"],
        "Scheduler.reset_prefix_cache": ["reset_running_requests", "reset_connector"],
    },
    "vllm.v1.kv_cache_interface": {
        "KVCacheTensor": ["size", "layers", "layer_stride", "block_stride", "offset", "host_resident"],
    },
    "vllm.v1.request": {
        "Request.update_block_hashes": [],
    },
    "vllm.v1.worker.utils": {
        "allocate_kv_cache": ["kv_cache_config", "device", "layout", "kernel_block_sizes"],
    },
    "vllm.v1.worker.gpu_worker": {
        "Worker.determine_available_memory": [],
        "Worker.execute_model": ["scheduler_output"],
        "Worker.load_model": ["load_dummy_weights"],
    },
    "vllm.v1.worker.cpu_worker": {
        "CPUWorker.determine_available_memory": [],
    },
}
"""Module -> name -> its first parameters, without `self`; later versions may add more behind them."""


def parameters(module: str, name: str) -> list[str]:
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return [p.name for p in inspect.signature(found).parameters.values() if p.name not in ("self", "_cls")]


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in USED.items() for name in names])
def test_parameters_have_not_drifted(module: str, name: str) -> None:
    expected = USED[module][name]
    assert parameters(module, name)[: len(expected)] == expected


@pytest.mark.parametrize("name", ["BlockPool", "FreeKVCacheBlockQueue"])
def test_all_that_is_used_of_the_block_pool_is_looked_for_at_the_start(name: str) -> None:
    used = {each.partition(".")[2] for names in USED.values() for each in names if each.startswith(f"{name}.")}
    assert [set(attributes) for probe, attributes in PROBES.items() if probe.endswith(f":{name}")] == [used]


def test_a_step_ends_with_the_events_of_the_connector() -> None:
    """The connector settles an idle engine there: blocks of ended requests are free by then."""
    from vllm.v1.core.sched.scheduler import Scheduler

    source = inspect.getsource(Scheduler.update_from_output)
    assert source.index("self.connector.take_events()") > source.index("self._free_request(")


def test_the_scheduler_is_the_one_that_vllm_would_take() -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from elastic.engines.vllm.scheduler import ElasticAsyncScheduler, ElasticScheduler

    class Derived(ElasticScheduler):
        """A user's own."""

    def made(cls: Any = ElasticScheduler, *, ahead: bool = False, **config: Any) -> type:
        settings = SimpleNamespace(
            scheduler_config=SimpleNamespace(async_scheduling=ahead), model_config=SimpleNamespace(model="m"), **config
        )
        return type(cls.__new__(cls, vllm_config=settings))

    assert made() is ElasticScheduler
    assert made(ahead=True) is ElasticAsyncScheduler
    assert made(Derived, ahead=True) is Derived, "its constructor would not be called else"
    assert ElasticAsyncScheduler._update_after_schedule is AsyncScheduler._update_after_schedule
    with pytest.raises(ConfigError, match="m generates by diffusion"):
        made(diffusion_config=object())


def test_a_pause_of_new_requests_keeps_those_that_run() -> None:
    """Those that wait are left alone by it while nothing has changed that could let one in."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler

    source = inspect.getsource(Scheduler.schedule)
    assert source.count("self._pause_state") == source.count("PauseState.") == 3
    assert "self._pause_state == PauseState.UNPAUSED:\n                    request_queue = self.waiting" in source
    assert {state.name for state in PauseState} == {"UNPAUSED", "PAUSED_NEW", "PAUSED_ALL"}


def test_the_tokens_of_a_request_are_one_list() -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    request = Request("r", [1, 2], SamplingParams(), None)
    output = request._output_token_ids
    request.append_output_token_ids(5)
    assert (output, request._output_token_ids is output) == ([5], True)
