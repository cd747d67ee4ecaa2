"""The simulator's schedule is the engine's: the same steps, with the same chunks, for the same requests."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import elastic
from elastic.cluster.control.messages import Submit
from elastic.engines.base import Request
from elastic.engines.continuous.engine import ContinuousEngine
from elastic.engines.core.step import SequenceState
from elastic.sim.core.clock import VirtualClock
from elastic.sim.core.executor import STOP
from elastic.sim.core.fleet import RankModel, SimulatedFleet
from elastic.sim.core.instance import EngineOptions, PlacePages
from support import architectures
from support.serving.generations import Collector
from support.sim.fixed_seconds import FixedSeconds

OPTIONS: dict[str, Any] = {"max_requests": 6, "max_batch_tokens": 24, "block_tokens": 8}
Steps = list[list[tuple[str, int, int]]]


def recorded(scheduler: Any) -> Steps:
    """Have the steps of a scheduler be written down from now on: request, earlier tokens and new ones of each chunk."""
    steps: Steps = []
    schedule = scheduler.schedule

    def noted() -> Any:
        step = schedule()
        if step is not None:
            steps.append([(chunk.sequence, chunk.start, len(chunk.tokens)) for chunk in step.chunks])
        return step

    scheduler.schedule = noted
    return steps


def drawn(seed: int, most: int, count: int = 14) -> list[Request]:
    """Requests of many lengths, none longer than so many tokens."""
    choose = random.Random(seed)
    lengths = [(choose.randrange(1, most // 2), choose.randrange(1, most // 2)) for _ in range(count)]
    return [
        Request([1 + choose.randrange(90) for _ in range(prompt)], answer, ignore_eos=True, id=f"q{number}")
        for number, (prompt, answer) in enumerate(lengths)
    ]


@pytest.fixture(params=[640, 260], ids=["roomy", "tight"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Any, ContinuousEngine]]:
    model = architectures.build("llama-gqa")
    place = elastic.Place("cpu#a", torch.device("cpu"), request.param << 10, page_bytes=4096)
    elastic.wrap(model, places=[place])
    made = ContinuousEngine(model, share_prefixes=False, **OPTIONS)
    yield model, made
    made.stop(drain=False)
    elastic.unwrap(model)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_steps_are_those_of_the_engine(served: tuple[Any, ContinuousEngine], seed: int) -> None:
    model, engine = served
    memory = engine._memory
    pages = PlacePages(memory.capacity, 0, 1, memory.blocks_per_sector(0))
    blocks = memory.capacity * memory.blocks_per_sector(0)
    first, *others = asked = drawn(seed, min(120, blocks * OPTIONS["block_tokens"]))

    real, heard = recorded(engine._loop.scheduler), Collector()
    began, came = threading.Event(), threading.Event()

    def hold_up(*_: Any) -> None:
        began.set()
        assert came.wait(20)

    hook = model.register_forward_pre_hook(hold_up)
    engine.start()
    engine.submit(first, heard)
    assert began.wait(20)
    for request in others:  # while the first step is computed
        engine.submit(request, heard)
    came.set()
    heard.wait([request.id for request in asked])
    hook.remove()

    clock = VirtualClock()
    rank = SimulatedFleet(clock, RankModel(EngineOptions(**OPTIONS), pages, FixedSeconds(1.0)), 1).instances["r0"]
    simulated = recorded(rank.scheduler)
    rank.listen(lambda _: None, lambda _: None)
    for request in asked:
        same = replace(request, stop_tokens=(STOP,))
        rank.send(Submit((SequenceState(request.id, same, 0, 0),)))  # all but the first while that is computed
    clock.run()
    assert simulated == real
