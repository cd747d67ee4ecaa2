"""How well estimates from fingerprints predict latency and memory, beside the paper's methods, and what they cost.

    python benchmarks/estimate.py [--only SHAPE ...] [--quick] [--keep FILE]

Six random models of three kinds (llama; qwen3_moe; gemma3, of sliding and full layers). Fingerprints of a few layers of
each are measured first, in one process. Then two ranks, processes pinned to a core each, serve the whole model: in full
precision, int8, int4 and 2:4; one alone, as a pipeline of two stages, and sharing all layers (full precision: layers in
a variant are not shared). Prompts, answers and batches are such as no fingerprint was measured at. Targets:

- `latency`: TTFT + (n - 1) TPOT of requests that are alone, TPOT of batches of 2 and 8: mean error at most 4.9 %, P90
  at most 10 %. A machine's pace changes within minutes: fingerprints of a form are measured before its configurations
  and once more behind them, and the estimate is the mean of both; `before` has the errors of the first alone. Beside it
  the paper's method L2, which knows one prompt, and neither context nor batch
- `memory`: bytes of the fullest rank: what it holds, and what its process has more in its largest batch. A rank that is
  alone is a fresh process, with keys and values of that batch, and its pages are those of its ledger. Of several, which
  are a fresh fleet for each configuration, they are those that the kernel has of their memory files and that are in
  use: weights, and keys and values of two short requests of each instance. Mean error at most 3 % of each; that of the
  batches of several by themselves is told, too. Beside it the paper's M1, divided evenly among the ranks
- `cost`: processor seconds of measuring fingerprints: at least 6 times fewer than measuring the same batches in every
  configuration, 4 times fewer than in the whole model for each form (L1 and M1); and the most bytes of a fingerprint's
  process over the share of the model that it has: at most 1.1
- `r_squared`: how linear seconds are in what they are fitted to, for each kind of layer and form; figure 7
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from common import KEEP, Kept, arguments, finish
from estimate_fleets import Measured, measure
from estimate_memory import MIXES, peak_bytes
from estimate_report import Row, report
from estimate_shapes import (
    CONTEXT,
    DEGREES,
    FORMS,
    POINTS,
    STEP_TOKENS,
    answer_tokens,
    at_rest,
    save,
    shapes,
)

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from elastic.cluster.fleet.profiling.guest import measure_two_ranks
from elastic.engines.continuous.chunk_profile import Mix, profile_chunks
from elastic.estimation.activations import bound_bytes
from elastic.estimation.estimate import Estimator
from elastic.estimation.fingerprint import fingerprint
from elastic.estimation.kv_room import KVBlockCapacity, kv_shape_of
from elastic.estimation.model_layout import ModelLayout, layout_of
from elastic.estimation.profile import (
    ROUNDS,
    CostProfile,
    engine_for,
    fingerprint_layers,
    measure_fingerprints,
)
from elastic.estimation.profiles.store import from_json, merged, to_json
from elastic.planning.estimate.configuration import Configuration
from elastic.planning.estimate.devices import PAGE_BYTES, Device, of_cpu
from elastic.planning.estimate.paper import OUTPUTS, Latency, MemoryParts
from elastic.planning.estimate.performance import InstanceCost, Load
from elastic.planning.estimate.ranking import RankBytes
from elastic.planning.sharding.share import even_stages
from support.estimation.fingerprints import extrapolated_latency, paper_fingerprints

PROMPT = 64
"""Of the paper's requests."""
GIB = 1 << 30
Taken = Mapping[tuple[str, int, int], Measured]
"""(Form, TP, PP) -> what was measured of it."""


class Shape:
    """One model, what its fingerprints tell of it, and the errors of that."""

    def __init__(
        self, name: str, path: Path, forms: Sequence[str], most_s: float, links: CostProfile, kept: Kept
    ) -> None:
        self.name, self.path, self.forms, self.most_s, self._kept = name, path, forms, most_s, kept
        self.layout: ModelLayout = layout_of(str(path), torch.float32)
        self._links = links
        self.profiles: Sequence[CostProfile] = ()
        """Of before what each form takes was measured, and of behind it."""

    @property
    def profile(self) -> CostProfile:
        """What a user's estimate is made of."""
        return self.profiles[0]

    def fingerprints(self, form: str, when: str) -> CostProfile:
        """Measure the fingerprints of a form."""
        sizes = {"context": CONTEXT, "step_tokens": STEP_TOKENS, "most_s": self.most_s}
        profile = self.part(
            f"fingerprints, {form}, {when}", lambda: to_json(measure_fingerprints(self.path, [form], **sizes))
        )
        return from_json(profile).with_links(self._links)

    def part(self, name: str, take: Callable[[], Any]) -> Any:
        """Return a part of the figures, as JSON has them."""
        return part(self._kept, f"{self.name}, {name}", take)

    def measured(self, rounds: int) -> Taken:
        """Return what each form takes at each degree that can be had: layers in a variant are shared by no ranks."""
        measured: dict[tuple[str, int, int], Measured] = {}
        before: list[CostProfile] = []
        behind: list[CostProfile] = []
        for form in self.forms:
            before.append(self.fingerprints(form, "before"))
            for tp, pp in [degree for degree in DEGREES if form == "full" or degree[0] == 1]:
                take = partial(measure, self.path, self.layers, form, tp, pp, rounds)
                fields = self.part(f"{form}, {tp}x{pp}", lambda take=take: asdict(take()))
                measured[form, tp, pp] = Measured(**fields)
            behind.append(self.fingerprints(form, "behind"))
        self.profiles = [reduce(merged, profiles) for profiles in (before, behind)]
        return measured

    @property
    def layers(self) -> int:
        return len(self.layout.decoder.layers)

    def estimator(self, load: Load, profile: CostProfile | None = None) -> Estimator:
        devices = [Device(f"cpu#{i}", of_cpu(GIB, 1e11, 1e10, 1e9), GIB) for i in range(4)]
        return Estimator(self.layout, devices, load, STEP_TOKENS, None, 1, profile or self.profile, planned=True)

    def cost(self, form: str, tp: int, pp: int, profile: CostProfile) -> InstanceCost:
        estimator, stages = self.estimator(Load(90, 12), profile), even_stages(self.layers, pp)
        cost = estimator.instance_cost(Configuration(tp, pp, form), stages)
        assert cost is not None
        return cost

    def estimates(self, form: str, tp: int, pp: int, profile: CostProfile) -> dict[str, float]:
        """Return what is estimated of each point, and of those with one request TTFT and TPOT."""
        cost, seconds = self.cost(form, tp, pp, profile), {}
        for point in POINTS:
            batch, prompt, new = point
            load = Load(prompt, answer_tokens(point))
            tpot_s = cost.round_s(load, batch)
            if batch == 1:
                seconds |= {f"TTFT {point}": cost.ttft_s(load), f"TPOT {point}": tpot_s}
            seconds[f"{point}"] = cost.ttft_s(load) + (new - 1) * tpot_s if batch == 1 else tpot_s
        return seconds

    def latency(self, measured: Taken) -> list[Row]:
        """Return the relative errors of each configuration, ours and the paper's."""
        rows, paper = [], {form: self.paper_latency(form) for form in self.forms}
        for (form, tp, pp), taken in measured.items():
            seconds = taken.latency_s | {
                f"{part} {name}": value
                for part, values in (("TTFT", taken.ttft_s), ("TPOT", taken.tpot_s))
                for name, value in values.items()
            }
            before, behind = [self.estimates(form, tp, pp, profile) for profile in self.profiles]
            papers = {
                str(point): (paper[form](point[2]) if point[0] == 1 else paper[form].tpot_s)
                / taken.latency_s[str(point)]
                - 1
                for point in POINTS
            }
            rows.append(
                {
                    "shape": self.name,
                    "form": form,
                    "tp": tp,
                    "pp": pp,
                    "ours": {name: (before[name] + behind[name]) / 2 / seconds[name] - 1 for name in before},
                    "before": {name: before[name] / seconds[name] - 1 for name in before},
                    "paper": papers,
                }
            )
        return rows

    def paper_latency(self, form: str) -> Latency:
        """Return the model's TTFT and TPOT by the paper's method L2."""
        outputs = self.part(f"the paper's fingerprints, {form}", partial(self.paper_outputs, form))
        first, *more = [Latency.solve(*zip(OUTPUTS, seconds, strict=True)) for seconds in outputs]
        return extrapolated_latency(first, dict(zip(self.counts, more, strict=True)), self.counts)

    def paper_outputs(self, form: str) -> list[list[float]]:
        """Return the seconds of the paper's two outputs in each of its fingerprints."""
        steps: list[Mix] = [((0, PROMPT),), *(((PROMPT + n, 1),) for n in range(max(OUTPUTS) - 1))]
        taken = [self.batches(layers, form, steps) for layers in paper_fingerprints(self.layout.kinds)]
        return [[sum(each.seconds for each in batches[:n]) for n in OUTPUTS] for batches in taken]

    @property
    def counts(self) -> dict[str, int]:
        return {kind.name: len(kind.layers) for kind in self.layout.kinds}

    def batches(self, layers: Sequence[int], form: str, mixes: Sequence[Mix], rounds: int = ROUNDS) -> Sequence[Any]:
        """Measure batches in some layers of the model."""
        small = fingerprint(self.path, layers, torch.float32)
        with engine_for(small, form, torch.device("cpu"), CONTEXT + STEP_TOKENS, STEP_TOKENS) as engine:
            return profile_chunks(engine, mixes, rounds, most_s=self.most_s).whole

    def memory(self, measured: Taken) -> list[Row]:
        """Return the bytes of the fullest rank in its largest batch, ours and measured."""
        rows = []
        for (form, tp, pp), taken in measured.items():
            row: Row = {"shape": self.name, "form": form, "tp": tp, "pp": pp}
            if tp * pp == 1:
                rank = self.rank(form)
                row["measured"] = self.part(f"one rank, {form}", partial(peak_bytes, self.path, form))
                row["ours"] = rank.fixed + rank.layers + rank.staging + self.batch_bytes(form)
            else:
                row["batch"] = pp * self.served_batch_bytes(form)
                row["measured_batch"] = max(taken.batch_bytes[: tp * pp])
                row["ours"], row["measured"] = self.shared_bytes(form, tp, pp), max(taken.rank_bytes[: tp * pp])
            rows.append(row)
            rows[-1]["paper"] = self.paper_bytes(measured, tp, pp) if form == "full" and tp * pp > 1 else None
        return rows

    def paper_bytes(self, measured: Taken, tp: int, pp: int) -> float:
        """Return the bytes of a rank by the paper's method M1: all together, solved at three, and divided evenly."""
        sums = [sum(measured["full", *each].rank_bytes[: each[0] * each[1]]) for each in DEGREES]
        return MemoryParts.solve(*sums).footprint(tp, pp) / (tp * pp)

    def rank(self, form: str) -> RankBytes:
        """Return a rank that has the whole model."""
        estimator = self.estimator(Load(250, 12))
        return estimator.rank(estimator.devices[0], range(self.layers), Configuration(weights=form), 8)

    def shared_bytes(self, form: str, tp: int, pp: int) -> int:
        """Return the bytes of the fullest of several ranks in the largest batch of the points, with keys and values of
        what was served before: each stage has those of as many instances as there are stages."""
        batch, prompt, _ = at_rest(pp)
        tokens = prompt + answer_tokens(at_rest(pp))
        pages, held = self.estimator(Load(250, 12)).pages, []
        for layers in even_stages(self.layers, pp):
            kv = self.room(tp, layers).pages(batch // pp, tokens)
            held.append(pages.fixed + pages.layers(layers, form, tp) + pp * kv)
        return max(held) * PAGE_BYTES["cpu"] + pp * self.served_batch_bytes(form)

    def room(self, tp: int, layers: range) -> KVBlockCapacity:
        """Return the blocks of some layers at one of the ranks that share them."""
        config = self.layout.decoder.config
        return KVBlockCapacity(config, None, PAGE_BYTES["cpu"], kv_shape_of(config, 4), tp, layers)

    def served_batch_bytes(self, form: str) -> int:
        """Return what the largest batch of the points takes at a rank."""
        chunks = [(prompt, min(prompt, STEP_TOKENS)) for _, prompt, _ in POINTS]
        prompts: list[Mix] = [((prompt - chunk, chunk),) for prompt, chunk in chunks]
        steps: list[Mix] = [((point[1] + answer_tokens(point), 1),) * point[0] for point in POINTS]
        most = max(bound_bytes(self.layout, mix, "full", "cpu") for mix in prompts + steps)
        return int(self.profile.activations[form] * most) + self.profile.scratch_bytes[form]

    def batch_bytes(self, form: str) -> int:
        """Return what the largest of the batches that are measured takes, with its keys and values."""
        room, share, sums = self.room(1, range(self.layers)), self.profile.activations[form], []
        for mix in MIXES:
            pages = room.pages(len(mix), max(start + count for start, count in mix))
            sums.append(share * bound_bytes(self.layout, mix, "full", "cpu") + pages * PAGE_BYTES["cpu"])
        return int(max(sums)) + self.profile.scratch_bytes[form]

    def cost_row(self, measured: Taken) -> Row:
        """Return processor seconds of the same batches in fingerprints and in the whole model, loading included.

        They are measured once each, in full precision. Every configuration keeps as many processors as it has ranks.
        """
        mixes = [*MIXES, ((0, STEP_TOKENS // 2),), ((205, 1),), ((205, 1),) * 2]
        ours = sum(self.core_s(fingerprint_layers(kind), mixes) for kind in self.layout.kinds)
        whole = self.core_s(range(self.layers), mixes)
        return {
            "shape": self.name,
            "layers": {kind.name: [len(fingerprint_layers(kind)), len(kind.layers)] for kind in self.layout.kinds},
            "ours_core_s": ours,
            "over_all": whole * sum(tp * pp for _, tp, pp in measured) / (ours * len(self.forms)),
            "over_whole": whole / ours,
            "fingerprint_bytes": self.fingerprint_bytes(),
        }

    def core_s(self, layers: Sequence[int], mixes: Sequence[Mix]) -> float:
        began = time.process_time()
        self.batches(layers, "full", mixes, rounds=1)
        return time.process_time() - began

    def fingerprint_bytes(self) -> list[float]:
        """Return, by kind, the ledger's share of the whole model's bytes, over the share of its layers and the rest."""
        found, page = [], PAGE_BYTES["cpu"]
        pages = self.estimator(Load(90, 12)).pages
        for kind in self.layout.kinds:
            small = fingerprint(self.path, fingerprint_layers(kind), torch.float32)
            with engine_for(small, "full", torch.device("cpu"), CONTEXT, STEP_TOKENS):
                (place,) = small.elastic.status().places
                held = sum(nbytes for owner, nbytes in place.owners.items() if owner != "staging")
            due = (pages.fixed + pages.of_kind(kind, "full", 1) * len(fingerprint_layers(kind))) * page
            found.append(held / due)
        return found


def part(kept: Kept, name: str, take: Callable[[], Any]) -> Any:
    """Return a part of the figures, as JSON has them, and print a line when it is there."""
    began = time.perf_counter()
    taken = kept.take(name, take)
    print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    return taken


def main() -> None:
    options = arguments(__doc__.splitlines()[0], only={"nargs": "*", "default": []}, keep=KEEP)
    if options.device != "cpu":
        sys.exit("this benchmark pins ranks to cores: it is for a CPU")
    rounds, most_s, forms = (1, 0.3, FORMS[:2]) if options.quick else (2, 1.0, FORMS)
    kept = Kept(options.keep)
    links = from_json(part(kept, "links", lambda: to_json(measure_two_ranks())))
    latency: list[Row] = []
    memory: list[Row] = []
    costs: list[Row] = []
    fits: dict[str, float] = {}
    for name, config in shapes(quick=options.quick).items():
        if options.only and name not in options.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            shape = Shape(name, save(config, Path(folder)), forms, most_s, links, kept)
            measured = shape.measured(rounds)
            latency += shape.latency(measured)
            memory += shape.memory(measured)
            costs.append(shape.part("cost", partial(shape.cost_row, measured)))
            fits |= {f"{name}: {kind}, {form}": value for (kind, form), value in shape.profile.r_squared.items()}
    sums = report(latency, memory, costs, fits)
    rows = {"latency": latency, "memory": memory, "cost": costs, "r_squared": fits}
    finish(
        "estimate",
        options.device,
        {**sums, "links": {key: to_json(links)[key] for key in ("link", "contention", "handovers")}, "rows": rows},
    )


if __name__ == "__main__":
    main()
