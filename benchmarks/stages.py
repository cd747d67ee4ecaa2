"""What one request waits, and how many tokens many get, by the stages that ranks are grouped in (KunServe, figure 5).

    python benchmarks/stages.py [--rounds 5] [--keep FILE]

The same ranks serve each time: as instances that compute all layers themselves, and in groups, each member a stage
that has dropped the layers of the others. Requests that are alone, one after another, give TTFT and TPOT; some for each
rank, all at once, give tokens/s. Memory is short nowhere: this is what stages take, not what they give (`overload.py`).

**Measured**: two ranks, pinned to a core each, with the Llama of 40M parameters of `serving.py`. Each round starts
fresh processes, which serve both ways in random order. **Predicted**, by the simulator, of the same requests: these two
ranks, to be held against the measured ones; and twelve in groups of up to twelve, which two cores cannot show. What
steps cost is fitted in this process before the rounds, as ranks do it; what an exchange takes, and how much two ranks
slow each other, is measured between two. Twelve ranks do not slow each other, and no simulated step has noise.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import KEEP, SEED, Kept, arguments, finish, ratio, show, table
from microbatches import fitted
from overload import ENGINE, LAYERS
from serving import Answer, Load, fleet, prompt, save_model, summary, warm_up

import elastic
from elastic.cluster.fleet.planning.policies import chosen
from elastic.cluster.fleet.profiling.guest import measure_two_ranks
from elastic.engines.base import Output, Request
from elastic.planning.pipeline.chunk_cost import Chunk, ChunkCost
from elastic.sim.core.clock import VirtualClock
from elastic.sim.core.fleet import RankModel
from elastic.sim.core.host import HostSharing
from elastic.sim.core.instance import EngineOptions, PlacePages
from elastic.sim.core.threads import SimulatedThreads
from elastic.sim.mechanisms.fleet import ElasticFleet
from elastic.sim.mechanisms.model import LayeredModel, Links
from elastic.sim.policies import Mechanisms, make_fleet

CORES = [(0,), (1,)]
REAL, MANY = (1, 2), (1, 2, 3, 4, 6, 12)
"""Stages of two ranks, and of as many as the last."""
ALONE, PROMPT, ANSWER, EACH = 4, 256, 48, 24
"""Requests that are alone, their tokens, and the requests of each rank that come at once."""
LAYER_PAGES, KV_PAGES, BLOCKS = 208, 2, 512
"""Of a layer's weights, of a block's keys and values in a layer, and the blocks that a rank has room for."""
PAGE_BYTES, HIDDEN_BYTES = 64 << 10, 4 * 512
BEAT_TIMEOUT_S = 20.0
"""Of ranks that other processes keep from their cores."""
GROUPED_S, LOOK_S = 10.0, 1.0
"""Simulated seconds: until ranks are grouped, and between looks at whether all requests have ended."""

Batches = Sequence[Sequence[Request]]
"""Requests that come at once, when those before have ended: single ones first, and the many last."""


@dataclass(frozen=True)
class Costs:
    """What the simulator is told: seconds of chunks, and of messages between ranks."""

    chunks: dict[str, float]
    rest: float
    """Of a step of one token, the share that is not in layers."""
    hop_s: float
    byte_s: float
    contention: float
    stage_s: float
    """That the engine of a stage takes for each batch besides."""

    @classmethod
    def measured(cls, path: Path, quick: bool) -> Costs:
        """Measure them in this process, and between two."""
        cost, step = fitted(path, quick), [Chunk("", PROMPT, 1)]
        rest = cost.rest.batch(step) / cost.whole.batch(step)
        links = measure_two_ranks(20, 3, 1) if quick else measure_two_ranks()
        link = links.link
        assert link is not None
        return cls(asdict(cost.whole), rest, link.fixed_s, link.each_s, links.contention, links.handovers.stage_s)

    def model(self, contention: float) -> LayeredModel:
        """Return ranks that have memory to spare."""
        weights, block = LAYERS * LAYER_PAGES, LAYERS * KV_PAGES
        pages = PlacePages(weights + BLOCKS * block, weights, block, 1, LAYERS, LAYER_PAGES)
        rank = RankModel(EngineOptions(**ENGINE), pages, ChunkCost(**self.chunks), sharing=HostSharing(contention))
        links = Links(bytes_s=1 / max(self.byte_s, 1e-12), hop_s=self.hop_s, stage_s=self.stage_s)
        return LayeredModel(rank, page_bytes=PAGE_BYTES, token_bytes=HIDDEN_BYTES, rest=self.rest, links=links)


def drawn(round_: int, ranks: int, quick: bool) -> Batches:
    """Draw prompts of one length that are alone, and many of 16 to 512 tokens, few of them long."""
    choose = random.Random(SEED + round_)
    answer, each = (8, 3) if quick else (ANSWER, EACH)
    alone = [[Request(prompt(PROMPT, choose), answer, ignore_eos=True)] for _ in range(ALONE)]
    lengths = [min(512, 16 + int(choose.expovariate(1 / 96))) for _ in range(each * ranks)]
    return [*alone, [Request(prompt(length, choose), answer, ignore_eos=True) for length in lengths]]


def figures(served: Sequence[Sequence[Answer]]) -> dict[str, float]:
    """Return what came of batches."""
    *alone, many = served
    single = [answer for (answer,) in alone]
    span_s = max(answer.at_s[-1] for answer in many) - min(answer.sent_s for answer in many)
    return {
        "ttft_ms": 1e3 * statistics.median(answer.ttft_s for answer in single),
        "tpot_ms": 1e3 * statistics.median(statistics.mean(answer.gaps_s) for answer in single),
        "tokens_per_s": sum(len(answer.tokens) for answer in many) / span_s,
    }


# -- measured


def measured(path: Path, round_: int, quick: bool) -> dict[str, dict[str, float]]:
    """Serve both ways, by the same processes; stages -> figures."""
    found: dict[str, dict[str, float]] = {}
    with fleet(path, CORES, engine=ENGINE, beat_timeout_s=BEAT_TIMEOUT_S) as engine:
        warm_up(engine)
        for stages in random.sample(REAL, len(REAL)):
            with grouped(engine, stages):
                found[str(stages)] = figures(served(engine, drawn(round_, len(CORES), quick)))
        if engine.status().totals.ranks_lost:
            raise RuntimeError("a rank was lost meanwhile: other processes have its core; measure again")
    return {stages: found[stages] for stages in sorted(found, key=int)}


@contextmanager
def grouped(engine: elastic.Fleet, stages: int) -> Iterator[None]:
    """Have both ranks be stages meanwhile, or be by themselves."""
    if stages == 1:
        yield
        return
    first, second = (instance.name for instance in engine.status().instances)
    dropped = engine.drop(layers={first: range(LAYERS // 2, LAYERS), second: range(LAYERS // 2)})
    if dropped.status != "applied":
        raise RuntimeError(f"the drop was {dropped.status}: {dropped.why}")
    warm_up(engine)
    yield
    engine.restore()


def served(engine: elastic.Fleet, batches: Batches) -> list[list[Answer]]:
    found = []
    for requests in batches:
        load = Load(engine)
        found.append([load.submit(request) for request in requests])
        load.wait()
    return found


# -- predicted


def predicted(model: LayeredModel, ranks: int, stages: int, batches: Batches) -> list[list[Answer]]:
    """Have ranks in simulated time serve in groups of so many stages."""
    threads = SimulatedThreads(VirtualClock())
    options: dict[str, Any] = {"routing": "prefix", "max_queue": None, "at_once": False, "seed": SEED, "name": "r"}
    engine = make_fleet(threads, model.rank, Mechanisms(chosen(None), model, stages), ranks, **options)
    assert isinstance(engine, ElasticFleet)
    try:
        engine.threads.run(GROUPED_S)
        if engine.failed or any(len(set(rank.books.path.ranks)) != stages for rank in engine.world.ranks.values()):
            raise RuntimeError(f"{ranks} simulated ranks are not in {stages} stages: {engine.failed}")
        return [_simulated(engine, requests) for requests in batches]
    finally:
        engine.finish()


def _simulated(engine: ElasticFleet, requests: Sequence[Request]) -> list[Answer]:
    """Have requests come at once; return what came of them when all have ended."""
    answers = [Answer(engine.clock.now) for _ in requests]
    for request, answer in zip(requests, answers, strict=True):

        def listener(output: Output, answer: Answer = answer) -> None:
            answer.at_s.extend([output.at_s] * len(output.tokens))
            answer.tokens.extend(output.tokens)
            answer.finish = output.finish or answer.finish

        engine.submit(request, listener)
    while engine.dispatcher.records:
        engine.threads.run(engine.clock.now + LOOK_S)
    return answers


# -- told


def told(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """Return the figures of each number of stages, and their ratios to those of one."""
    found: dict[str, dict[str, Any]] = {}
    for stages in rounds[0]:
        for name in rounds[0][stages]:
            values = [each[stages][name] for each in rounds]
            figure = {"value": summary(values), "over_one_stage": ratio(values, [each["1"][name] for each in rounds])}
            found.setdefault(stages, {})[name] = figure
    return found


def show_table(results: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Print all systems in one form: each figure's median, and its ratio to that of one stage."""
    names = ("ttft_ms", "tpot_ms", "tokens_per_s")
    rows = [
        [system, stages, *(f"{by[name]['value']['median']:.3g}  {show(by[name]['over_one_stage'])}" for name in names)]
        for system, by_stages in results.items()
        for stages, by in by_stages.items()
    ]
    table(["", "stages", *(f"{name}, over one stage" for name in names)], rows)


def main() -> None:
    options = arguments(__doc__.splitlines()[0], keep=KEEP)
    if options.device != "cpu":
        sys.exit("this benchmark pins ranks to cores: it is for a CPU")
    rounds, quick = (1 if options.quick else min(options.rounds, 5)), options.quick
    kept = Kept(options.keep)
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(Path(folder))
        costs = Costs(**kept.take("costs", lambda: asdict(Costs.measured(path, quick))))
        real = [kept.take(f"round {n}", lambda n=n: measured(path, n, quick)) for n in range(rounds)]

    def simulated(contention: float, ranks: int, degrees: Sequence[int]) -> dict[str, dict[str, Any]]:
        model = costs.model(contention)
        return told(
            [
                {str(k): figures(predicted(model, ranks, k, drawn(round_, ranks, quick))) for k in degrees}
                for round_ in range(rounds)
            ]
        )

    results = {
        "two ranks, measured": told(real),
        "two ranks, predicted": simulated(costs.contention, len(CORES), REAL),
        f"{MANY[-1]} ranks, predicted": simulated(0.0, MANY[-1], MANY),
    }
    show_table(results)
    finish("stages", "cpu", {**results, "costs": asdict(costs)})


if __name__ == "__main__":
    main()
