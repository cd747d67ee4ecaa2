"""Continuous batching on elastic pages, nothing swapped, against transformers' own, with the same requests and budgets.

    python benchmarks/continuous.py [--device cuda:0]

All requests are there at the beginning; the time is until the last has ended. Both have room for all of them, the same
block size, and the same most tokens in a batch; neither shares prefixes. Target: at least .98 of the throughput.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable
from typing import Any

import torch
from common import arguments, budget, finish, llama, paired, ratio, show, table
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import elastic
from elastic.assets import MODEL_DIR
from elastic.engines.base import Request
from elastic.engines.continuous import ContinuousEngine

BLOCK, BATCH_TOKENS, NEW = 32, 256, 32


def prompts(count: int, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(40, 256, (count,), generator=generator).tolist()
    return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def ours(engine: ContinuousEngine, asked: list[list[int]]) -> list[list[int]]:
    """Return the continuations."""
    ended, tokens = threading.Semaphore(0), [[] for _ in asked]

    def submit(i: int) -> None:
        def listener(output: Any) -> None:
            tokens[i].extend(output.tokens)
            if output.finish:
                ended.release()

        engine.submit(Request(tuple(asked[i]), NEW, ignore_eos=True), listener)

    for i in range(len(asked)):
        submit(i)
    for _ in asked:
        ended.acquire()
    return tokens


def stock(manager: Any, asked: list[list[int]]) -> list[list[int]]:
    names = manager.add_requests(asked, max_new_tokens=NEW)
    tokens = {}
    while len(tokens) < len(asked):
        result = manager.get_result(timeout=60)
        tokens[result.request_id] = result.generated_tokens
    return [tokens[name] for name in names]


def compare(make: Callable[[], Any], count: int, device: str, rounds: int) -> dict[str, Any]:
    wrapped, plain = make(), make()
    asked = prompts(count, wrapped.config.vocab_size)
    blocks = sum(-(-(len(p) + NEW) // BLOCK) for p in asked) + count
    elastic.wrap(wrapped, places=[f"{device}={budget(device, 2, 0.25)}"])
    engine = ContinuousEngine(wrapped, block_tokens=BLOCK, max_batch_tokens=BATCH_TOKENS, share_prefixes=False)
    engine.start()
    settings = ContinuousBatchingConfig(
        page_size=BLOCK, num_blocks=blocks, max_batch_tokens=BATCH_TOKENS, allow_block_sharing=False
    )
    generation = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with plain.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=settings
    ) as manager:
        same = statistics.mean(a == b for a, b in zip(ours(engine, asked), stock(manager, asked), strict=True))
        works = {"elastic": lambda: ours(engine, asked), "transformers": lambda: stock(manager, asked)}
        times = paired(works, device, rounds, warmup=1)
    engine.stop()
    elastic.unwrap(wrapped)
    return {
        "requests": count,
        "tokens_per_s": {name: count * NEW / statistics.median(t) for name, t in times.items()},
        "throughput_ratio": ratio(times["transformers"], times["elastic"]),
        "same_continuations": same,
    }


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    device, cpu = options.device, options.device == "cpu"
    dtype = torch.float32 if cpu else torch.bfloat16
    models = {
        "2.6M": lambda: AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=dtype).to(device).eval(),
        "130M GQA": lambda: llama(4, dtype, device, quick=options.quick),
    }
    rounds = min(options.rounds, 7)
    results: dict[str, Any] = {}
    rows = []
    for name, make in models.items():
        for count in (4,) if options.quick else (1, 16, 64) if name == "2.6M" or not cpu else (8, 24):
            figures = results[f"{name}, {count}"] = compare(make, count, device, rounds)
            speed = figures["tokens_per_s"]
            rows.append(
                [
                    name,
                    count,
                    f"{speed['elastic']:.0f}",
                    f"{speed['transformers']:.0f}",
                    show(figures["throughput_ratio"]),
                    f"{figures['same_continuations']:.0%}",
                ]
            )
    table(["model", "requests", "tokens/s", "transformers", "ratio", "same continuations"], rows)
    finish("continuous", device, results)


if __name__ == "__main__":
    main()
