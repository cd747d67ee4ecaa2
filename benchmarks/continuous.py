"""Continuous batching on elastic pages, nothing swapped, against transformers' own, with the same requests and budgets.

    python benchmarks/continuous.py [--device cuda:0] [--only MODEL …] [--earlier CHECKOUT] [--prepack]

All requests are there at the beginning; the time is until the last has ended. All have room for all of them, the same
block size, and the same most tokens in a batch; none shares prefixes. Models are read from a checkpoint, as users'
are. With `--earlier`, the engine of another checkout of Elastic takes part, in a process of its own. Targets: one
request alone at least as fast as with transformers' own, and 1.05 of the engine before this one.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from common import (
    EARLIER,
    EarlierCheckout,
    arguments,
    budget,
    compute_rounds,
    finish,
    llama,
    paired,
    ratio,
    show,
    table,
)
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import elastic
from elastic.assets import MODEL_DIR
from elastic.engines.base import Request
from elastic.engines.continuous import ContinuousEngine

BLOCK, BATCH_TOKENS, NEW = 32, 256, 32
MODELS = ["2.6M", "130M GQA", "7B"]
PAGE_SIZE = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"
"""Its name in this version of transformers."""


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
        if result is None:
            raise TimeoutError("transformers' batching has not answered for 60 s")
        tokens[result.request_id] = result.generated_tokens
    return [tokens[name] for name in names]


def of_130_millions(device: str, dtype: torch.dtype, *, quick: bool) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        llama(4, dtype, device, quick=quick).save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()


def of_seven_billions(device: str, *, quick: bool) -> Any:
    from large_model import build  # which earlier checkouts cannot import

    return build("quick" if quick else "7B", device)


def started(model: Any, device: str, **more: bool) -> ContinuousEngine:
    elastic.wrap(model, places=[f"{device}={budget(device, 2, 0.4)}"], **more)
    engine = ContinuousEngine(model, block_tokens=BLOCK, max_batch_tokens=BATCH_TOKENS, share_prefixes=False)
    engine.start()
    return engine


def compare(name: str, make: Callable[[], Any], count: int, options: Any, rounds: int) -> dict[str, Any]:
    wrapped, plain, device = make(), make(), options.device
    asked = prompts(count, wrapped.config.vocab_size)
    blocks = sum(-(-(len(p) + NEW) // BLOCK) for p in asked) + count
    engine = started(wrapped, device, **({"prepack": True} if options.prepack else {}))
    settings = ContinuousBatchingConfig(
        **{PAGE_SIZE: BLOCK},
        num_blocks=blocks,
        max_batch_tokens=BATCH_TOKENS,
        allow_block_sharing=False,
        use_async_batching=device != "cpu",  # on a GPU its other way reads inputs while they are written
    )
    generation = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with ExitStack() as stack:
        manager = stack.enter_context(
            plain.continuous_batching_context_manager(generation_config=generation, continuous_batching_config=settings)
        )
        same = statistics.mean(a == b for a, b in zip(ours(engine, asked), stock(manager, asked), strict=True))
        works = {"elastic": lambda: ours(engine, asked), "transformers": lambda: stock(manager, asked)}
        if options.earlier:
            works["earlier"] = stack.enter_context(EarlierCheckout(options, f"{name}/{count}")).round
        try:
            times = paired(works, device, rounds, warmup=1)
        except TimeoutError as error:  # as on an H100, with transformers 5.17
            print(f"{name}, {count} requests: {error}", flush=True)
            del works["transformers"]
            times = paired(works, device, rounds, warmup=1)
    engine.stop()
    elastic.unwrap(wrapped)
    return {
        "requests": count,
        "prepack": options.prepack,
        "tokens_per_s": {name: count * NEW / statistics.median(t) for name, t in times.items()},
        "throughput_ratio": ratio(times["transformers"], times["elastic"]) if "transformers" in times else None,
        "over_earlier": ratio(times["earlier"], times["elastic"]) if options.earlier else None,
        "same_continuations": same,
    }


def main() -> None:
    prepack = {"action": "store_true", "help": "multiply prepacked matrices; those of an earlier checkout are plain"}
    only = {"nargs": "*", "choices": MODELS, "default": MODELS, "help": "models to serve; 7B on a GPU alone"}
    requests = {"type": int, "nargs": "*", "default": [1, 16, 64]}
    options = arguments(__doc__.splitlines()[0], prepack=prepack, only=only, requests=requests, **EARLIER)
    device, cpu = options.device, options.device == "cpu"
    dtype = torch.float32 if cpu else torch.bfloat16
    models = {
        "2.6M": lambda: AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=dtype).to(device).eval(),
        "130M GQA": lambda: of_130_millions(device, dtype, quick=options.quick),
        "7B": lambda: of_seven_billions(device, quick=options.quick),
    }
    if options.round_of:
        name, count = options.round_of.split("/")
        model = models[name]()
        asked, engine = prompts(int(count), model.config.vocab_size), started(model, device)
        compute_rounds(lambda: ours(engine, asked))
        engine.stop()
        return
    rounds = min(options.rounds, 7)
    results: dict[str, Any] = {}
    rows = []
    for name in (name for name in options.only if not (cpu and name == "7B")):
        for count in (4,) if options.quick else options.requests:
            figures = results[f"{name}, {count}"] = compare(name, models[name], count, options, rounds)
            speed, earlier = figures["tokens_per_s"], figures["over_earlier"]
            rows.append(
                [
                    name,
                    count,
                    f"{speed['elastic']:.0f}",
                    f"{speed['transformers']:.0f}" if "transformers" in speed else "",
                    show(figures["throughput_ratio"]) if figures["throughput_ratio"] else "",
                    show(earlier) if earlier else "",
                    f"{figures['same_continuations']:.0%}",
                ]
            )
    table(["model", "requests", "tokens/s", "transformers", "ratio", "over the earlier", "same continuations"], rows)
    finish("continuous", device, results)


if __name__ == "__main__":
    main()
