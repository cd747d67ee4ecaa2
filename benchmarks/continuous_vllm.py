"""The library's own engine beside vLLM: the same model, requests and arrivals, each a process of its own.

    python benchmarks/random_model.py --shape 100m --out build/models/100m
    python benchmarks/continuous_vllm.py --model build/models/100m [--threads 2] [--rounds 3] [--prepack]
    python benchmarks/continuous_vllm.py --model build/models/100m --trace FILE --token-scale 0.25 [--rate 2]

Run it with the venv of `make test-vllm`. Threads are not bound: on a busy machine vLLM's binding costs more than what
is compared. The processes of a round take turns, one computing at a time; a turn is a batch of 16 requests of 32 + 64
tokens that are there at the beginning, then an open loop: Poisson arrivals of such requests, drawn once, or the densest
part of a trace, by the clock. Tokens are greedy, in float32; those of a batch must be the same but for ties. Neither
engine shares prefixes or makes text. vLLM is eager; with `--compiled` as it is by default. Targets: 1.0 of vLLM's
tokens per second with one thread and with two, P95 of the time to first token no worse.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from common import SEED, finish, percentiles, ratio, show, table
from transformers import AutoModelForCausalLM
from vllm_engine import LONGEST, MODEL, OUTPUT, PROMPT, batch_prompts, densest_part, run_round, take_turns

import elastic
from elastic.bench.traces.generator import Fixed, Poisson, generate
from elastic.bench.traces.prompts import random_prompts
from elastic.engines.base import Listener, Output, Request
from elastic.engines.continuous import ContinuousEngine

VLLM, OWN = "vLLM", "ContinuousEngine"
KINDS = (VLLM, OWN)
VOCABULARY = 400
"""Of prompts."""
MOST_REQUESTS = 64
"""That are computed at a time."""
IDLE_S = 2.0
"""Behind a turn: what an engine does while it is idle, as capturing graphs, is not to be beside the other's turn."""
TIE = 1e-4
"""The difference of two logits, of the largest, below which sums in another order may choose the other one."""


class Arrival(NamedTuple):
    """A request, and when it comes."""

    at_s: float
    prompt: Sequence[int]
    output_tokens: int


class Answers(NamedTuple):
    """What came of arrivals, each in its order."""

    tokens: list[list[int]]
    ttft_s: list[float]
    """From when it should have come to its first token."""
    seconds: float
    """Until all had ended."""


class Player(Protocol):
    """Offers requests to an engine."""

    def play(self, arrivals: Sequence[Arrival]) -> Answers:
        """Offer requests by the clock, as they should come; return when all have ended."""


class VLLMPlayer:
    """vLLM, stepped in this thread."""

    def __init__(self, model: str, *, compiled: bool) -> None:
        from vllm import LLM

        sizes = {"max_model_len": LONGEST, "max_num_seqs": MOST_REQUESTS}
        llm = LLM(model, dtype="float32", enforce_eager=not compiled, enable_prefix_caching=False, **sizes)
        self._engine: Any = llm.llm_engine

    def play(self, arrivals: Sequence[Arrival]) -> Answers:
        engine, coming, start = self._engine, deque(enumerate(arrivals)), time.perf_counter()
        answers = Answers([[] for _ in arrivals], [0.0] * len(arrivals), 0.0)
        while coming or engine.has_unfinished_requests():
            while coming and coming[0][1].at_s <= time.perf_counter() - start:
                self._add(*coming.popleft())
            if not engine.has_unfinished_requests():
                time.sleep(0.001)
                continue
            for output in engine.step():
                number = int(output.request_id)
                if not answers.tokens[number]:
                    answers.ttft_s[number] = time.perf_counter() - start - arrivals[number].at_s
                answers.tokens[number] = list(output.outputs[0].token_ids)
        return answers._replace(seconds=time.perf_counter() - start)

    def _add(self, number: int, arrival: Arrival) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=arrival.output_tokens, temperature=0, ignore_eos=True, detokenize=False)
        self._engine.add_request(str(number), {"prompt_token_ids": list(arrival.prompt)}, sampling)


class OwnPlayer:
    """The library's engine, which has a thread of its own."""

    def __init__(self, model: str, *, budget: str, prepack: bool) -> None:
        wrapped = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        elastic.wrap(wrapped, places=[f"cpu={budget}"], prepack=prepack)
        self._engine = ContinuousEngine(wrapped, max_requests=MOST_REQUESTS, share_prefixes=False)
        gc.collect()
        gc.freeze()  # as vLLM's engine process does, and `elastic serve`
        self._engine.start()

    def play(self, arrivals: Sequence[Arrival]) -> Answers:
        ended, start = threading.Semaphore(0), time.perf_counter()
        answers = Answers([[] for _ in arrivals], [0.0] * len(arrivals), 0.0)

        def listener(number: int) -> Listener:
            def listen(output: Output) -> None:
                if output.tokens and not answers.tokens[number]:
                    answers.ttft_s[number] = output.at_s - start - arrivals[number].at_s
                answers.tokens[number].extend(output.tokens)
                if output.finish is not None:
                    ended.release()

            return listen

        for number, arrival in enumerate(arrivals):
            time.sleep(max(0.0, start + arrival.at_s - time.perf_counter()))
            request = Request(tuple(arrival.prompt), arrival.output_tokens, ignore_eos=True)
            self._engine.submit(request, listener(number))
        for _ in arrivals:
            ended.acquire()
        return answers._replace(seconds=time.perf_counter() - start)


def main() -> None:
    options = _options()
    if options.child:
        _child(options)
        return
    random.seed(SEED)
    results: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    for _ in range(options.rounds):
        run_round(KINDS, results, options.turns, options.threads)
    same = same_tokens(options.model, *(results[kind][0]["tokens"] for kind in KINDS))
    summary = {kind: _figures(results[kind], results[VLLM]) for kind in KINDS}
    rows = [
        [kind, *(show(figure) if isinstance(figure, dict) else f"{figure:.4g}" for figure in figures.values())]
        for kind, figures in summary.items()
    ]
    table(["", *summary[VLLM]], rows)
    about = {"threads": options.threads, "model": Path(options.model).name}
    about |= {"compiled": options.compiled, "prepack": options.prepack}
    trace = {"source": Path(options.trace or "Poisson").name, "rate": options.rate, "requests": len(_arrivals(options))}
    finish("continuous_vllm", "cpu", {**about, "trace": trace, "same_continuations": same, **summary})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--budget", default="2GiB", help="of the library's weights and KV cache")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="of fresh processes")
    parser.add_argument("--turns", type=int, default=5, help="of each process in a round")
    parser.add_argument("--trace", help="a trace's file, instead of Poisson arrivals")
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals")
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second; with --trace, times the trace's")
    parser.add_argument("--token-scale", type=float, default=1.0, help="of prompts and outputs of the trace")
    parser.add_argument("--prepack", action="store_true", help="have the library multiply prepacked matrices")
    parser.add_argument("--compiled", action="store_true", help="have vLLM compile the model, which takes minutes")
    parser.add_argument("--quick", action="store_true", help="few and short turns, to see that it runs")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.turns, options.seconds = 1, 2, min(options.seconds, 5.0)
    return options


def _child(options: argparse.Namespace) -> None:
    """Run one engine in this process; for each line of input take a turn."""
    if options.child == OWN:
        player: Player = OwnPlayer(options.model, budget=options.budget, prepack=options.prepack)
    else:
        player = VLLMPlayer(options.model, compiled=options.compiled)
    batch = [Arrival(0.0, prompt, OUTPUT) for prompt in batch_prompts()]
    arrivals = _arrivals(options)
    player.play(batch)
    take_turns(lambda: _turn(player, batch, arrivals))


def _arrivals(options: argparse.Namespace) -> list[Arrival]:
    if options.trace:
        trace = densest_part(options.trace, options.seconds, options.rate, options.token_scale)
    else:
        trace = generate(Poisson(options.rate), Fixed(PROMPT, OUTPUT), options.seconds, seed=SEED)
    prompts = random_prompts(trace, VOCABULARY)
    return [Arrival(r.arrival_s, prompt, r.output_tokens) for r, prompt in zip(trace.requests, prompts, strict=True)]


def _turn(player: Player, batch: Sequence[Arrival], arrivals: Sequence[Arrival]) -> dict[str, Any]:
    """Return tokens per second of the clock and of this process's CPU time, and seconds to each first token."""
    cpu = time.process_time()
    answers = player.play(batch)
    tokens, cpu = sum(map(len, answers.tokens)), time.process_time() - cpu
    offered = player.play(arrivals)
    for arrival, found in zip([*batch, *arrivals], [*answers.tokens, *offered.tokens], strict=True):
        if len(found) != arrival.output_tokens:
            raise RuntimeError(f"{len(found)} tokens came of {arrival.output_tokens}")
    time.sleep(IDLE_S)
    return {
        "wall": tokens / answers.seconds,
        "cpu": tokens / cpu,
        "ttft_s": sorted(offered.ttft_s),
        "seconds": offered.seconds,
        "tokens": answers.tokens,
    }


@torch.no_grad()
def same_tokens(path: str, one: list[list[int]], other: list[list[int]]) -> float:
    """Return the share of a batch's requests with the same tokens.

    Raises `RuntimeError` unless the first tokens that differ were both the likeliest to rounding.
    """
    different = [i for i in range(len(one)) if one[i] != other[i]]
    if different:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for i in different:
        at = next(k for k, pair in enumerate(zip(one[i], other[i], strict=True)) if pair[0] != pair[1])
        logits = model(torch.tensor([[*batch_prompts()[i], *one[i][:at]]])).logits[0, -1]
        if logits.max() - logits[[one[i][at], other[i][at]]].min() > TIE * logits.abs().max():
            raise RuntimeError(f"request {i}: token {at} is {one[i][at]} with {VLLM} and {other[i][at]} with {OWN}")
    return 1 - len(different) / len(one)


def _figures(runs: list[Any], base: list[Any]) -> dict[str, Any]:
    """Return what the table shows of one kind; ratios are paired by turn with vLLM."""
    wall, plain_wall = ([run["wall"] for run in kind] for kind in (runs, base))
    cpu, plain_cpu = ([run["cpu"] for run in kind] for kind in (runs, base))
    late, plain_late = (percentiles([run["ttft_s"] for run in kind], 0.95) for kind in (runs, base))
    return {
        "tokens/s": statistics.median(wall),
        "of vLLM": ratio(wall, plain_wall),
        "tokens/CPU s of vLLM": ratio(cpu, plain_cpu),
        "P50 TTFT s": statistics.median(percentiles([run["ttft_s"] for run in runs], 0.5)),
        "P95 TTFT s": statistics.median(late),
        "P95 of vLLM": ratio(late, plain_late),
    }


if __name__ == "__main__":
    main()
