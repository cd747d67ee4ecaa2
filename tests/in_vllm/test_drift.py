"""What is used of vLLM still has the parameters that it had: run on the newest version, it says what has drifted."""

from __future__ import annotations

import importlib
import inspect
import re
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from elastic import ConfigError
from elastic.engines.vllm import support
from elastic.engines.vllm.support import PROBES
from elastic.errors import BackendUnavailable

CONNECTOR = {
    "__init__": ["vllm_config", "role", "kv_cache_config"],
    "bind_gpu_block_pool": ["gpu_block_pool"],
    "build_connector_meta": ["scheduler_output"],
    "build_connector_worker_meta": [],
    "build_kv_connector_stats": ["data"],
    "build_prom_metrics": ["vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"],
    "get_handshake_metadata": [],
    "get_kv_connector_stats": [],
    "get_mem_pool_context": [],
    "get_num_new_matched_tokens": ["request", "num_computed_tokens"],
    "has_connector_metadata": [],
    "has_pending_block_frees": [],
    "has_pending_push_work": [],
    "on_new_request": ["request"],
    "request_finished": ["request", "block_ids"],
    "save_kv_layer": ["layer_name", "kv_layer", "attn_metadata"],
    "set_xfer_handshake_metadata_pp_aware": ["metadata"],
    "shutdown": [],
    "start_load_kv": ["forward_context"],
    "take_events": [],
    "update_connector_output": ["connector_output"],
    "update_state_after_alloc": ["request", "blocks", "num_external_tokens"],
    "wait_for_layer_load": ["layer_name"],
    "wait_for_save": [],
}
WORKER = {
    "compile_or_warm_up_model": [],
    "determine_available_memory": [],
    "execute_dummy_batch": [],
    "execute_model": ["scheduler_output"],
    "get_kv_cache_spec": [],
    "initialize_from_config": ["kv_cache_config"],
    "load_model": ["load_dummy_weights"],
    "reload_weights": ["args", "kwargs"],
    "shutdown": [],
    "update_weights": ["update_info"],
}
USED: dict[str, dict[str, list[str]]] = {
    "vllm.distributed.kv_transfer.kv_connector.factory": {
        "KVConnectorFactory.register_connector": ["name", "module_path", "class_name"],
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        **{f"KVConnectorBase_V1.{name}": given for name, given in CONNECTOR.items()},
        "SupportsHMA.request_finished_all_groups": ["request", "block_ids"],
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": {
        "KVConnectorPromMetrics": ["vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"],
        "KVConnectorPromMetrics.observe": ["transfer_stats_data", "engine_idx"],
        "KVConnectorStats": ["data"],
        "KVConnectorStats.aggregate": ["other"],
        "KVConnectorStats.is_empty": [],
        "KVConnectorStats.reduce": [],
        "KVConnectorStats.reset": [],
    },
    "vllm.distributed.kv_transfer.kv_transfer_state": {
        "ensure_kv_transfer_shutdown": [],
    },
    "vllm.model_executor.layers.linear": {
        "UnquantizedLinearMethod": [],
        "UnquantizedLinearMethod.apply": ["layer", "x", "bias"],
        "UnquantizedLinearMethod.process_weights_after_loading": ["layer"],
    },
    "vllm.model_executor.layers.quantization": {
        "register_quantization_config": ["quantization"],
    },
    "vllm.model_executor.layers.quantization.base_config": {
        "QuantizationConfig.from_config": ["config"],
        "QuantizationConfig.get_config_filenames": [],
        "QuantizationConfig.get_min_capability": [],
        "QuantizationConfig.get_name": [],
        "QuantizationConfig.get_quant_method": ["layer", "prefix"],
        "QuantizationConfig.get_supported_act_dtypes": [],
    },
    "vllm.v1.core.block_pool": {
        "BlockPool.get_new_blocks": ["num_blocks"],
        "BlockPool.get_num_free_blocks": [],
        "BlockPool.move_block_hashes": ["src_block", "dst_block"],
        "BlockPool._maybe_evict_cached_block": ["block"],
    },
    "vllm.v1.core.kv_cache_manager": {
        "KVCacheManager.get_block_ids": ["request_id"],
    },
    "vllm.v1.core.kv_cache_utils": {
        "FreeKVCacheBlockQueue.append": ["block"],
        "FreeKVCacheBlockQueue.get_all_free_blocks": [],
        "FreeKVCacheBlockQueue.prepend_n": ["blocks"],
        "FreeKVCacheBlockQueue.remove": ["block"],
        "KVCacheBlockCopy": ["src_block_id", "dst_block_id"],
    },
    "vllm.v1.core.sched.scheduler": {
        "Scheduler": ["vllm_config", "kv_cache_config", "structured_output_manager"],
        "Scheduler.finish_requests": ["request_ids", "finished_status"],
        "Scheduler.schedule": ["throttle_prefills"],
        "Scheduler.reset_prefix_cache": ["reset_running_requests", "reset_connector"],
    },
    "vllm.v1.engine.core_client": {
        "AsyncMPClient._call_utility_async": ["method", "args", "engine"],
    },
    "vllm.v1.kv_cache_interface": {
        "KVCacheTensor": ["size", "layers", "layer_stride", "block_stride", "offset", "host_resident"],
        "SlidingWindowSpec.max_admission_blocks_per_request": ["max_in_flight_tokens", "max_model_len"],
    },
    "vllm.v1.metrics.utils": {
        "create_metric_per_engine": ["metric", "per_engine_labelvalues"],
    },
    "vllm.v1.request": {
        "Request.update_block_hashes": [],
    },
    "vllm.v1.worker.cpu_worker": {f"CPUWorker.{name}": given for name, given in WORKER.items()},
    "vllm.v1.worker.gpu_worker": {f"Worker.{name}": given for name, given in WORKER.items()},
    "vllm.v1.worker.utils": {
        "allocate_kv_cache": ["kv_cache_config", "device", "layout", "kernel_block_sizes"],
    },
}
"""Module -> name -> its first parameters, without `self`; later versions may add more behind them."""
if find_spec("vllm.v1.core.kv_cache_config_builder") is None:
    USED["vllm.v1.core.kv_cache_utils"] |= {
        "get_kv_cache_config_from_groups": ["vllm_config", "kv_cache_groups", "available_memory"],
        "get_kv_cache_groups": ["vllm_config", "kv_cache_spec"],
    }
else:  # from 0.33 on
    BUILDER = "KVCacheConfigBuilder.get_kv_cache_config_from_groups"
    USED["vllm.v1.core.kv_cache_config_builder"] = {
        "get_kv_cache_config_builder": ["vllm_config"],
        BUILDER: ["vllm_config", "kv_cache_groups", "num_blocks"],
    }
    USED["vllm.v1.core.kv_cache_planning"] = {
        "get_kv_cache_groups_from_builder": ["builder", "vllm_config", "kv_cache_spec"],
    }
FIELDS: dict[str, set[str]] = {
    "vllm.config:VllmConfig": {
        "additional_config", "cache_config", "compilation_config", "instance_id", "kv_transfer_config", "load_config",
        "max_concurrent_batches", "max_in_flight_tokens", "model_config", "parallel_config", "scheduler_config",
        "speculative_config",
    },
    "vllm.v1.core.block_pool:BlockPool": {"blocks", "free_block_queue", "num_gpu_blocks"},
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": {"block_id", "block_hash", "ref_cnt"},
    "vllm.v1.core.sched.output:CachedRequestData": {"new_block_ids", "req_ids", "resumed_req_ids"},
    "vllm.v1.core.sched.output:SchedulerOutput": {
        "kv_cache_block_copies", "kv_connector_metadata", "new_block_ids_to_zero", "scheduled_cached_reqs",
        "total_num_scheduled_tokens",
    },
    "vllm.v1.core.sched.scheduler:Scheduler": {
        "connector", "kv_cache_config", "kv_cache_manager", "pause_state", "use_v2_model_runner", "vllm_config",
        "waiting",
    },
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": {"single_type_managers"},
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager": {"req_to_blocks"},
    "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher": {"keys_initialized"},
    "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager": {"_graphs_captured"},
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": {"cudagraph_manager"},
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": {"cudagraph_dispatcher"},
    "vllm.v1.kv_cache_interface:KVCacheConfig": {"kv_cache_groups", "kv_cache_tensors", "num_blocks"},
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": {"kv_cache_spec"},
    "vllm.v1.kv_cache_interface:MambaSpec": {"block_size", "num_speculative_blocks"},
    "vllm.v1.outputs:KVConnectorOutput": {"kv_connector_worker_meta"},
    "vllm.v1.request:Request": {
        "_output_token_ids", "arrival_time", "block_hashes", "cache_salt", "max_tokens", "num_preemptions",
        "num_prompt_tokens", "request_id", "resumable", "skip_reading_prefix_cache", "status",
    },
    "vllm.v1.worker.gpu_worker:Worker": {"device", "model_runner", "rank", "vllm_config"},
}  # fmt: skip
"""What is read or written of vLLM's objects."""


def parameters(module: str, name: str) -> list[str]:
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return [p.name for p in inspect.signature(found).parameters.values() if p.name not in ("self", "cls", "_cls")]


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in USED.items() for name in names])
def test_parameters_have_not_drifted(module: str, name: str) -> None:
    expected = USED[module][name]
    assert parameters(module, name)[: len(expected)] == expected


@pytest.mark.parametrize("where", list(FIELDS))
def test_fields_are_where_they_were(where: str) -> None:
    module, _, name = where.partition(":")
    kind = getattr(importlib.import_module(module), name)
    own = [base for base in kind.__mro__ if base.__module__.startswith("vllm")]
    source = "".join(map(inspect.getsource, own))
    fields = {
        field for field in FIELDS[where] if not re.search(rf"self\.{field}\b.*=|^    (def )?{field}\b", source, re.M)
    }
    assert fields == set()


@pytest.mark.parametrize("name", ["BlockPool", "FreeKVCacheBlockQueue", "KVConnectorBase_V1", "SupportsHMA"])
def test_all_that_is_used_of_the_block_pool_and_a_connector_is_looked_for_at_the_start(name: str) -> None:
    used = {each.partition(".")[2] for names in USED.values() for each in names if each.startswith(f"{name}.")}
    probed = [set(attributes) for probe, attributes in PROBES.items() if probe.endswith(f":{name}")]
    assert probed == [used - {"__init__"}]


def test_what_is_looked_for_at_the_start_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "require_known", lambda version: None)
    assert support.require_vllm.__wrapped__()
    monkeypatch.setattr(support, "EITHER", (("vllm.v1.core:gone", "vllm.gone:gone_too"), ("vllm.gone:lost",)))
    monkeypatch.setitem(PROBES, "vllm.v1.worker.utils:allocate_kv_cache", ("no_attribute",))
    with pytest.raises(BackendUnavailable, match=r"lacks allocate_kv_cache\.no_attribute, lost, which elastic uses"):
        support.require_vllm.__wrapped__()


@pytest.mark.parametrize("name", ["connector", "linear", "metrics", "plugin", "scheduler", "worker"])
def test_what_is_imported_is_there(name: str) -> None:
    importlib.import_module(f"elastic.engines.vllm.{name}")


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
    asked = [line.strip() for line in source.splitlines() if "_pause_state" in line]
    assert asked in (
        [
            "if self._pause_state == PauseState.PAUSED_ALL:",
            "if not preempted_reqs and self._pause_state == PauseState.UNPAUSED:",
        ],
        [  # from 0.32 on, which lets those in then that hold blocks
            "if self._pause_state == PauseState.PAUSED_ALL:",
            "if not preempted_reqs and self._pause_state != PauseState.PAUSED_ALL:",
            "if not request_queue and self._pause_state == PauseState.UNPAUSED:",
        ],
    )
    assert {state.name for state in PauseState} == {"UNPAUSED", "PAUSED_NEW", "PAUSED_ALL"}


def test_the_tokens_of_a_request_are_one_list() -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    request = Request("r", [1, 2], SamplingParams(), None)
    output = request._output_token_ids
    request.append_output_token_ids(5)
    assert (output, request._output_token_ids is output) == ([5], True)
