"""Run every benchmark, or those that only a GPU can answer, and keep the results of this kind of machine.

    python benchmarks/run_all.py --machine cpu-2core [--only decode pages]
    python benchmarks/run_all.py --machine h100 --device cuda:0 --suite gpu --minutes 10

Writes `--results`/MACHINE.json, one entry for each benchmark; entries of benchmarks that are not run are kept. With
`--minutes`, no benchmark begins after them and none goes on for longer than what is left; one that fails or is cut off
leaves what it said last, and the figures it had by then if it keeps them. The others run all the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BENCHMARKS = (
    "import_time",
    "pages",
    "page_size",
    "overhead",
    "decode",
    "choices",
    "resize",
    "actions",
    "weights",
    "shards_at_rest",
    "streaming",
    "codes",
    "quantized_linear",
    "swap",
    "sensitivity",
    "controller",
    "continuous",
    "engine_step",
    "decode_graphs",
    "sampling",
    "fleet",
    "overload",
    "sim_validation",
    "sim_speed",
    "drop",
    "stages",
    "reshard",
    "microbatches",
    "migrate",
    "migrate_kv",
    "replicate",
    "predict",
    "planner",
    "drop_plan",
    "padding",
    "chunk_cost",
    "lending",
    "estimate",
    "deploy",
    "placement",
    "placement_real",
    "server_stall",
)
GPU = (
    "driver_answers",
    "live_pages",
    "large_model",
    "quantized_linear",
    "pages",
    "decode_graphs",
    "cuda_graph",
    "overhead",
    "swap",
    "first_launch",
    "decode",
    "streaming",
    "migrate",
    "continuous",
    "resize",
    "reshard",
    "padding",
)
"""What hardware alone can say, the most wanted first."""
KEEPING = {"drop", "estimate", "large_model", "microbatches", "overload", "placement_real", "reshard", "stages"}
"""Those with `--keep`."""
SUITES = {"all": BENCHMARKS, "gpu": GPU}


def run(name: str, more: list[str], limit_s: float | None) -> dict[str, Any]:
    """Run one benchmark in a process of its own; return its JSON line, or why there is none and what it had."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "figures.json"
        keep = ["--keep", str(kept)] if name in KEEPING else []
        result, output = _run([sys.executable, str(HERE / f"{name}.py"), *more, *keep], limit_s)
        if "failed" in result:
            figures = {"figures": json.loads(kept.read_text())} if kept.exists() else {}
            return {**result, "said": output.splitlines()[-5:], **figures}
    print(output, flush=True)
    return result


def _run(command: list[str], limit_s: float | None) -> tuple[dict[str, Any], str]:
    """Run a command; return its JSON line, or why there is none, and all that it wrote."""
    try:
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        return {"failed": f"cut off after {limit_s:.0f} s"}, (error.stdout or b"").decode(errors="replace")
    if ended.returncode:
        return {"failed": f"exit code {ended.returncode}"}, ended.stdout
    lines = [line for line in ended.stdout.splitlines() if line.startswith('{"benchmark"')]
    return json.loads(lines[-1]), ended.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--suite", choices=SUITES, default="all")
    parser.add_argument("--only", nargs="+", choices=sorted({*BENCHMARKS, *GPU}), help="instead of the suite's")
    parser.add_argument("--skip", nargs="+", choices=sorted({*BENCHMARKS, *GPU}), default=(), help="of the suite's")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="the folder of MACHINE.json")
    parser.add_argument("--rounds", type=int, help="instead of each benchmark's own number")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that they run")
    parser.add_argument("--minutes", type=float, help="for all of them together")
    options = parser.parse_args()
    more = ["--device", options.device, *(["--quick"] if options.quick else [])]
    more += ["--rounds", str(options.rounds)] if options.rounds else []
    target = options.results / f"{options.machine}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(target.read_text()) if target.exists() else {}
    end = time.monotonic() + 60 * options.minutes if options.minutes else None
    failed = []
    for name in (name for name in options.only or SUITES[options.suite] if name not in options.skip):
        left = end - time.monotonic() if end else None
        if left is not None and left < 1:
            failed.append(f"{name}: no time left")
            continue
        print(f"== {name}", flush=True)
        result = run(name, more, left)
        if "failed" in result:
            failed.append(f"{name}: {result['failed']}")
        if "failed" not in result or "failed" in results.get(name, result):  # a figure that there is stays
            results[name] = result
        target.write_text(json.dumps(results, indent=1) + "\n")
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
