"""What sampling, log-probabilities and structured output cost a token, and what `n` answers of one prompt share.

    python benchmarks/sampling.py [--device cuda:0]

First the sampler alone, on random logits. Then the same requests in the same engine, paired: greedy ones, and ones that
ask for one thing more. All generate the same number of tokens (their grammars have no end before). Last four answers of
one request against four requests with its prompt, sent together: seconds, and bytes of the KV cache while all of them
are decoded. The grammars are over the tokenizer of the model that ships with Elastic, also where the model's vocabulary
is larger.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from common import arguments, budget, finish, llama, paired, ratio, show, table
from transformers import AutoModelForCausalLM, AutoTokenizer

import elastic
from elastic.assets import MODEL_DIR
from elastic.engines.base import Grammar, Output, Request, Sampling
from elastic.engines.continuous import ContinuousEngine
from elastic.engines.sampling import SamplingState, sample
from elastic.engines.structured import LlguidanceCompiler

NEW, PROMPT, ANSWERS = 32, 64, 4
SHARED_PROMPT = 512
JSON = Grammar("json_schema", '{"type": "array", "minItems": 1000, "items": {"type": ["string", "integer"]}}')
DRAWN = Sampling(1.0, seed=1)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"sampling": DRAWN},
    "top-k 50, top-p .95": {"sampling": Sampling(1.0, top_k=50, top_p=0.95, seed=1)},
    "penalties": {"sampling": Sampling(repetition_penalty=1.1, frequency_penalty=0.2)},
    "logprobs 5": {"logprobs": 5},
    "prompt logprobs 0": {"prompt_logprobs": 0},
    "JSON schema": {"grammar": JSON},
    "regex": {"grammar": Grammar("regex", "[a-z ]{1000,}")},
}


def sampler_alone(vocabulary: int, answers: int, device: str, rounds: int) -> dict[str, float]:
    """Return the microseconds that a token takes in `sample`, for answers of 256 + 64 tokens."""
    grammars, prompts = LlguidanceCompiler(AutoTokenizer.from_pretrained(MODEL_DIR)), Prompts(2048)
    logits = torch.randn(answers, vocabulary, device=device) * 3

    def work(options: dict[str, Any]) -> Callable[[], None]:
        request = Request(prompts.next(256), NEW, **options)
        compiled = "grammar" in options
        states = [
            SamplingState(request, i, matcher=grammars.matcher(options["grammar"]))
            if compiled
            else SamplingState(request, i, prompts.next(64))
            for i in range(answers)
        ]
        return lambda: sample(logits.clone(), states)

    ways = {name: options for name, options in WAYS.items() if "prompt_logprobs" not in options}
    times = paired({name: work(options) for name, options in ways.items()}, device, rounds)
    return {name: statistics.median(t) / answers * 1e6 for name, t in times.items()}


def serve(engine: ContinuousEngine, requests: Sequence[Request], seen: Callable[[Output], None] | None = None) -> None:
    """Serve requests that are all there at the beginning, to the last answer's end."""
    ended = threading.Semaphore(0)

    def listener(output: Output) -> None:
        if seen is not None:
            seen(output)
        if output.finish:
            assert output.finish == "length", output
            ended.release()

    for request in requests:
        engine.submit(request, listener)
    for _ in range(sum(request.n for request in requests)):
        ended.acquire()


class Prompts:
    """Prompts that no request had before, so that none is found in the cache."""

    def __init__(self, vocabulary: int) -> None:
        self._source, self._vocabulary = torch.Generator().manual_seed(0), vocabulary

    def next(self, tokens: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, self._vocabulary, (tokens,), generator=self._source).tolist())


def cost_a_token(
    engine: ContinuousEngine, prompts: Prompts, count: int, device: str, rounds: int
) -> dict[str, dict[str, Any]]:
    """Time `count` requests in each of the ways, against greedy ones."""

    def work(options: dict[str, Any]) -> Callable[[], None]:
        return lambda: serve(
            engine, [Request(prompts.next(PROMPT), NEW, ignore_eos=True, **options) for _ in range(count)]
        )

    times = paired({name: work(options) for name, options in WAYS.items()}, device, rounds, warmup=1)
    more = {name: [t - plain for t, plain in zip(times[name], times["greedy"], strict=True)] for name in WAYS}
    return {
        name: {
            "us_a_token": statistics.median(more[name]) / (count * NEW) * 1e6,
            "seconds_ratio": ratio(times[name], times["greedy"]),
        }
        for name in WAYS
    }


def sharing(engine: ContinuousEngine, prompts: Prompts, device: str, rounds: int) -> dict[str, Any]:
    """Compare four answers of one request with four requests of one prompt."""
    most: dict[str, int] = {}

    def work(name: str, answers: int) -> Callable[[], None]:
        def used() -> int:
            return sum(kv.used_bytes for kv in engine.runtime.status().kv)

        def run() -> None:
            prompt, before, peak = prompts.next(SHARED_PROMPT), used(), 0

            def seen(output: Output) -> None:
                nonlocal peak
                peak = max(peak, used() - before)

            asked = [
                Request(prompt, NEW, DRAWN, ignore_eos=True, n=answers, min_tokens=NEW)
                for _ in range(ANSWERS // answers)
            ]
            serve(engine, asked, seen)
            most[name] = peak

        return run

    works = {"one request": work("one request", ANSWERS), "requests": work("requests", 1)}
    times = paired(works, device, rounds, warmup=1)
    return {
        "seconds": {name: statistics.median(t) for name, t in times.items()},
        "seconds_ratio": ratio(times["requests"], times["one request"]),
        "kv_bytes": most,
    }


def measure(model: Any, counts: Sequence[int], device: str, rounds: int) -> dict[str, Any]:
    elastic.wrap(model, places=[f"{device}={budget(device, 2, 0.25)}"])
    grammars = LlguidanceCompiler(AutoTokenizer.from_pretrained(MODEL_DIR))
    prompts = Prompts(model.config.vocab_size)
    results: dict[str, Any] = {}
    with ContinuousEngine(model, grammars=grammars, max_requests=max(counts)) as engine:
        for count in counts:
            results[f"{count} requests"] = cost_a_token(engine, prompts, count, device, rounds)
        results["n=4"] = sharing(engine, prompts, device, rounds)
    with ContinuousEngine(model, share_prefixes=False, max_requests=ANSWERS) as engine:
        results["n=4, nothing shared"] = sharing(engine, prompts, device, rounds)
    elastic.unwrap(model)
    return results


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    device, cpu = options.device, options.device == "cpu"
    dtype = torch.float32 if cpu else torch.bfloat16
    models = {
        "2.6M": lambda: AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=dtype).to(device).eval(),
        "130M GQA": lambda: llama(4, dtype, device, quick=options.quick),
    }
    counts, rounds = (1,) if options.quick else (1, 16), 2 if options.quick else min(options.rounds, 5)
    results: dict[str, Any] = {}
    for vocabulary in (2048,) if options.quick else (2048, 32_000, 128_256):
        for answers in (1, 16):
            results[f"sampler, {vocabulary:,}, {answers}"] = sampler_alone(vocabulary, answers, device, options.rounds)
    ways = list(next(iter(results.values())))
    table(
        ["us a token: sampler", *ways], [[name, *(f"{us:.0f}" for us in of.values())] for name, of in results.items()]
    )
    print()
    costs, shares = [], []
    for name, make in models.items():
        results[name] = figures = measure(make(), counts, device, rounds)
        for count in counts:
            for way, cost in figures[f"{count} requests"].items():
                costs.append([name, count, way, f"{cost['us_a_token']:.0f}", show(cost["seconds_ratio"])])
        for kind in ("n=4", "n=4, nothing shared"):
            kib = [f"{size >> 10:,}" for size in figures[kind]["kv_bytes"].values()]
            shares.append([name, kind, *kib, show(figures[kind]["seconds_ratio"])])
    table(["model", "requests", "way", "us more a token", "seconds, of greedy's"], costs)
    print()
    table(["model", "engine", "KV KiB, one request", "KV KiB, four", "seconds, four over one"], shares)
    finish("sampling", device, results)


if __name__ == "__main__":
    main()
