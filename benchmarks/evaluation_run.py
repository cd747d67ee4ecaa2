"""One run of the evaluation, in a process of its own: a system, a budget, a trace.

    python benchmarks/evaluation_run.py SPEC.json OUT.json

`evaluate.py` starts it. OUT gets the summary with arrays, and of each request its prompt and the weights of its tokens.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import elastic
from elastic.bench.replay.open_loop import ReplayOptions, replay
from elastic.bench.report.summary import summarize
from elastic.bench.traces.generator import Lognormal, OnOff, generate
from elastic.bench.traces.prompts import random_prompts, text_prompts
from elastic.bench.traces.readers import read_trace
from elastic.bench.traces.trace import Trace
from elastic.config import SLO, Place, Policy
from elastic.engines.continuous import ContinuousEngine
from elastic.model_files import load_model

SECONDS = ("tick_s", "cooldown_s", "dwell_s", "idle_s")
"""The settings of a policy that are shortened when a trace is replayed faster."""
CALIBRATION = 4
"""The first of so many parts of the held-out text is for the order of the layers; prompts come from the others."""


@dataclass(frozen=True)
class Spec:
    """The settings of a run; the fields are those of evaluation.toml."""

    workload: dict[str, Any]
    system: dict[str, Any]
    kv_tokens: int
    token_scale: float
    pace: float
    slo_ttft_s: float | None
    settings: dict[str, Any]
    model: str
    device: str
    traces: str
    unloaded: bool = False
    order: str = "front_to_back"
    """The order in which layers are swapped: a rule, or a profile's file."""
    variant_cache: str | None = None
    """The folder of packed layers and of the paths that were measured for them: all runs take the same."""


def make_trace(spec: Spec) -> Trace:
    """Make the workload, cut and scaled; or a few of its requests one after the other."""
    work, settings = spec.workload, spec.settings
    if "file" in work:
        trace = read_trace(Path(spec.traces) / work["file"], seed=settings["seed"])
        trace = trace.cut(*(work.get("window") or trace.densest(work["densest_s"])))
        trace = trace.with_rate(work.get("kept", 1.0), "thin", seed=settings["seed"])
    else:
        lengths = Lognormal(*work["lognormal"])
        trace = generate(OnOff(*work["on_off"]), lengths, work["duration_s"], seed=settings["seed"])
        if work.get("kept", 1.0) != 1:
            trace = trace.with_rate(work["kept"], "thin", seed=settings["seed"])
    trace = trace.with_rate(spec.pace, "stretch").with_tokens(spec.token_scale, most=settings["most_tokens"])
    return _alone(trace, settings["unloaded_requests"]) if spec.unloaded else trace


def _alone(trace: Trace, count: int) -> Trace:
    """So many requests from all over the trace, each a second after the one before."""
    step = max(1, len(trace.requests) // count)
    chosen = trace.requests[::step][:count]
    return replace(trace, requests=tuple(replace(r, arrival_s=float(i)) for i, r in enumerate(chosen)), window=None)


def make_policy(spec: Spec) -> Any:
    name = spec.system["policy"]
    if name == "manual":
        return name
    policy = Policy.named(name)
    return replace(policy, **{field: getattr(policy, field) / spec.pace for field in SECONDS})


def wrap(model: Any, spec: Spec) -> None:
    """Every system has the same budget: what full weights and `kv_tokens` of cache need.

    A system that never moves layers needs no staging: the baselines get its bytes on top, so that none of their cache
    is lost to what they do not use. Static INT4 is the same packed kernels, all layers swapped before the run.
    """
    never_moves = spec.system["policy"] == "manual"
    packs = bool(spec.system.get("all_layers")) or not never_moves
    options: dict[str, Any] = {}
    if packs:
        options = {"variants": (spec.settings["variant"],), "variant_cache": spec.variant_cache, "order": spec.order}
    device = torch.device(spec.device)
    page_bytes = spec.settings["page_bytes"] if device.type == "cpu" else None
    elastic.wrap(model, places=[Place(f"{spec.device}#probe", device, 8 << 30, page_bytes)], **options)
    owners = model.elastic.status().places[0].owners
    elastic.unwrap(model)
    weights = sum(size for owner, size in owners.items() if owner != "staging")
    budget = weights + spec.kv_tokens * bytes_per_token(model) + (owners.get("staging", 0) if never_moves else 0)
    slo = SLO(ttft_s=spec.slo_ttft_s)
    place = Place(spec.device, device, budget, page_bytes)
    elastic.wrap(model, places=[place], policy=make_policy(spec), slo=slo, **options)
    if spec.system.get("all_layers"):
        model.elastic.swap(range(model.elastic.status().layers), spec.settings["variant"])


def bytes_per_token(model: Any) -> int:
    """Of keys and values in all layers."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * int(config.num_hidden_layers) * int(heads) * int(size) * int(model.dtype.itemsize)


def make_prompts(trace: Trace, model: Any, tokenizer: Any, seed: int) -> list[tuple[int, ...]]:
    """Passages of text like what the model was trained on; random tokens would make every precision alike bad."""
    text = Path(__file__).parents[1] / "training" / "heldout.txt"
    if tokenizer is None or not text.is_file():
        return random_prompts(trace, model.config.vocab_size, seed=seed)
    passages = text_of(text)
    passages = passages[len(passages) // CALIBRATION :]
    ids = tokenizer(passages, add_special_tokens=False, verbose=False)["input_ids"]
    return text_prompts(trace, ids, seed=seed)


def text_of(path: Path) -> str:
    return path.read_text(errors="replace")


def run(spec: Spec) -> dict[str, Any]:
    torch.set_num_threads(1)
    model, tokenizer = load_model(spec.model, torch.device(spec.device), option="model")
    model.to(spec.device)
    trace = make_trace(spec)
    prompts = make_prompts(trace, model, tokenizer, spec.settings["seed"])
    wrap(model, spec)
    engine = ContinuousEngine(model, share_prefixes=False)
    engine.start()
    options = ReplayOptions(spec.settings["warmup"], spec.settings["timeout_s"], spec.settings["sample_every_s"])
    slo = SLO(ttft_s=spec.slo_ttft_s) if spec.slo_ttft_s else None
    try:
        done = replay(engine, trace, prompts, slo, options=options)
    finally:
        engine.stop(drain=False, timeout_s=30)
    requests = [
        {"prompt": prompt, "weights": record.weights}
        for prompt, record in zip(prompts, done.records, strict=False)
        if record.completed
    ]
    return {"summary": summarize(done, detailed=True), "requests": requests}


def main(source: str, target: str) -> None:
    result = run(Spec(**json.loads(Path(source).read_text())))
    partial = Path(target).with_suffix(".part")
    partial.write_text(json.dumps(result))
    partial.rename(target)


if __name__ == "__main__":
    main(*sys.argv[1:3])
