"""vLLM with elastic beside vLLM alone, each run a process of its own, in turn.

    python benchmarks/vllm_engine.py [--model PATH] [--threads 1] [--rounds 5]           tokens per second
    python benchmarks/vllm_engine.py --trace burst --budget 16MiB [--rounds 5]           time to first token in a burst

Run it with the venv of `make test-vllm`. Threads are not bound: on a busy machine vLLM's binding costs more than what
is compared. Tokens per second: 16 requests of 32 + 64 tokens, the median of three runs in a process. A burst: requests
arrive by the clock, as a trace or bursts of Poisson arrivals say; all kinds share one budget. Targets: .97 of plain
with nothing swapped, 1.15 with all layers int4; P95 of the time to first token 2.2 x better (balanced) and 4 x
(performance) than full. (The file is not called vllm.py: it would hide vLLM itself.)
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
from pathlib import Path
from typing import Any

from common import finish, percentiles, ratio, show, table

import elastic
import elastic.vllm
from elastic.bench.traces.generator import Fixed, OnOff, generate
from elastic.bench.traces.prompts import random_prompts
from elastic.bench.traces.readers import read_trace
from elastic.bench.traces.trace import Trace

MODEL = Path(elastic.__file__).parent / "assets" / "stdlib-2.6m"
THROUGHPUT = ("plain", "elastic", "elastic, all int4")
BURST = ("full", "static int4", "balanced", "performance")
REQUESTS, PROMPT, OUTPUT = 16, 32, 64
LONGEST = 256


def main() -> None:
    options = _options()
    if options.child:
        print(json.dumps(_child(options)), flush=True)
        return
    kinds = BURST if options.trace else THROUGHPUT
    results: dict[str, list[Any]] = {kind: [] for kind in kinds}
    for _ in range(options.rounds):
        for kind in random.sample(kinds, len(kinds)):
            results[kind].append(_run_child(kind))
    rows, summary = [], {}
    for kind in kinds:
        figures = _figures(results[kind], results[kinds[0]], burst=bool(options.trace))
        summary[kind] = figures
        rows.append([kind, *(show(f) if isinstance(f, dict) else f"{f:.3g}" for f in figures.values())])
    table(["", *summary[kinds[0]]], rows)
    finish("vllm_engine", "cpu", {"threads": options.threads, "model": Path(options.model).name, **summary})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--budget", default="1GiB", help="of weights and KV cache")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trace", help="a trace's file, or 'burst' for arrivals that are drawn")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the trace")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def _run_child(kind: str) -> Any:
    threads = sys.argv[sys.argv.index("--threads") + 1] if "--threads" in sys.argv else "1"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    command = [sys.executable, *sys.argv, "--child", kind]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _child(options: argparse.Namespace) -> Any:
    """Run one engine in this process; return tokens per second, or the times to first tokens."""
    from vllm import LLM

    common = {"dtype": "float32", "enforce_eager": True, "max_model_len": LONGEST, "max_num_seqs": REQUESTS}
    elastic_options: dict[str, Any] = {}
    if options.child != "plain":
        policy = options.child if options.child in ("balanced", "performance") else "manual"
        slo = elastic.SLO(ttft_s=1.0) if policy != "manual" else None
        elastic_options = elastic.vllm.options(options.budget, policy=policy, variants=("int4",), slo=slo)
    llm = LLM(options.model, **common, **elastic_options)
    if options.child.endswith("int4"):
        runtime = elastic.vllm.runtime(llm)
        runtime.swap(range(len(runtime.form())), "int4")
    if options.trace:
        return _burst(llm, _trace(options))
    return statistics.median(_tokens_per_second(llm) for _ in range(3))


def _trace(options: argparse.Namespace) -> Trace:
    if options.trace != "burst":
        return read_trace(options.trace).cut(0, options.seconds)
    return generate(OnOff(12.0, 0.5, 4.0, 8.0), Fixed(PROMPT, OUTPUT), options.seconds, seed=1)


def _tokens_per_second(llm: Any) -> float:
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [(7 * i + 3 * j) % 400 + 1 for j in range(PROMPT)]} for i in range(REQUESTS)]
    start = time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True), use_tqdm=False)
    return sum(len(o.outputs[0].token_ids) for o in outputs) / (time.perf_counter() - start)


def _burst(llm: Any, trace: Trace) -> dict[str, Any]:
    """Offer the requests of a trace by the clock; return the seconds to each first token, and preemptions."""
    from vllm import SamplingParams

    engine, arrived, first = llm.llm_engine, dict[str, float](), dict[str, float]()
    prompts = random_prompts(trace, 400)
    coming = [(r.arrival_s, f"r{i}", prompts[i], r.output_tokens) for i, r in enumerate(trace.requests)]
    start = time.perf_counter()
    while coming or engine.has_unfinished_requests():
        now = time.perf_counter() - start
        while coming and coming[0][0] <= now:
            at_s, name, prompt, length = coming.pop(0)
            arrived[name] = start + at_s
            prompt = list(prompt)[: LONGEST // 2]
            length = max(1, min(length, LONGEST - len(prompt)))
            sampling = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True)
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        if not engine.has_unfinished_requests():
            time.sleep(0.001)
            continue
        for output in engine.step():
            if output.outputs and output.outputs[0].token_ids and output.request_id not in first:
                first[output.request_id] = time.perf_counter() - arrived[output.request_id]
    return {"ttft_s": sorted(first.values()), "seconds": time.perf_counter() - start}


def _figures(runs: list[Any], base: list[Any], *, burst: bool) -> dict[str, Any]:
    """Return what the table shows of one kind; ratios are paired by round with the first kind."""
    if not burst:
        return {"tokens/s": statistics.median(runs), "of plain": ratio(runs, base)}
    own = percentiles([run["ttft_s"] for run in runs], 0.95)
    full = percentiles([run["ttft_s"] for run in base], 0.95)
    return {
        "P95 TTFT s": statistics.median(own),
        "P50 TTFT s": statistics.median(percentiles([run["ttft_s"] for run in runs], 0.5)),
        "better than full": ratio(full, own),
    }


if __name__ == "__main__":
    main()
