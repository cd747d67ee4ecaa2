"""Decoding with the elastic cache against DynamicCache and StaticCache, on one model's weights.

    python benchmarks/decode.py [--device cuda:0] [--earlier CHECKOUT]

Milliseconds per token at three contexts, for plain and grouped heads, in float32 and bfloat16. The caches are filled
with the same random keys and values. `static` is sized for the context and 64 tokens, `static 8k` for 8,192. Targets:
never slower than 0.95 of dynamic or static; at 8,192 >= 1.8 x dynamic in float32 MHA and >= 3.5 x in bfloat16 GQA;
>= 2 x a StaticCache sized for 8,192 but filled to 512 (CPU figures). Memory: <= 1.05 x the tokens' bytes plus a page
for each growing range. With `--earlier`, the cache of another checkout of Elastic takes part, in a process of its own.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from typing import Any

import torch
from common import (
    CACHE,
    EARLIER,
    EarlierCheckout,
    arguments,
    compute_rounds,
    finish,
    llama,
    paired,
    ratio,
    show,
    table,
    twin,
)
from transformers import DynamicCache, StaticCache

import elastic

STEPS = 3
ROOM = 256


def fill(cache: Any, config: Any, context: int, dtype: torch.dtype, device: str) -> Any:
    """Put `context` tokens into every layer."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, config.num_key_value_heads, context, config.head_dim)
    for layer in range(config.num_hidden_layers):
        keys, values = (torch.randn(shape, dtype=dtype, device=device, generator=generator) for _ in range(2))
        cache.update(keys, values, layer)
    return cache


def decode(model: Any, cache: Any, device: str) -> Any:
    """Some tokens, one after another."""
    token = torch.ones(1, 1, dtype=torch.long, device=device)

    def work() -> None:
        for _ in range(STEPS):
            model(token, **{CACHE: cache})

    return work


def measure(heads_kv: int, dtype: torch.dtype, contexts: list[int], options: Any) -> list[dict[str, Any]]:
    device = options.device
    plain = llama(heads_kv, dtype, device, quick=options.quick)
    wrapped = elastic.wrap(twin(plain), places=[f"{device}=6GiB"])
    results = []
    for context in contexts:
        caches = {
            "dynamic": (plain, DynamicCache(config=plain.config)),
            "static": (plain, StaticCache(config=plain.config, max_cache_len=context + ROOM)),
            "elastic": (wrapped, elastic.ElasticCache(wrapped)),
        }
        if context == contexts[0]:
            caches["static 8k"] = (plain, StaticCache(config=plain.config, max_cache_len=contexts[-1] + ROOM))
        for model, cache in caches.values():
            fill(cache, model.config, context, dtype, device)
        works = {name: decode(model, cache, device) for name, (model, cache) in caches.items()}
        with ExitStack() as stack:
            if options.earlier:
                case = f"{heads_kv}/{str(dtype).removeprefix('torch.')}/{context}"
                works["earlier"] = stack.enter_context(EarlierCheckout(options, case)).round
            times = paired(works, device, options.rounds)
        results.append(
            {
                "heads": "MHA" if heads_kv == 12 else "GQA",
                "dtype": str(dtype).removeprefix("torch."),
                "context": context,
                "ms": {name: 1e3 * statistics.median(t) / STEPS for name, t in times.items()},
                "speedup": {name: ratio(t, times["elastic"]) for name, t in times.items() if name != "elastic"},
                "memory": memory(wrapped, caches["elastic"][1], dtype),
            }
        )
        del works, caches, model, cache
        wrapped.elastic.kv.trim()
    elastic.unwrap(wrapped)
    return results


def compute_earlier(case: str, options: Any) -> None:
    """Decode with an elastic cache, filled to a context, when told to."""
    heads_kv, dtype, context = case.split("/")
    model = llama(int(heads_kv), getattr(torch, dtype), options.device, quick=options.quick)
    elastic.wrap(model, places=[f"{options.device}=6GiB"])
    cache = elastic.ElasticCache(model)
    fill(cache, model.config, int(context), model.dtype, options.device)
    compute_rounds(decode(model, cache, options.device))


def memory(model: Any, cache: Any, dtype: torch.dtype) -> dict[str, float]:
    """Physical pages that exist for the cache, over the bytes of the tokens it holds."""
    (pool,) = model.elastic.kv.memory.pools
    page = pool.pool.page_bytes
    layers = cache.layers
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    ranges = sum(g.rows for layer in layers for g in layer._lease.store.geometries)
    weights = sum(layer.pages for layer in model.elastic.weights.layers)
    created = (pool.pool.backend.created - weights) * page
    return {"held_bytes": held, "created_bytes": created, "bound_bytes": int(1.05 * held + ranges * page)}


def main() -> None:
    options = arguments(__doc__.splitlines()[0], **EARLIER)
    if options.round_of:
        compute_earlier(options.round_of, options)
        return
    contexts = [64, 256] if options.quick else [512, 2048, 8192]
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        for heads_kv in (12, 4):
            results += measure(heads_kv, dtype, contexts, options)
    rows = [
        [
            f"{r['dtype']} {r['heads']} {r['context']}",
            f"{r['ms']['elastic']:.1f}",
            *(
                f"{r['ms'][n]:.1f} ({show(r['speedup'][n])} x)" if n in r["ms"] else ""
                for n in ("dynamic", "static", "static 8k", "earlier")
            ),
            f"{r['memory']['created_bytes'] / r['memory']['held_bytes']:.3f}",
            r["memory"]["created_bytes"] <= r["memory"]["bound_bytes"],
        ]
        for r in results
    ]
    table(
        ["case", "elastic ms", "dynamic ms", "static ms", "static 8k ms", "earlier ms", "pages/held", "in bound"], rows
    )
    finish("decode", options.device, results)


if __name__ == "__main__":
    main()
