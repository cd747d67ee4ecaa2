"""The KV cache in pages: caches for Hugging Face models, on the places of their layers, under one limit that moves.

Way in: `api.KV` (`model.elastic.kv`), `manager.KVMemory`, `hf_cache`. Actions, the runtime and engines import it; it
imports `elastic.memory` and the leaves.
"""
