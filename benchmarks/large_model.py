"""A model of 7 or 13 billion parameters on one GPU: what steps and actions cost there, and what these give.

    python benchmarks/large_model.py --device cuda:0 [--size 13B] [--only NAME …] [--rounds 5] [--keep FILE]

Llama 2's shapes in bfloat16, with random weights. Rows:

- `step`: a decode step of the wrapped model with its own cache, beside the plain one with transformers' `DynamicCache`
  and an exact `StaticCache`, over the same weights
- `actions`: half of the layers are released to host memory and restored, swapped to int4 and restored: seconds, the
  pause between two steps, bytes a second over those of a plain copy from page-locked memory; KV capacity by then
- `whole_drop`: all layers leave at once, without an exchange, and come back from a checkpoint: from the call until the
  pages are the cache's, the pause, microseconds a MiB, beside `cuMemUnmap` of as many pages (target: 5 ms)
- `drop`: two ranks on the GPU, a process each; one drops half of its layers, which the other computes for it, and takes
  them back, under six long requests (the row `exchange` of `drop.py`). Of 7B alone: two of 13B have no room beside KV
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import KEEP, SEED, Kept, arguments, budget, finish, paired, ratio, seconds, table, twin
from decode import ROOM, STEPS, decode, fill
from drop import FORMS, exchanged
from drop_alone import dropped_alone
from serving import flat, fleet, save_model, summary, warm_up
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import elastic
from elastic.memory.copy_engine import copy

SIZES = {
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "13B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
    "quick": {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8},
}


def build(size: str, device: str) -> LlamaForCausalLM:
    """Make a model on the device."""
    torch.manual_seed(SEED)
    config = LlamaConfig(vocab_size=32000, max_position_embeddings=8192, dtype=torch.bfloat16, **SIZES[size])
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)


def step(size: str, options: Any) -> dict[str, Any]:
    device, quick = options.device, size == "quick"
    plain = build(size, device)
    wrapped = elastic.wrap(twin(plain), places=[f"{device}={budget(device, 4, 0.45)}"])
    results = {}
    for context in (64,) if quick else (512, 4096):
        caches = {
            "dynamic": (plain, DynamicCache(config=plain.config)),
            "static": (plain, StaticCache(config=plain.config, max_cache_len=context + ROOM)),
            "elastic": (wrapped, elastic.ElasticCache(wrapped)),
        }
        works = {
            name: decode(model, fill(cache, model.config, context, model.dtype, device), device)
            for name, (model, cache) in caches.items()
        }
        times = paired(works, device, options.rounds)
        results[f"{context} tokens"] = {
            "ms": {name: 1e3 * statistics.median(took) / STEPS for name, took in times.items()},
            **{f"{name} over elastic": ratio(times[name], times["elastic"]) for name in ("dynamic", "static")},
        }
        del works, caches
        wrapped.elastic.kv.trim()
    prompt = torch.randint(3, 32000, (1, 64 if quick else 2048), device=device)
    times = paired({"plain": lambda: plain(prompt), "wrapped": lambda: wrapped(prompt)}, device, options.rounds)
    elastic.unwrap(wrapped)
    return {**results, "prefill over plain": ratio(times["wrapped"], times["plain"])}


def speed_of(model: Any, options: Any) -> dict[str, float]:
    """Return the milliseconds of a decode step and of a prefill as the model is now."""
    context = 64 if options.quick else 512
    cache = fill(elastic.ElasticCache(model), model.config, context, model.dtype, options.device)
    prompt = torch.randint(3, 32000, (1, 4 * context), device=options.device)
    works = {"step": decode(model, cache, options.device), "prefill": lambda: model(prompt)}
    times = paired(works, options.device, options.rounds)
    return {
        "step_ms": 1e3 * statistics.median(times["step"]) / STEPS,
        "prefill_ms": 1e3 * statistics.median(times["prefill"]),
    }


def actions(size: str, options: Any) -> dict[str, Any]:
    device = options.device
    model = build(size, device)
    begin = time.perf_counter()
    elastic.wrap(model, places=[f"{device}={budget(device, 4, 0.55)}"], variants=("int4",))
    wrapping_s = time.perf_counter() - begin
    runtime, layers = model.elastic, model.config.num_hidden_layers
    half = range(layers // 2, layers)
    full_bytes = runtime.weights.layers[0].nbytes * len(half)
    packed_bytes = runtime.weights.layers[0].with_variant("int4").nbytes * len(half)
    source = torch.empty(full_bytes // len(half), dtype=torch.uint8, pin_memory=device != "cpu")
    target = torch.empty_like(source, device=device)
    capacity = {"whole": runtime.kv.capacity_bytes}
    took: dict[str, list[float]] = {}
    pauses: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], Any]) -> None:
        took.setdefault(name, []).append(seconds(work, device))
        if name != "copy":
            pauses.setdefault(name, []).append(runtime.events()[-1].pause_ms)

    for _ in range(options.rounds + 1):
        timed("copy", lambda: [copy(target, source) for _ in half])
        timed("release", lambda: runtime.release(half))
        capacity["half released"] = runtime.kv.capacity_bytes
        timed("restore", lambda: runtime.restore(half))
        timed("swap to int4", lambda: runtime.swap(half, "int4"))
        capacity["half in int4"] = runtime.kv.capacity_bytes
        timed("restore from int4", lambda: runtime.restore(half))
    runtime.restore()
    speed = {"whole": speed_of(model, options)}
    for name, chosen in (("half in int4", half), ("all in int4", range(layers))):
        runtime.swap(chosen, "int4")
        speed[name] = speed_of(model, options)
    runtime.restore()
    runtime.check()
    elastic.unwrap(model)
    later = {name: values[1:] for name, values in took.items()}
    packed_copy = [value * packed_bytes / full_bytes for value in later["copy"]]
    return {
        "wrapping_s": wrapping_s,
        "bytes of half": full_bytes,
        "the same in int4": packed_bytes,
        "copy_gb_s": full_bytes / 1e9 / statistics.median(later["copy"]),
        "seconds": {name: summary(values) for name, values in later.items()},
        "first_s": {name: values[0] for name, values in took.items()},
        "pause_ms": {name: summary(values) for name, values in pauses.items()},
        "rate of restore over a copy's": ratio(later["copy"], later["restore"]),
        "rate of swap over a copy's": ratio(packed_copy, later["swap to int4"]),
        "speed": speed,
        "kv_capacity_gib": {name: nbytes / 2**30 for name, nbytes in capacity.items()},
    }


@contextmanager
def saved(size: str, device: str) -> Iterator[Path]:
    """Write a model, made on the device, to files that are there for a while."""
    heads = SIZES[size]["num_attention_heads"]
    with tempfile.TemporaryDirectory() as folder:
        yield save_model(Path(folder), device, torch.bfloat16, **SIZES[size], num_key_value_heads=heads)


def whole_drop(size: str, options: Any) -> dict[str, Any]:
    place = f"{options.device}#whole={budget(options.device, 4, 0.4)}"
    with saved(size, options.device) as path:
        if options.device != "cpu":
            torch.cuda.empty_cache()
        return dropped_alone(path, options.rounds, place=place, dtype=torch.bfloat16)


def drop(size: str, options: Any) -> dict[str, Any]:
    device, layers, quick = options.device, SIZES[size]["num_hidden_layers"], size == "quick"
    figures: dict[str, dict[str, float]] = {}
    with saved(size, device) as path:
        if device != "cpu":
            torch.cuda.empty_cache()
        places = [f"{device}#{number}={budget(device, 2, 0.4)}" for number in range(2)]
        engine = {"block_tokens": 32, "max_requests": 64, "max_batch_tokens": 1024}
        begin = time.perf_counter()
        with fleet(path, [(), ()], places=places, engine=engine, routing="round_robin", beat_timeout_s=20.0) as started:
            warm_up(started)
            starting_s = time.perf_counter() - begin
            for name in random.sample(["live", "stall"], 2):
                figures[name] = exchanged(started, FORMS[name], quick, range(layers // 2, layers), 2000)
                table([name, ""], list(flat(figures[name])))
    return {"starting_s": starting_s, **figures}


ROWS = {row.__name__: row for row in (step, actions, whole_drop, drop)}


def main() -> None:
    more = {
        "size": {"choices": ["7B", "13B"], "default": "7B"},
        "only": {"nargs": "*", "choices": list(ROWS), "help": "rows to take"},
        "keep": KEEP,
    }
    options = arguments(__doc__.splitlines()[0], **more)
    if options.size == "13B" and "drop" in (options.only or ()):
        sys.exit("--only drop: two ranks of 13B have no room for KV beside them on one GPU; use --size 7B")
    options.rounds = 1 if options.quick else min(options.rounds, 5)
    size = "quick" if options.quick else options.size
    results: dict[str, Any] = {"size": size}
    kept = Kept(options.keep)
    for name in options.only or [name for name in ROWS if name != "drop" or size != "13B"]:
        begin = time.perf_counter()
        results[name] = kept.take(f"{size}, {name}", partial(ROWS[name], size, options))
        table([f"{name}, {size} ({time.perf_counter() - begin:.0f} s)", ""], list(flat(results[name])))
        print(flush=True)
    finish("large_model", options.device, results)


if __name__ == "__main__":
    main()
