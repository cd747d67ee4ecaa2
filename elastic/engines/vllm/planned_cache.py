"""How vLLM lays out a KV cache of some bytes: up to 0.32 two functions say; from 0.33 on a platform and a model do."""

from __future__ import annotations

from importlib.util import find_spec

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

BUILDER = "vllm.v1.core.kv_cache_config_builder"


def planned_cache(vllm_config: VllmConfig, specs: dict[str, KVCacheSpec], nbytes: int) -> KVCacheConfig:
    """Return the largest cache of at most so many bytes; where the number of blocks is set, of that many."""
    if find_spec(BUILDER) is None:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

        return get_kv_cache_config_from_groups(vllm_config, get_kv_cache_groups(vllm_config, specs), nbytes)
    from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups_from_builder

    builder = get_kv_cache_config_builder(vllm_config)
    groups = get_kv_cache_groups_from_builder(builder, vllm_config, specs)
    smallest = builder.get_kv_cache_config_from_groups(vllm_config, groups, num_blocks=1)
    if not smallest.kv_cache_tensors:
        return smallest
    blocks = nbytes * smallest.num_blocks // smallest.kv_cache_tensors[0].size
    return builder.get_kv_cache_config_from_groups(vllm_config, groups, num_blocks=blocks)
