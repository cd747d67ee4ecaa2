"""Common parts of the benchmarks: paired timing, ratios with their spread, a table, one JSON line."""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SEED = 0
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""The name by which models of this version of transformers take and return a KV cache."""
KEEP: dict[str, Any] = {"type": Path, "help": "a file for the figures so far: what it has is not taken again"}
"""An option for what takes longer than a machine is to be had at a time."""
EARLIER: dict[str, dict[str, Any]] = {
    "earlier": {"help": "a checkout of an earlier commit, to be measured in turn with this one"},
    "round-of": {"help": "for the benchmark itself"},
}
"""Options of a benchmark with an `EarlierCheckout`."""


def arguments(description: str, **more: dict[str, Any]) -> argparse.Namespace:
    """Parse the options that all scripts have, and `more` of this one; seed and limit torch."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    for name, option in more.items():
        parser.add_argument(f"--{name}", **option)
    options = parser.parse_args()
    torch.manual_seed(SEED)
    random.seed(SEED)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    return options


def returned_cache(output: Any) -> Any:
    """Return the KV cache in what a model returned."""
    return getattr(output, CACHE)


def machine(device: str) -> dict[str, Any]:
    """Describe the machine that figures were taken on."""
    on_gpu = device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else _cpu_name(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "seed": SEED,
    }


def budget(device: str, gib: int, share: float) -> str:
    """Return the budget of a place: `gib` of a CPU's memory, or a share of all that the GPU has."""
    if device == "cpu":
        return f"{gib}GiB"
    return f"{int(share * torch.cuda.get_device_properties(device).total_memory) >> 20}MiB"


def llama(heads_kv: int, dtype: torch.dtype, device: str, *, quick: bool = False) -> LlamaForCausalLM:
    """Make a random Llama of about 130M parameters: 12 layers, d = 768, 12 heads of 64."""
    config = LlamaConfig(
        vocab_size=1000 if quick else 32000,
        hidden_size=768,
        intermediate_size=256 if quick else 2048,
        num_hidden_layers=2 if quick else 12,
        num_attention_heads=12,
        num_key_value_heads=heads_kv,
        max_position_embeddings=16384,
    )
    torch.manual_seed(SEED)
    return LlamaForCausalLM(config).to(device, dtype).eval().requires_grad_(False)


def twin(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Make another model object over the same weights."""
    with torch.device("meta"):
        other = LlamaForCausalLM(model.config)
    other.load_state_dict(model.state_dict(), assign=True)
    other.model.rotary_emb = model.model.rotary_emb
    other.config = type(model.config)(**model.config.to_dict())
    other.config._attn_implementation = model.config._attn_implementation
    for module in other.modules():
        if hasattr(module, "config"):
            module.config = other.config
    return other.eval().requires_grad_(False)


def seconds(work: Callable[[], Any], device: str) -> float:
    """Return the wall time of one call, kernels included, in seconds."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def paired(works: dict[str, Callable[[], Any]], device: str, rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Return the seconds of each work in each round; within a round the order is shuffled."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for round_ in range(warmup + rounds):
        for name in random.sample(list(works), len(works)):
            took = seconds(works[name], device)
            if round_ >= warmup:
                times[name].append(took)
    return times


def ratio(above: Sequence[float], below: Sequence[float], resamples: int = 2000) -> dict[str, float]:
    """Return the median of paired ratios, with a 95 % bootstrap interval."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    generator = random.Random(SEED)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(resamples))
    return {
        "median": statistics.median(ratios),
        "low": medians[int(0.025 * resamples)],
        "high": medians[int(0.975 * resamples)],
    }


def percentiles(runs: Sequence[Sequence[float]], share: float) -> list[float]:
    """Return the value below which a share of each run lies."""
    return [sorted(run)[int(share * (len(run) - 1))] for run in runs]


class Kept:
    """Figures of a benchmark in a file, so that one that was interrupted goes on where it was; without a file, none."""

    def __init__(self, path: Path | None) -> None:
        """Raises `SystemExit` where the file is of other code or of another machine: figures of both say nothing."""
        self._path = path
        self._found: dict[str, Any] = {"taken by": taken_by()}
        if path is not None and path.exists():
            was, now = json.loads(path.read_text()), self._found["taken by"]
            if was.get("taken by") != now:
                raise SystemExit(f"{path} is of {was.get('taken by')}, and this is {now}; remove it to begin anew")
            self._found = was

    def take(self, name: str, take: Callable[[], Any]) -> Any:
        """Return the figures of a name, as JSON has them; take them if there are none yet."""
        if name not in self._found:
            self._found[name] = json.loads(json.dumps(take()))
            if self._path is not None:
                whole = self._path.with_suffix(".new")
                whole.write_text(json.dumps(self._found))
                whole.replace(self._path)
        return self._found[name]


def taken_by() -> dict[str, str]:
    """Say what figures are of that are taken now: which kind of machine, and which code."""
    described = machine("cuda:0" if torch.cuda.is_available() else "cpu")
    code, library = hashlib.sha256(), find_spec("elastic")
    assert library is not None
    for root in (Path(__file__).parent, *map(Path, library.submodule_search_locations or ())):
        for path in sorted(root.rglob("*.py")):
            code.update(path.read_bytes())
    return {"machine": f"{described['device']}, {described['isa']}", "code": code.hexdigest()[:16]}


class Repeater(threading.Thread):
    """A thread that repeats an action while its context lasts; the action is given the number of the repetition."""

    def __init__(self, action: Callable[[int], Any]) -> None:
        super().__init__(daemon=True)
        self.done = 0
        self._action = action
        self._ending = threading.Event()

    def run(self) -> None:
        while not self._ending.is_set():
            self._action(self.done)
            self.done += 1

    def __enter__(self) -> Repeater:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.set()
        self.join()


class AnotherProcess:
    """This script in a process of its own, with this or another checkout, which computes a round when told to."""

    def __init__(self, options: argparse.Namespace, round_of: str, *, checkout: str | None = None) -> None:
        quick = ["--quick"] if options.quick else []
        paths = {"PYTHONPATH": checkout} if checkout else {}
        self._process = subprocess.Popen(
            [sys.executable, sys.argv[0], "--device", options.device, "--round-of", round_of, *quick],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | paths,
        )  # fmt: skip

    def __enter__(self) -> AnotherProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.stdin.close()
        self._process.wait()

    def round(self) -> None:
        """Have it compute a round, and wait for its end."""
        print("go", file=self._process.stdin, flush=True)
        if self._process.stdout.readline() != "done\n":
            raise RuntimeError("the other process has ended")


class EarlierCheckout(AnotherProcess):
    """Another checkout of Elastic, that of `--earlier`."""

    def __init__(self, options: argparse.Namespace, round_of: str) -> None:
        super().__init__(options, round_of, checkout=options.earlier)


def compute_rounds(work: Callable[[], Any]) -> None:
    """Be `AnotherProcess`."""
    for _ in sys.stdin:
        work()
        print("done", flush=True)


def show(ratio_: dict[str, float]) -> str:
    return f"{ratio_['median']:.2f} [{ratio_['low']:.2f}, {ratio_['high']:.2f}]"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def small_model(hidden: int, intermediate: int, layers: int, dtype: torch.dtype, device: str) -> Any:
    """Make a Llama of these sizes with random weights, heads of 64."""
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)


def finish(name: str, device: str, results: Any) -> None:
    """Print the last line: one JSON document."""
    print(json.dumps({"benchmark": name, "machine": machine(device), "results": results}), flush=True)


def _cpu_name() -> str:
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()
