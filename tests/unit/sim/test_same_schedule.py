"""A simulated rank computes the same steps as the real engine, of the same requests."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from elastic.cluster.control.messages import Submit
from elastic.engines.base import Request, Sampling
from elastic.engines.continuous import ContinuousEngine
from elastic.engines.core.scheduler import Scheduler
from elastic.engines.core.step import SequenceState, Step
from elastic.sim.core.clock import VirtualClock
from elastic.sim.core.executor import STOP, LocalExecutor
from elastic.sim.core.instance import EngineOptions, PlacePages, SimulatedInstance
from elastic.sim.core.step_seconds import Noise
from support import architectures
from support.serving.generations import Collector
from support.sim.fixed_seconds import FixedSeconds
from support.wrapped_model import small, tight

STOPS = tuple(range(STOP, architectures.VOCAB, 11))
"""Of these a real answer gets one sooner or later; the simulated one ends where that did."""
LATER = (3, 8, 9, 30)
"""Steps before which further requests come; the others are all there before the first."""
Steps = list[tuple[list[tuple[str, int, int, bool, int]], list[str]]]
"""Of each step its chunks (of which sequence, the first token, how many, whether one is sampled, how many blocks it
brings), and which sequences are new in it."""


def record(scheduler: Scheduler, coming: Mapping[int, Callable[[], object]]) -> Steps:
    """Note each step that it chooses; have something happen when the step of a number is chosen."""
    steps: Steps = []
    left, schedule = dict(coming), scheduler.schedule

    def noted() -> Step | None:
        left.pop(scheduler.steps, lambda: None)()
        step = schedule()
        if step is not None:
            chunks = [(c.sequence, c.start, len(c.tokens), c.samples, sum(map(len, c.blocks))) for c in step.chunks]
            steps.append((chunks, [state.id for state in step.added]))
        return step

    scheduler.schedule = noted  # type: ignore[method-assign]
    return steps


def asked(seed: int, shared: int) -> list[Request]:
    """Requests that all begin with so many tokens which are the same; those of `LATER` are the last."""
    choose = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(choose.randrange(3, architectures.VOCAB) for _ in range(count))

    begin, requests = tokens(shared), []
    for number in range(10 + len(LATER)):
        prompt = begin + tokens(choose.choice((1, 5, 8, 9, 40, 70, 130)))
        sampling = Sampling(temperature=1.0, seed=number)
        stops = STOPS if number % 2 else ()
        requests.append(
            Request(prompt, choose.randint(1, 40), sampling, stop_tokens=stops, ignore_eos=True, id=f"q{number}")
        )
    return requests


def by_the_engine(engine: ContinuousEngine, requests: Sequence[Request]) -> tuple[Steps, dict[str, int]]:
    """Serve them; return the steps and how many tokens each answer has."""
    heard, first, later = Collector(), requests[: -len(LATER)], requests[-len(LATER) :]
    coming = {step: partial(engine.submit, request, heard) for step, request in zip(LATER, later, strict=True)}
    steps, all_are_there = record(engine._loop.scheduler, coming), threading.Event()
    engine._loop.post(all_are_there.wait)
    engine.start()
    for request in first:
        engine.submit(request, heard)
    all_are_there.set()
    heard.wait([request.id for request in requests])
    return steps, {name: len(tokens) for name, tokens in heard.tokens.items()}


def by_the_simulator(
    options: EngineOptions, pages: PlacePages, requests: Sequence[Request], answers: dict[str, int]
) -> tuple[Steps, bool]:
    """Have them served; return the steps, and whether somebody waited for blocks."""
    clock = VirtualClock()
    executor = LocalExecutor(clock, FixedSeconds(1.0), Noise(0.0, random.Random(0)), answers)
    instance = SimulatedInstance(clock, "r0", options, pages, executor)
    arrivals = [partial(instance.send, Submit((SequenceState(r.id, r, 0, 0),))) for r in requests]
    steps = record(instance.scheduler, dict(zip(LATER, arrivals[-len(LATER) :], strict=True)))
    instance.paused = True
    for arrive in arrivals[: -len(LATER)]:
        arrive()
    clock.run()
    instance.paused = False
    instance.wake()
    clock.run()
    return steps, instance.scheduler.short_of_kv_s > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kv_pages", [None, 30], ids=["roomy", "tight"])
@pytest.mark.parametrize("shared", [0, 24], ids=["nothing shared", "a beginning shared"])
def test_both_compute_the_same_steps(seed: int, kv_pages: int | None, shared: int, wrapped: Any) -> None:
    options = EngineOptions(block_tokens=8, max_requests=6, max_batch_tokens=64, share_prefixes=bool(shared))
    model = architectures.build("llama-gqa")
    place = small(8 << 20) if kv_pages is None else tight(model, kv_pages)
    wrapped(model, place)
    requests = asked(seed, shared)
    engine = ContinuousEngine(
        model,
        block_tokens=options.block_tokens,
        max_requests=options.max_requests,
        max_batch_tokens=options.max_batch_tokens,
        share_prefixes=options.share_prefixes,
    )
    memory = engine._memory
    pages = PlacePages(memory.capacity * memory.sector_pages, 0, memory.sector_pages, memory.blocks_per_sector(0))
    try:
        real, answers = by_the_engine(engine, requests)
    finally:
        engine.stop(drain=False)
    simulated, some_waited = by_the_simulator(options, pages, requests, answers)
    assert simulated == real
    assert some_waited == (kv_pages is not None), "room makes no difference to these requests"
    assert any(answers[request.id] < request.max_tokens for request in requests)
