"""Models on devices by intent and by policy, simulated: what is placed, and how long requests take.

    python benchmarks/placement.py [--trace AzureLLMInferenceTrace_conv.csv] [--devices 8*a6000]

Seconds are those of a data sheet at its peak rates, so bounds from below: figures are predictions, to compare planners
with each other. Requests are served first come, first served and one at a time, as in iServe's evaluation. Its figure
10: eight models one after another by three policies; aims: hybrid at most 1.25 times the median latency of least-loaded
on at most 0.7 of its devices. Its figure 16: 21 models on eight devices; aims: at least 18 placed for latency, 20 for
cost, 21 for memory and for GPU hours.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from baselines.alpaserve import KnownRequest, TimedOption, alpaserve
from baselines.planners import ByIntent, Planned, Planner, Static
from baselines.queueing import FirstComeFirstServed
from common import SEED, arguments, finish, table

from elastic.bench.traces.readers import read_trace
from elastic.estimation.device_list import parse_devices
from elastic.estimation.placement import ModelSpace
from elastic.planning.deployment.devices import WINDOW_S, DeviceState, after
from elastic.planning.deployment.placing import Deployment, Refusal
from elastic.planning.deployment.policies import POLICIES, THETA
from elastic.planning.estimate.devices import Device
from elastic.planning.estimate.intent import OBJECTIVES, Intent
from elastic.planning.estimate.performance import Load

WEIGHTS = ("full", "int8", "int4", "2:4")
EXPECTED = Load(prompt=1024, new=128)
"""What configurations are ranked for."""
SCALES = (2.5, 5.0, 7.5)
"""Of the latency of the least parallelism, without quantization: what requests may take. (Section 8.3)"""
PIPELINE_ONLY = ("falcon-7b",)
"""Models that the paper does not cut into tensor parallel parts. (Its table 1)"""


def shapes() -> dict[str, Any]:
    """Return the configs of the paper's six models."""
    half = {"dtype": torch.float16, "max_position_embeddings": 4096}
    falcon = {"alibi": False, "bias": False, "parallel_attn": True, "vocab_size": 65024, "dtype": torch.float16}

    def llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> Any:
        sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
        return transformers.LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=kv_heads, **half)

    return {
        "llama-2-7b": llama(4096, 11008, 32, 32, 32),
        "llama-2-13b": llama(5120, 13824, 40, 40, 40),
        "llama-2-70b": llama(8192, 28672, 80, 64, 8),
        "gpt-j-6b": transformers.GPTJConfig(dtype=torch.float16),
        "falcon-7b": transformers.FalconConfig(
            hidden_size=4544, num_hidden_layers=32, num_attention_heads=71, multi_query=True, **falcon
        ),
        "falcon-40b": transformers.FalconConfig(
            hidden_size=8192,
            num_hidden_layers=60,
            num_attention_heads=128,
            num_kv_heads=8,
            new_decoder_architecture=True,
            **falcon,
        ),
    }


SMALL = ("llama-2-7b", "gpt-j-6b", "falcon-7b", "llama-2-13b")
MIXES: Mapping[str, Sequence[str]] = {
    "small": (*SMALL, "falcon-40b", *SMALL, "llama-2-70b", *SMALL, "falcon-40b", *SMALL, "llama-2-70b", "falcon-7b"),
    "alike": (*(*SMALL, "falcon-40b", "llama-2-70b") * 3, *SMALL[:2], "falcon-7b"),
}
"""The paper does not say which of its six models are how often among the 21; the last one is a Falcon-7B."""


@dataclass(frozen=True)
class Request:
    """A request of the trace, of the model with this number."""

    at_s: float
    model: int
    load: Load


@dataclass
class Outcome:
    """What a planner led to."""

    placed: dict[int, tuple[Deployment, ...]] = field(default_factory=dict)
    refused: dict[int, Refusal] = field(default_factory=dict)
    latencies: list[tuple[Request, float]] = field(default_factory=list)
    """Of each request its seconds; inf for one whose model has no place."""
    busy_s: float = 0.0
    """Of all devices together."""

    @property
    def devices(self) -> set[str]:
        return {name for each in self.placed.values() for instance in each for name in instance.devices}

    def quantile(self, share: float) -> float:
        served = sorted(seconds for _, seconds in self.latencies if seconds < math.inf)
        return served[int(share * (len(served) - 1))] if served else math.nan


@dataclass
class Cluster:
    """Devices on which models are placed while requests are served."""

    devices: Sequence[Device]
    planner: Planner
    seconds: dict[Any, tuple[float, ...]] = field(default_factory=dict)

    def run(
        self,
        names: Sequence[str],
        at_s: Callable[[int], float],
        options: Mapping[str, Sequence[TimedOption]],
        requests: Sequence[Request],
    ) -> Outcome:
        """Place model after model at their times, and serve the requests between."""
        queue = FirstComeFirstServed(device.name for device in self.devices)
        free = tuple(DeviceState(device.name, device.memory_bytes) for device in self.devices)
        outcome, numbers = Outcome(), list[tuple[Request, int | None]]()
        arrivals: Iterator[tuple[float, int, Any]] = iter(
            sorted([*((at_s(n), 0, n) for n in range(len(names))), *((r.at_s, 1, r) for r in requests)], key=_time)
        )
        for now_s, _, what in arrivals:
            queue.advance(now_s)
            if isinstance(what, Request):
                numbers.append((what, self._submit(queue, what, names, outcome, options)))
                continue
            now = tuple(DeviceState(s.name, s.free_bytes, queue.load(s.name, now_s, WINDOW_S), s.models) for s in free)
            placed = self.planner.place(f"{names[what]}#{what}", options[names[what]], now)
            if isinstance(placed, Refusal):
                outcome.refused[what] = placed
                continue
            outcome.placed[what] = placed
            for instance in placed:
                free = after(free, instance.stages, (0.0,) * len(instance.stages), names[what])
        queue.advance()
        for request, number in numbers:
            outcome.latencies.append((request, math.inf if number is None else queue.ends_s[number] - request.at_s))
        last_s = max(queue.ends_s, default=0.0)
        outcome.busy_s = sum(queue.busy_s(device.name, 0.0, last_s) for device in self.devices)
        return outcome

    def _submit(
        self,
        queue: FirstComeFirstServed,
        request: Request,
        names: Sequence[str],
        outcome: Outcome,
        options: Mapping[str, Sequence[TimedOption]],
    ) -> int | None:
        instances = outcome.placed.get(request.model)
        if not instances:
            return None
        chosen = min(instances, key=lambda each: queue.free_s(each.stages[0].devices))
        name = names[request.model]
        key = name, chosen.configuration, tuple(stage.layers for stage in chosen.stages), request.load
        if key not in self.seconds:
            option = next(o for o in options[name] if o.configuration == chosen.configuration)
            self.seconds[key] = option.cost(chosen.stages).alone_s(request.load)
        pairs = zip(chosen.stages, self.seconds[key], strict=True)
        return queue.submit(request.at_s, [(stage.devices, seconds) for stage, seconds in pairs])


def _time(event: tuple[float, int, Any]) -> tuple[float, int]:
    return event[:2]


def lengths(trace: str | None) -> list[Load]:
    """Return lengths of requests: of a trace in steps of 128 and 16 tokens, or drawn to be like a conversation's."""
    if trace is not None:
        pairs = [(r.prompt_tokens, r.output_tokens) for r in read_trace(trace).requests]
    else:
        draw = random.Random(SEED)
        pairs = [(int(draw.lognormvariate(6.6, 0.8)), int(draw.lognormvariate(5.0, 0.7))) for _ in range(4000)]
    return [Load(min(1024, max(128, -(-p // 128) * 128)), min(512, max(16, -(-n // 16) * 16))) for p, n in pairs]


def requests_of(
    count: int,
    at_s: Callable[[int], float],
    rate: Callable[[float], float],
    until_s: float,
    sizes: Sequence[Load],
    seed: int,
) -> list[Request]:
    """Draw arrivals at a rate that changes, each of a model that should be there by then, at random."""
    draw, now_s, found = random.Random(seed), 0.0, []
    most = max(rate(float(second)) for second in range(int(until_s)))
    while (now_s := now_s + draw.expovariate(most)) < until_s:
        models = [n for n in range(count) if at_s(n) <= now_s]
        if models and draw.random() < rate(now_s) / most:
            found.append(Request(now_s, draw.choice(models), draw.choice(sizes)))
    return found


def ranked(devices: Sequence[Device], intent: Intent) -> dict[str, Sequence[TimedOption]]:
    """Return the options of each of the paper's models."""
    space = ModelSpace(EXPECTED, intent, WEIGHTS, planned=True)
    found: dict[str, Sequence[TimedOption]] = {}
    for name, config in shapes().items():
        every = space.options(config, devices)
        found[name] = [o for o in every if o.configuration.tp == 1 or name not in PIPELINE_ONLY]
    return found


def least_parallel_s(options: Mapping[str, Sequence[TimedOption]]) -> dict[str, float]:
    """Return the latency of each model at the least parallelism, without quantization."""
    found = {}
    for name, every in options.items():
        full = [o for o in every if not o.configuration.compressed and o.estimate.fits]
        best = min(full, key=lambda o: (o.configuration.ranks, o.configuration.tp))
        found[name] = best.estimate.latency_s
    return found


def figure_10(
    devices: Sequence[Device], options: Mapping[str, Sequence[TimedOption]], sizes: Sequence[Load], *, quick: bool
) -> list[Any]:
    """Print how many devices each policy takes, and what that costs of latency, at several rates of arrivals."""
    names = ("llama-2-7b", "gpt-j-6b", "llama-2-13b", "falcon-7b") * 2
    rows: list[Any] = []
    for rate, seed in itertools.product(FIGURE_10_RATES, range(1 if quick else 3)):
        requests = requests_of(len(names), _every_150_s, partial(_wave, rate), 1800.0, sizes, seed)
        runs = {p: Cluster(devices, ByIntent(p, THETA)).run(names, _every_150_s, options, requests) for p in POLICIES}
        least = runs["least-loaded"]
        rows += [
            [
                rate,
                seed,
                f"{least.busy_s / 1800 / len(devices):.0%}",
                policy,
                len(each.devices),
                f"{len(each.devices) / len(least.devices):.2f}",
                *(f"{each.quantile(q):.2f}" for q in (0.5, 0.95)),
                *(f"{each.quantile(q) / least.quantile(q):.2f}" for q in (0.5, 0.95)),
            ]
            for policy, each in runs.items()
        ]
    print(f"\nfigure 10, predicted: {len(names)} models, one every 150 s; theta {THETA}")
    table(["rate", "seed", "load", "policy", "devices", "share", "P50, s", "P95, s", "P50 x", "P95 x"], rows)
    print(
        "load: mean of least-loaded; share, x: of least-loaded; aims for hybrid: share at most 0.70, P50 x at most 1.25"
    )
    return rows


FIGURE_10_RATES = (0.3, 0.6, 0.9)
FIGURE_16_RATE = 0.6
"""Requests a second, in the mean."""


def _every_150_s(number: int) -> float:
    return 150.0 * number


def _wave(mean: float, now_s: float) -> float:
    return mean * (1 + math.sin(2 * math.pi * now_s / 600))


def _two_every_180_s(number: int) -> float:
    return 180.0 * (number // 2)


def figure_16(devices: Sequence[Device], names: Sequence[str], sizes: Sequence[Load], *, quick: bool) -> list[Any]:
    """Print how many of 21 models each planner places, and how their requests fare for an hour."""
    until_s = 2400.0 if quick else 3600.0
    requests = requests_of(len(names), _two_every_180_s, lambda _: FIGURE_16_RATE, until_s, sizes, SEED)
    intents = {name: Intent(name) for name in OBJECTIVES}
    intents["latency within 20 %"] = Intent("latency", tolerance=0.2)
    ranked_by = {name: ranked(devices, intent) for name, intent in intents.items()}
    options = ranked_by["latency"]
    alone_s = least_parallel_s(options)
    planners: list[tuple[str, Planner, str]] = [(f"intent {name}", ByIntent(), name) for name in intents]
    planners += [(f"static {parallel}", Static(parallel), "latency") for parallel in ("tp", "pp", "as loaded")]
    for name, drop in (("AlpaServe", True), ("AlpaServe*", False)):
        planners.append((name, alpaserve_of(devices, names, options, requests, alone_s, drop=drop), "latency"))
    rows = []
    for name, planner, by in planners:
        outcome = Cluster(devices, planner).run(names, _two_every_180_s, ranked_by[by], requests)
        rows.append(_row(name, names, outcome, alone_s))
    print(f"\nfigure 16, predicted: {len(requests)} requests for {len(names)} models on {len(devices)} devices")
    head = ["planner", "placed", "GiB", "devices", "served/s", "per busy s", "P50, s", "P95, s"]
    table([*head, *(f"in {scale} x" for scale in SCALES)], rows)
    print("served/s: until the last one is done; in N x: the share of all requests within N times the latency of the")
    print("least parallelism; aims: placed at least 18 for latency, 20 for cost, 21 for memory and for gpu_hours")
    return rows


def alpaserve_of(
    devices: Sequence[Device],
    names: Sequence[str],
    options: Mapping[str, Sequence[TimedOption]],
    requests: Sequence[Request],
    alone_s: Mapping[str, float],
    *,
    drop: bool,
) -> Planned:
    """Have AlpaServe plan with the last requests known, when all models should be there."""
    every = {f"{name}#{number}": options[name] for number, name in enumerate(names)}
    models = list(every)
    known = [
        KnownRequest(r.at_s, models[r.model], r.load, 5.0 * alone_s[names[r.model]]) for r in requests[-KNOWN_REQUESTS:]
    ]
    states = [DeviceState(device.name, device.memory_bytes) for device in devices]
    return Planned(alpaserve(every, states, known, drop=drop))


KNOWN_REQUESTS = 400


def _row(name: str, names: Sequence[str], outcome: Outcome, alone_s: Mapping[str, float]) -> list[Any]:
    served = [(r, s) for r, s in outcome.latencies if s < math.inf]
    last_s = max((r.at_s + s for r, s in served), default=1.0)
    within = [
        sum(s <= scale * alone_s[names[r.model]] for r, s in outcome.latencies) / len(outcome.latencies)
        for scale in SCALES
    ]
    gib = sum(each.nbytes for instances in outcome.placed.values() for each in instances) / 2**30
    return [
        name,
        len(outcome.placed),
        f"{gib:.0f}",
        len(outcome.devices),
        f"{len(served) / last_s:.3f}",
        f"{len(served) / outcome.busy_s if outcome.busy_s else 0:.3f}",
        f"{outcome.quantile(0.5):.2f}",
        f"{outcome.quantile(0.95):.1f}",
        *(f"{share:.0%}" for share in within),
    ]


def main() -> None:
    options = arguments(
        __doc__.splitlines()[0],
        trace={"default": None, "help": "file whose lengths requests have; else they are drawn"},
        mix={"default": "small", "choices": sorted(MIXES), "help": "of the 21 models: most small, or all as often"},
        devices={"default": "8*a6000", "help": "data sheet, as of elastic estimate (%(default)s)"},
    )
    devices = parse_devices(options.devices)
    kind = devices[0].kind
    print(f"{len(devices)} x {kind.name}, {devices[0].memory_bytes / 1e9:.0f} GB: {kind.source}. Predictions.")
    sizes = lengths(options.trace)
    policies = figure_10(devices, ranked(devices, Intent("cost")), sizes, quick=options.quick)
    planners = figure_16(devices, MIXES[options.mix], sizes, quick=options.quick)
    finish("placement", "cpu", {"devices": asdict(kind), "figure_10": policies, "figure_16": planners})


if __name__ == "__main__":
    main()
