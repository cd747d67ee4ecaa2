"""What a wrapped model costs while nothing happens: decode steps and prefill beside the plain model.

    python benchmarks/overhead.py [--device cuda:0]

Two model objects over the same weights, one wrapped, both with the stock cache (filled beforehand, so that it is left
alone): the difference is the hooks. The microseconds of the hooks by themselves are timed too: they are far below the
spread of a step. Target: the interval of the paired ratio contains 1.00, or the hooks' share is <= 1 %.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from common import arguments, finish, llama, paired, ratio, seconds, show, table, twin
from transformers import DynamicCache

import elastic

STEPS = 5


def hook_microseconds(model: Any) -> float:
    """All hooks of one step, called by themselves."""
    cache = model(torch.ones(1, 4, dtype=torch.long, device=model.device)).past_key_values
    modules = [m for m in model.modules() if m._forward_pre_hooks]

    def step() -> None:
        for module in modules:
            kwargs = {"past_key_values": cache}
            for hook in module._forward_pre_hooks.values():
                hook(module, (), kwargs)
        for module in reversed(modules):
            for hook in module._forward_hooks.values():
                hook(module, (), kwargs, 1)

    times = [seconds(step, "cpu") for _ in range(2000)]
    return 1e6 * statistics.median(times[100:])


def steps(model: Any, cache: Any) -> Any:
    token = torch.ones(1, 1, dtype=torch.long, device=model.device)

    def work() -> None:
        for _ in range(STEPS):
            model(token, past_key_values=cache)

    return work


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    plain = llama(12, torch.float32 if options.device == "cpu" else torch.bfloat16, options.device, quick=options.quick)
    prompt = torch.ones(1, 256, dtype=torch.long, device=options.device)
    caches = [plain(prompt, past_key_values=DynamicCache(config=plain.config)).past_key_values for _ in range(2)]
    ours = elastic.wrap(twin(plain), places=[f"{options.device}=4GiB"])
    works = {"plain": steps(plain, caches[0]), "wrapped": steps(ours, caches[1])}
    decode = paired(works, options.device, 2 * options.rounds)
    prefill = paired({"plain": lambda: plain(prompt), "wrapped": lambda: ours(prompt)}, options.device, options.rounds)
    hooks = hook_microseconds(ours)
    step_us = 1e6 * statistics.median(decode["plain"]) / STEPS
    results = {
        "hooks_us_per_step": hooks,
        "step_us": step_us,
        "share": hooks / step_us,
        "decode_ratio": ratio(decode["wrapped"], decode["plain"]),
        "prefill_ratio": ratio(prefill["wrapped"], prefill["plain"]),
        "prefill_ms": 1e3 * statistics.median(prefill["plain"]),
    }
    elastic.unwrap(ours)
    table(
        ["hooks us/step", "share of step", "decode wrapped/plain", "prefill wrapped/plain"],
        [[f"{hooks:.1f}", f"{hooks / step_us:.3%}", show(results["decode_ratio"]), show(results["prefill_ratio"])]],
    )
    finish("overhead", options.device, results)


if __name__ == "__main__":
    main()
