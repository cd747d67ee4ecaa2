"""The evaluation: full precision, static INT4 and three modes of Elastic, on one budget and one trace at a time.

    python benchmarks/evaluate.py --traces DIR [--full] [--machine cpu-2core]

`evaluation.toml` has all conditions, fixed before any result. Every run is a fresh process; the systems of a repeat run
one after another on the same requests. What was run is kept under --work: a second start goes on where the first ended,
and a changed configuration begins anew. At the end docs/evaluation.md, its pictures and results/evaluation-MACHINE.json
are written, and the last line is one JSON document.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import evaluation_quality
import evaluation_run
from evaluation_report import report
from evaluation_run import CALIBRATION

from elastic.assets import MODEL_DIR

HERE = Path(__file__).parent
PROCESSES = multiprocessing.get_context("forkserver")  # each from a server that has only imported what it needs
ONE_RUN_S = 1800


@dataclass(frozen=True)
class Condition:
    """The condition that all systems of a comparison share."""

    name: str
    workload: str
    budget: str
    systems: tuple[str, ...]
    kept: float | None = None
    """Instead of the workload's own share of requests."""


class Evaluation:
    """The runs that were done, by their names, and the way to do one more."""

    def __init__(self, options: argparse.Namespace) -> None:
        text = Path(options.config).read_text()
        self.config = tomllib.loads(text)
        self.options = options
        self.scale = self.config["full" if options.full else "quick"]
        key = f"{text} {options.full} {options.model} {options.device}"
        self.digest = hashlib.sha256(key.encode()).hexdigest()
        self.work = Path(options.work) / f"{'full' if options.full else 'quick'}-{self.digest[:12]}"
        self.work.mkdir(parents=True, exist_ok=True)

    @property
    def settings(self) -> dict[str, Any]:
        return {key: value for key, value in self.config.items() if not isinstance(value, dict)}

    @property
    def conditions(self) -> list[Condition]:
        systems = tuple(self.config["systems"])
        main = [Condition(f"{w}-{b}", w, b, systems) for w, b in self.scale["conditions"]]
        extra = [
            Condition(name, c["workload"], c["budget"], tuple(c["systems"]), c["kept"])
            for name in ("low_load", "saturation")
            for c in (self.config[name],)
        ]
        return main + extra

    @functools.cache  # noqa: B019
    def order(self) -> str:
        """Make a profile (MorphServe, section 3.2) from text without prompts; where there is none, front to back."""
        text, profile = HERE.parent / "training" / "heldout.txt", self.work / "profile.json"
        if self.options.model != str(MODEL_DIR) or not text.is_file():
            return "front_to_back"
        if not profile.is_file():
            calibration = self.work / "calibration.txt"
            held_out = text.read_text(errors="replace")
            calibration.write_text(held_out[: len(held_out) // CALIBRATION])
            command = [sys.executable, "-m", "elastic.cli.main", "profile", self.options.model]
            more = ["--calibration", str(calibration), "--variant", self.config["variant"], "--out", str(profile)]
            subprocess.run([*command, *more], check=True, timeout=ONE_RUN_S, env=os.environ | {"OMP_NUM_THREADS": "1"})
        return str(profile)

    def path(self, name: str) -> Path:
        return self.work / f"{name}.json"

    def run(self, name: str, condition: Condition, system: str, token_scale: float, **more: Any) -> dict[str, Any]:
        """Return the summary of a run, done now if it was not done before."""
        workload = dict(self.config["workloads"][condition.workload])
        if condition.kept is not None:
            workload["kept"] = condition.kept
        spec = {
            "workload": workload,
            "system": self.config["systems"][system],
            "kv_tokens": self.config["budgets"][condition.budget],
            "token_scale": token_scale,
            "pace": self.scale["pace"],
            "slo_ttft_s": None,
            "settings": self.settings,
            "model": self.options.model,
            "device": self.options.device,
            "traces": self.options.traces,
            "order": self.order(),
            "variant_cache": str(self.work / "variants"),
        }
        self.child(evaluation_run.main, name, spec | more)
        summary: dict[str, Any] = json.loads(self.path(name).read_text())["summary"]
        return summary

    def child(self, work: Callable[[str, str], None], name: str, spec: dict[str, Any]) -> None:
        """Do work in a process of its own, unless its result is there."""
        if self.path(name).is_file():
            return
        source = self.work / f"{name}.spec"
        source.write_text(json.dumps(spec))
        began = time.monotonic()
        process = PROCESSES.Process(target=work, args=(str(source), str(self.path(name))))
        process.start()
        process.join(ONE_RUN_S)
        if process.exitcode != 0:
            process.kill()
            raise RuntimeError(f"{name} ended with {process.exitcode}; its specification is {source}")
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)

    def took_s(self, now_s: float) -> float:
        """Seconds of this start and of those before it."""
        kept = self.work / "took_s"
        total = now_s + (float(kept.read_text()) if kept.is_file() else 0.0)
        kept.write_text(str(total))
        return total

    # -- before the comparison

    def calibrate(self, workload: str) -> tuple[float, float]:
        """Find the token scale, by bisection, and the TTFT SLO in seconds. Both depend on full precision alone."""
        condition = Condition(f"calibrate-{workload}", workload, "middle", ("full",))
        low, high = self.config["almost_full"]
        scales = self.config["token_scales"]
        first, last = 0, len(scales) - 1
        tried: dict[float, float] = {}
        while first <= last:
            scale = scales[(first + last) // 2]
            summary = self.run(f"{condition.name}-{scale:g}", condition, "full", scale)
            share = tried[scale] = summary["elastic"]["kv_use"]["almost_full_share"]
            if low <= share <= high:
                break
            if share < low:
                first = scales.index(scale) + 1
            else:
                last = scales.index(scale) - 1
        chosen = min(tried, key=lambda s: max(low - tried[s], tried[s] - high, 0.0))
        alone = Condition("unloaded", workload, max(self.config["budgets"], key=self.config["budgets"].get), ("full",))
        summary = self.run(f"unloaded-{workload}", alone, "full", chosen, unloaded=True)
        return chosen, self.config["ttft_slo"] * summary["median_ttft_ms"] / 1000

    # -- the comparison

    def plan(self) -> Iterator[tuple[int, Condition, str]]:
        """Repeats outermost, systems innermost, each repeat beginning with another: drift meets all alike."""
        for repeat in range(self.config["repeats"]):
            for condition in self.conditions:
                turn = repeat % len(condition.systems)
                for system in condition.systems[turn:] + condition.systems[:turn]:
                    yield repeat, condition, system

    def quality(self) -> dict[str, Any]:
        """Of the first repeat."""
        runs = {f"{c.name}/{s}": self.path(f"{c.name}-{s}-0") for c in self.conditions for s in c.systems}
        spec = {key: self.config[key] for key in ("variant", "page_bytes", "seed")} | {
            "runs": {name: str(path) for name, path in runs.items()},
            "requests": self.config["requests_for_quality"],
            "model": self.options.model,
            "device": self.options.device,
            "variant_cache": str(self.work / "variants"),
            "budget_bytes": 2 << 30 if self.options.device == "cpu" else None,
        }
        self.child(evaluation_quality.main, "quality", spec)
        quality: dict[str, Any] = json.loads(self.path("quality").read_text())
        return quality


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", default=os.environ.get("ELASTIC_TRACES"), help="folder of the Azure files")
    parser.add_argument("--full", action="store_true", help="all conditions, in the traces' own time")
    parser.add_argument("--model", default=str(MODEL_DIR))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--machine", default="cpu-2core")
    parser.add_argument("--config", default=str(HERE / "evaluation.toml"))
    parser.add_argument("--root", default=str(HERE.parent), help="where docs/ and benchmarks/results/ are written")
    parser.add_argument("--work", default=str(HERE.parent / "build" / "evaluation"), help="where runs are kept")
    options = parser.parse_args()
    if not options.traces or not Path(options.traces).is_dir():
        parser.error("--traces, or ELASTIC_TRACES: the folder with the Azure 2023 files is needed")
    return options


def main() -> None:
    options = arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    PROCESSES.set_forkserver_preload(["evaluation_run", "evaluation_quality"])  # found by that path
    evaluation = Evaluation(options)
    began = time.monotonic()
    chosen = {name: evaluation.calibrate(name) for name in evaluation.config["workloads"]}
    summaries: dict[str, list[dict[str, Any]]] = {}
    for repeat, condition, system in evaluation.plan():
        scale, slo_s = chosen[condition.workload]
        name = f"{condition.name}-{system}-{repeat}"
        summary = evaluation.run(name, condition, system, scale, slo_ttft_s=slo_s)
        summaries.setdefault(f"{condition.name}/{system}", []).append(summary)
    results = {
        "configuration_sha256": evaluation.digest,
        "took_s": evaluation.took_s(time.monotonic() - began),
        "full": options.full,
        "device": options.device,
        "calibration": {name: {"token_scale": s, "slo_ttft_s": slo} for name, (s, slo) in chosen.items()},
        "quality": evaluation.quality(),
    }
    report(results, summaries, evaluation.conditions, options.machine, Path(options.root))


if __name__ == "__main__":
    main()
