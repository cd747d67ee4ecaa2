"""vLLM with elastic beside vLLM alone, each a process of its own.

    python benchmarks/vllm_engine.py [--model PATH] [--threads 1] [--rounds 3]           tokens per second
    python benchmarks/vllm_engine.py --actions                                           gaps between tokens, pauses
    python benchmarks/vllm_engine.py --trace burst --budget 16MiB [--rounds 5]           time to first token in a burst
    python benchmarks/vllm_engine.py --trace FILE --token-scale 0.25 --rate 2            the densest part of a trace

Run it with the venv of `make test-vllm`. Threads are not bound: on a busy machine vLLM's binding costs more than what
is compared. Tokens per second: the processes of a round take turns, one computing at a time; a turn is 16 requests of
32 + 64 tokens. Actions: a turn is such a run at rest, then one beside layers that are released and restored without
end. A burst: requests arrive by the clock, as a trace or bursts of Poisson arrivals say; all kinds share one budget.
Targets: .97 of plain with nothing swapped, 1.15 with all layers int4; P99 of the gaps 1.1 x of rest, pauses of 1 ms;
P95 of the time to first token 2.2 x better (balanced) and 4 x (performance) than full, with nothing preempted. (The
file is not called vllm.py: it would hide vLLM itself.)
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import Repeater, finish, percentiles, ratio, show, table

import elastic
import elastic.vllm
from elastic.bench.traces.generator import Fixed, OnOff, generate
from elastic.bench.traces.prompts import random_prompts
from elastic.bench.traces.readers import read_trace
from elastic.bench.traces.trace import Trace

MODEL = Path(elastic.__file__).parent / "assets" / "stdlib-2.6m"
THROUGHPUT = ("plain", "elastic", "elastic, all int4")
ACTIONS = ("elastic",)
BURST = ("full", "static int4", "balanced", "performance")
REQUESTS, PROMPT, OUTPUT = 16, 32, 64
LONGEST = 256
ANSWER = "answer: "


def main() -> None:
    options = _options()
    if options.child:
        _child(options)
        return
    kinds = BURST if options.trace else ACTIONS if options.actions else THROUGHPUT
    results: dict[str, list[Any]] = {kind: [] for kind in kinds}
    for _ in range(options.rounds):
        together = [kinds] if not options.trace else [[kind] for kind in random.sample(kinds, len(kinds))]
        for kinds_together in together:
            run_round(kinds_together, results, 1 if options.trace else options.turns, options.threads)
    if options.actions:
        finish("vllm_actions", "cpu", _action_figures(results[ACTIONS[0]]))
        return
    rows, summary = [], {}
    for kind in kinds:
        figures = _figures(results[kind], results[kinds[0]], burst=bool(options.trace))
        summary[kind] = figures
        rows.append([kind, *(show(f) if isinstance(f, dict) else f"{f:.4g}" for f in figures.values())])
    table(["", *summary[kinds[0]]], rows)
    finish(
        "vllm_engine",
        "cpu",
        {"threads": options.threads, "model": Path(options.model).name, "pages": options.pages, **summary},
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--budget", default="1GiB", help="of weights and KV cache")
    parser.add_argument("--pages", default="64KiB", help="size of a page; 2MiB: huge pages of the system")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="of fresh processes")
    parser.add_argument("--turns", type=int, default=9, help="of each process in a round")
    parser.add_argument("--actions", action="store_true", help="gaps between tokens beside actions")
    parser.add_argument("--trace", help="a trace's file, or 'burst' for arrivals that are drawn")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the trace")
    parser.add_argument("--rate", type=float, default=1.0, help="times the trace's, by its clock")
    parser.add_argument("--token-scale", type=float, default=1.0, help="of prompts and outputs of the trace")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_round(kinds: Sequence[str], results: dict[str, list[Any]], turns: int, threads: int) -> None:
    """Start a process of this script for each kind, then have them take turns, in an order that is drawn each time."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    children = {
        kind: subprocess.Popen(
            [sys.executable, *sys.argv, "--child", kind],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for kind in kinds
    }
    for child in children.values():
        _answer(child)  # that it is ready
    for _ in range(turns):
        for kind in random.sample(list(kinds), len(kinds)):
            print(file=children[kind].stdin, flush=True)
            results[kind].append(_answer(children[kind]))
            print(f"{kind}: {str(results[kind][-1])[:60]}", file=sys.stderr, flush=True)
    for child in children.values():
        child.communicate()


def take_turns(turn: Callable[[], Any]) -> None:
    """Be a process of `run_round`: say that it is ready, and take a turn for each line of input."""
    print(ANSWER + "0", flush=True)
    for _ in sys.stdin:
        print(ANSWER + json.dumps(turn()), flush=True)


def _answer(child: subprocess.Popen[str]) -> Any:
    """Return the next line of JSON that a process prints; what vLLM prints besides is passed over."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(ANSWER):
            return json.loads(line.removeprefix(ANSWER))
    raise RuntimeError(f"a child ended early, with {child.wait()}")


def _child(options: argparse.Namespace) -> None:
    """Run one engine in this process; for each line of input take a turn."""
    from vllm import LLM

    common = {"dtype": "float32", "enforce_eager": True, "max_model_len": LONGEST, "max_num_seqs": REQUESTS}
    elastic_options: dict[str, Any] = {}
    if options.child != "plain":
        policy = options.child if options.child in ("balanced", "performance") else "manual"
        slo = elastic.SLO(ttft_s=1.0) if policy != "manual" else None
        elastic_options = elastic.vllm.options(
            options.budget, policy=policy, variants=("int4",), slo=slo, page_bytes=options.pages
        )
    llm = LLM(options.model, **common, **elastic_options)
    if options.child.endswith("int4"):
        runtime = elastic.vllm.runtime(llm)
        runtime.swap(range(len(runtime.form())), "int4")
    if not options.trace:
        _throughput(llm)
    if options.trace:
        take_turns(lambda: _burst(llm, _trace(options)))
    else:
        take_turns(lambda: _gaps(llm) if options.actions else _throughput(llm))


def _trace(options: argparse.Namespace) -> Trace:
    if options.trace != "burst":
        return densest_part(options.trace, options.seconds, options.rate, options.token_scale)
    return generate(OnOff(12.0, 0.5, 4.0, 8.0), Fixed(PROMPT, OUTPUT), options.seconds, seed=1)


def densest_part(path: str, seconds: float, rate: float, token_scale: float) -> Trace:
    """Return the densest seconds of a trace's file, at `rate` times its rate, with requests that fit the context."""
    trace = read_trace(path)
    trace = trace.cut(*trace.densest(seconds * rate)).with_rate(rate, "stretch")
    return trace.with_tokens(token_scale, most=LONGEST)


def batch_prompts() -> list[list[int]]:
    """Return the prompts of a batch, as token ids."""
    return [[(7 * i + 3 * j) % 400 + 1 for j in range(PROMPT)] for i in range(REQUESTS)]


def _throughput(llm: Any) -> dict[str, float]:
    """Decode 16 requests; return tokens per second of the clock, and of the CPU time of this process."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": prompt} for prompt in batch_prompts()]
    sampling = SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
    start, cpu = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {"wall": tokens / (time.perf_counter() - start), "cpu": tokens / (time.process_time() - cpu)}


def _gaps(llm: Any) -> dict[str, Any]:
    """Return the gaps between tokens at rest and beside releases and restores, and the pauses of these, in ms."""
    runtime = elastic.vllm.runtime(llm)
    at_rest = _steps_ms(llm)
    start_s = time.time()

    def act(number: int) -> None:
        runtime.release([3, 7])
        runtime.restore()

    with Repeater(act) as repeater:
        beside = _steps_ms(llm)
    events = [event for event in runtime.events() if event.when_s >= start_s]
    return {"rest": at_rest, "beside": beside, "pauses": [event.pause_ms for event in events], "pairs": repeater.done}


def _steps_ms(llm: Any) -> list[float]:
    """Decode 16 requests; return the milliseconds of each step, which are the gaps between their tokens."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    for number, tokens in enumerate(batch_prompts()):
        sampling = SamplingParams(max_tokens=3 * OUTPUT, temperature=0, ignore_eos=True)
        engine.add_request(f"g{number}", {"prompt_token_ids": tokens}, sampling)
    steps = []
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        engine.step()
        steps.append((time.perf_counter() - start) * 1e3)
    return steps[2:]


def _burst(llm: Any, trace: Trace) -> dict[str, Any]:
    """Offer the requests of a trace by the clock; return the seconds to each first token, and preemptions."""
    from vllm import SamplingParams

    runtime = elastic.vllm.runtime(llm)
    preempted = runtime.snapshot().traffic.preemptions
    engine, arrived, first = llm.llm_engine, dict[str, float](), dict[str, float]()
    prompts = random_prompts(trace, 400)
    coming = [(r.arrival_s, f"r{i}", prompts[i], r.output_tokens) for i, r in enumerate(trace.requests)]
    start = time.perf_counter()
    while coming or engine.has_unfinished_requests():
        now = time.perf_counter() - start
        while coming and coming[0][0] <= now:
            at_s, name, prompt, length = coming.pop(0)
            arrived[name] = start + at_s
            sampling = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True)
            engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
        if not engine.has_unfinished_requests():
            time.sleep(0.001)
            continue
        for output in engine.step():
            if output.outputs and output.outputs[0].token_ids and output.request_id not in first:
                first[output.request_id] = time.perf_counter() - arrived[output.request_id]
    seconds, preempted = time.perf_counter() - start, runtime.snapshot().traffic.preemptions - preempted
    return {"ttft_s": sorted(first.values()), "seconds": seconds, "preemptions": preempted}


def _figures(runs: list[Any], base: list[Any], *, burst: bool) -> dict[str, Any]:
    """Return what the table shows of one kind; ratios are paired by round with the first kind."""
    if not burst:
        wall, cpu = ([run[clock] for run in runs] for clock in ("wall", "cpu"))
        plain_wall, plain_cpu = ([run[clock] for run in base] for clock in ("wall", "cpu"))
        return {
            "tokens/s": statistics.median(wall),
            "of plain": ratio(wall, plain_wall),
            "tokens/CPU s of plain": ratio(cpu, plain_cpu),
        }
    own = percentiles([run["ttft_s"] for run in runs], 0.95)
    full = percentiles([run["ttft_s"] for run in base], 0.95)
    return {
        "P95 TTFT s": statistics.median(own),
        "P50 TTFT s": statistics.median(percentiles([run["ttft_s"] for run in runs], 0.5)),
        "better than full": ratio(full, own),
        "preemptions": sum(run["preemptions"] for run in runs),
    }


def _action_figures(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the gaps beside actions as shares of those at rest, and the pauses, in ms."""
    pauses = sorted(pause for turn in turns for pause in turn["pauses"])
    figures: dict[str, Any] = {}
    for share in (0.5, 0.99):
        rest, beside = (percentiles([turn[when] for turn in turns], share) for when in ("rest", "beside"))
        figures[f"gap P{share * 100:.0f} of rest"] = ratio(beside, rest)
        figures[f"gap P{share * 100:.0f} at rest ms"] = statistics.median(rest)
        figures[f"pause P{share * 100:.0f} ms"] = percentiles([pauses], share)[0]
    return {**figures, "pause most ms": pauses[-1], "actions": len(pauses)}


if __name__ == "__main__":
    main()
