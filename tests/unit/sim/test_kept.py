"""What a run keeps grows with neither requests nor tokens."""

from __future__ import annotations

import gc
import tomllib
import types
from typing import Any

import pytest

from elastic.cluster.fleet.planning.request_statistics import AnswerLengths
from elastic.controller.sensors.sliding_window import SlidingWindow
from elastic.sim.quantiles import QuantileSketch
from elastic.sim.report import MOST_ACTIONS
from elastic.sim.run import Run
from elastic.sim.scenario import parse_scenario

BOUNDED = (QuantileSketch, SlidingWindow, AnswerLengths)
"""What has its own bound: the buckets of an accuracy, half a minute, the last 256 answers."""
CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
SCENARIO = """
samples = 20
fleet = { instances = 2 }
memory = { kv_tokens = 1600 }
steps = { chunk = 1e-2, token = 1e-4, noise = 0.1 }
[[requests]]
arrivals = "poisson"
rate = 10
lengths = "lognormal"
prompt_median = 60
prompt_sigma = 0.5
answer_median = 8
answer_sigma = 0.5
ask = 1.5
"""
EVICTING = {
    "engine": {"eviction": "recompute", "share_prefixes": True},
    "fleet": {"instances": 2, "queues": "instances"},
}


def played(duration_s: float, changes: dict[str, Any]) -> Run:
    """A run of requests that all end, some before the most that they ask for."""
    run = Run(parse_scenario({**tomllib.loads(SCENARIO), "duration_s": duration_s, **changes}))
    run.play()
    return run


def kept(root: object) -> int:
    """Count the entries and fields of all that is reachable, but for what has a bound of its own."""
    found: dict[int, list[object]] = {}
    left = [root]
    while left:
        each = left.pop()
        if id(each) not in found and not isinstance(each, (*CODE, *BOUNDED)):
            found[id(each)] = gc.get_referents(each)
            left += found[id(each)]
    return sum(map(len, found.values()))


@pytest.mark.parametrize("way", ["recompute", "swap"])
def test_of_sequences_that_ended_nobody_notes_that_they_were_evicted(way: str) -> None:
    requests = [{**tomllib.loads(SCENARIO)["requests"][0], "answer_median": 100}]
    tight = {**EVICTING, "engine": {"eviction": way, "block_tokens": 4}, "memory": {"kv_tokens": 600}}
    run = played(10, {**tight, "requests": requests})
    for instance in run.fleets[0].instances.values():
        assert instance.scheduler.evictions > 0
        assert not instance.blocks.evicted


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, EVICTING], ids=["plain", "evicting"])
def test_a_longer_run_keeps_no_more(changes: dict[str, Any]) -> None:
    short, long = (played(duration_s, changes) for duration_s in (20, 100))
    more = long.report.requests["completed"] - short.report.requests["completed"]
    assert more > 500
    assert kept(long) - kept(short) < more / 10


def test_quantiles_have_as_many_buckets_as_their_accuracy_says() -> None:
    sketch = QuantileSketch()
    for number in range(20_000):
        sketch.add(1.0 + number % 10_000 / 10_000)  # from 1 to 2: 70 times a hundredth more
    assert len(sketch._buckets) < 80


def test_of_what_fleets_do_the_first_is_kept_and_all_is_counted() -> None:
    """A fleet itself keeps the last of it."""
    run = Run(parse_scenario({**tomllib.loads(SCENARIO), "duration_s": 1, "fleet": {"instances": 1, "fleets": 2}}))
    for number in range(MOST_ACTIONS):
        run.fleets[number % 2].log.add("dropped", rank=f"r{number}")
    for _ in range(5):
        run.fleets[0].log.add("restored")
    run.play()
    assert [action.about for action in run.report.actions] == [f"r{number}" for number in range(MOST_ACTIONS)]
    assert run.report.action_counts == {"dropped": MOST_ACTIONS, "restored": 5}
