"""What the simulator is told of ranks that share layers, fitted to their steps for one request at a time, and more."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from sim_fit import FEW, DividedCost, Fitted, beside, since_prompts, taken_s
from sim_runs import ENGINE, HIDDEN, LAYERS, TimedStep

from elastic.engines.core.step import ScheduledChunk, Step
from elastic.engines.pipeline.path import LayerPath
from elastic.planning.least_squares import not_negative
from elastic.sim.core.clock import VirtualClock, random_stream
from elastic.sim.core.executor import AnswerEnds
from elastic.sim.core.fleet import RankModel
from elastic.sim.core.host import SharedHost
from elastic.sim.core.instance import EngineOptions, PlacePages
from elastic.sim.core.step_seconds import Noise
from elastic.sim.mechanisms.model import LayeredModel, Links
from elastic.sim.mechanisms.path_executor import PathExecutor
from elastic.sim.mechanisms.stage_turn import StageTurn
from elastic.sim.mechanisms.wires import Wires

EXCHANGES = 2 * LAYERS
GROUP = 8
"""Steps, or more, that are fitted to in all: what disturbs one of them is no small part of its own seconds."""
ROUNDS = 3
"""In which terms are changed by what the simulator makes of them."""
IDLE_S = 5e-4
"""Between two steps of a rank that had nothing to do meanwhile; less is the time to schedule one."""
PAGES = PlacePages(4096, 64, 2 * LAYERS, 2, LAYERS, 8)
"""Of ranks whose memory does not count."""
REST = LayeredModel.rest


@dataclass(frozen=True)
class _Work:
    """What a step has its ranks compute, at a pace."""

    products_s: float
    fixed_s: float
    """Of home, besides the part of the products that is computed there,"""
    helper_s: float
    """and of the other rank."""


class SharedTerms(NamedTuple):
    """What is fitted to."""

    kept: float
    """Of products, the share that each rank computes,"""
    core_s: float
    """of all exchanges of a step what keeps each rank busy,"""
    hop_s: float
    """and what it waits for."""


def with_shared_layers(fitted: Fitted, calibrations: Mapping[str, Sequence[TimedStep]]) -> Fitted:
    """Fit what ranks that share layers divide, and their exchanges.

    Ranks of two instances are not busy all the time: they wait for each other. So the simulator computes the steps of
    calibrations, too, and terms are changed until what is fitted to its steps is what is fitted to the real ones.
    """
    told = terms = shared_terms(fitted, calibrations)
    for _ in range(ROUNDS):
        made = with_terms(fitted, terms)
        again = {name: replayed(made, name, steps) for name, steps in calibrations.items()}
        off = zip(terms, told, shared_terms(fitted, again), strict=True)
        kept, core_s, hop_s = (max(0.0, term + real - simulated) for term, real, simulated in off)
        terms = SharedTerms(min(1.0, max(0.5, kept)), core_s, hop_s)
    return with_terms(fitted, terms)


def with_terms(fitted: Fitted, terms: SharedTerms) -> Fitted:
    """Return what has these terms."""
    share = 2 * (1 - min(1.0, max(0.5, terms.kept)))
    exchange = {"hop_s": terms.hop_s / EXCHANGES, "core_s": terms.core_s / EXCHANGES}
    return replace(fitted, cut=_divided(fitted, share), **exchange)


def shared_terms(fitted: Fitted, calibrations: Mapping[str, Sequence[TimedStep]]) -> SharedTerms:
    """Fit as if ranks never waited for each other while two instances have steps.

    Attention is divided by heads; of products a share is, as networks are cut and other matrices are not. What
    exchanges wait for, two instances wait for at the same time; the rest keeps each rank busy, for one of them after
    the other. So a step takes its own seconds while no other instance has one; while another has, it takes its own and
    those of the others' steps that are computed meanwhile.
    """
    return SharedTerms(
        *not_negative([row for name, steps in calibrations.items() for row in _rows(fitted, name, steps)])
    )


def shared_path(home: str, names: Sequence[str]) -> LayerPath:
    """Return the path of an instance whose ranks share all layers."""
    return LayerPath(home, tuple([*names] * LAYERS), shards=2)


def replayed(
    fitted: Fitted,
    name: str,
    steps: Sequence[TimedStep],
    path_of: Callable[[str, Sequence[str]], LayerPath] = shared_path,
) -> list[TimedStep]:
    """Return the steps of a calibration as the simulator computes them: each behind the one before of its rank, or
    when it began if that rank had nothing to do before. Paths are of an instance at home, and of both ranks."""
    clock, found, made = VirtualClock(), list[TimedStep](), fitted.at_pace_of([name])
    pids = sorted({step.rank for step in steps})
    names = [str(pid) for pid in pids] + ["other"] * (len(pids) == 1)
    rank = RankModel(EngineOptions(**ENGINE), PAGES, made.cost, cut=made.cut, behind_prompt=made.behind_prompt)
    home = {"beside_s": made.beside_s, "beside_chunk_s": made.beside_chunk_s}
    shards = path_of(names[0], names).shards
    shared = Links(hop_s=made.hop_s, core_s=made.core_s)
    token_bytes, links = (0, shared) if shards > 1 else (4 * HIDDEN, made.stage_links)
    layered = LayeredModel(rank, shards, shards, token_bytes=token_bytes, links=links, **home)
    host = SharedHost(clock, made.sharing)
    turns = {each: StageTurn(host, clock, 0.0 if shards > 1 else made.sharing.stages) for each in names}

    def begin(executor: PathExecutor, left: deque[TimedStep]) -> None:
        step, begin_s = left.popleft(), clock.now
        chunks = [ScheduledChunk("", start, (1,) * count, True, ((),)) for start, count in step.chunks]

        def ended(_: object) -> None:
            found.append(replace(step, begin_s=begin_s, end_s=clock.now))
            host.take_message()
            if left:
                waits = left[0].begin_s > step.end_s + IDLE_S
                clock.at(
                    max(clock.now, left[0].begin_s - first_s) if waits else clock.now, partial(begin, executor, left)
                )

        executor.execute(Step(0, 0, tuple(chunks))).add_done_callback(ended)

    first_s = min(step.begin_s for step in steps)
    for pid in pids:
        path = path_of(str(pid), names)
        wires, noise = Wires(clock, layered.links), Noise(made.steps or 0.0, random_stream(0, str(pid)))
        executor = PathExecutor(clock, layered, wires, turns, AnswerEnds({}), noise, lambda *_: 1.0, path)
        own = deque(step for step in steps if step.rank == pid)
        clock.at(own[0].begin_s - first_s, partial(begin, executor, own))
    clock.run()
    return sorted(found, key=attrgetter("begin_s"))


def _rows(fitted: Fitted, name: str, steps: Sequence[TimedStep]) -> list[list[float]]:
    """Return for some steps together their products, how often ranks exchange, and how often they wait for it, over
    what these take."""
    works = _works(fitted, name, steps)
    groups = defaultdict(list)
    for number, (step, others) in enumerate(zip(steps, beside(steps), strict=True)):
        alone, prompt = others.share < FEW, any(count > 1 for _, count in step.chunks)
        if not alone and others.share < 1 - FEW:
            continue
        work, left_s = works[number], step.seconds - taken_s(step, 1 + others.ended, fitted.sharing)
        row = [work.products_s, 1.0, float(alone), left_s - work.fixed_s]
        for share, other in () if alone else _meanwhile(steps, works, number):
            row[0] += share * other.products_s
            row[1] += share
            row[3] -= share * other.helper_s
        groups[alone, prompt].append(row)
    slower = 1 + fitted.sharing.contention  # than exchanges are by themselves: so are those in the simulator
    rows = []
    for every in groups.values():
        count = max(1, len(every) // GROUP)
        for at in range(count):
            products_s, exchanges, waits, left_s = map(math.fsum, zip(*every[at::count], strict=True))
            rows += [[products_s / left_s, slower * exchanges / left_s, waits / left_s]] if left_s > 0 else []
    return rows


def _works(fitted: Fitted, name: str, steps: Sequence[TimedStep]) -> list[_Work]:
    at_pace = fitted.at_pace_of([name])
    divided, slower = _divided(at_pace, 0.0), 1 + fitted.sharing.contention
    works = []
    for step, behind in zip(steps, since_prompts(steps), strict=True):
        products_s, attention_s = divided.parts(step.as_chunks)
        cold_s = 0.0 if behind is None else at_pace.behind_prompt.more_s(behind)
        each_s = slower * (attention_s / 2 + cold_s)
        rest_s = slower * REST * (products_s + attention_s)
        works.append(_Work(slower * products_s, each_s + divided.home_s(step.as_chunks), each_s - rest_s))
    return works


def _meanwhile(steps: Sequence[TimedStep], works: Sequence[_Work], number: int) -> list[tuple[float, _Work]]:
    """Return what shares of other ranks' steps were computed during a step."""
    step, found = steps[number], []
    for other, work in zip(steps, works, strict=True):
        both_s = min(step.end_s, other.end_s) - max(step.begin_s, other.begin_s)
        if other.rank != step.rank and both_s > 0:
            found.append((both_s / other.seconds, work))
    return found


def _divided(fitted: Fitted, share: float) -> DividedCost:
    return DividedCost(fitted.cost, share, fitted.beside_s, fitted.beside_chunk_s)
