"""Run every benchmark and keep the results of this kind of machine.

    python benchmarks/run_all.py --machine cpu-2core [--device cuda:0] [--only decode pages]

Writes results/MACHINE.json, one entry for each benchmark; entries of benchmarks that are not run are kept.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
BENCHMARKS = (
    "import_time",
    "pages",
    "overhead",
    "decode",
    "choices",
    "resize",
    "weights",
    "streaming",
    "codes",
    "quantized_linear",
    "swap",
    "sensitivity",
    "controller",
    "continuous",
    "migrate",
    "migrate_kv",
    "replicate",
    "predict",
    "planner",
    "lending",
    "server_stall",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", default=BENCHMARKS, choices=BENCHMARKS)
    parser.add_argument("--rounds", type=int, help="instead of each benchmark's own number")
    options = parser.parse_args()
    target = HERE / "results" / f"{options.machine}.json"
    results = json.loads(target.read_text()) if target.exists() else {}
    for name in options.only:
        print(f"== {name}", flush=True)
        command = [sys.executable, str(HERE / f"{name}.py"), "--device", options.device]
        command += ["--rounds", str(options.rounds)] if options.rounds else []
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        print(out, flush=True)
        results[name] = json.loads(out.splitlines()[-1])
        target.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
