"""A burst that finds no room has layers dropped, is served in two stages, and its end has them restored."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import elastic
from elastic.cluster.fleet.fleet import Fleet
from elastic.config import Overload
from elastic.engines.base import Request
from support.cluster.shared_launcher import SharedLauncher
from support.cluster.small_checkpoint import LAYERS, checkpoint, small_model
from support.processes import wait_until
from support.serving.generations import Collector, continuation, same_unless_close

TOKENS, PAGE = 96, 64 << 10
WEIGHTS, SECTOR = sum(each.nbytes for each in small_model().parameters()), LAYERS * PAGE
PLACES = [[f"cpu#r{rank}={(WEIGHTS + 6 * PAGE + 3 * SECTOR) >> 10}KiB"] for rank in range(2)]
"""KV for two requests at each of two ranks."""
SOON = Overload(tick_s=0.02, pressure_ticks=2, recovery_ticks=2, cooldown_s=0.1, dwell_s=0.2, idle_s=0.1)
PROMPTS = [tuple(range(5, 5 + length)) for length in (6, 9, 12, 15)]


@cache
def expected() -> list[list[int]]:
    """What the plain model goes on with after each prompt."""
    return [continuation(small_model(), prompt, TOKENS) for prompt in PROMPTS]


def burst(fleet: Fleet, heard: Collector, count: int) -> list[str]:
    requests = [Request(PROMPTS[i % 4], TOKENS, ignore_eos=True, id=f"{i}") for i in range(count)]
    for request in requests:
        fleet.submit(request, heard)
    return [request.id for request in requests]


def kinds(fleet: Fleet) -> list[str]:
    return [event.kind for event in fleet.events()]


@pytest.mark.slow
@pytest.mark.parametrize("policy", [SOON, ("balance", SOON)], ids=["drop", "both"])
def test_a_burst_is_served_in_two_stages_and_every_layer_returns(policy: Any) -> None:
    heard = Collector()
    options: dict[str, Any] = {"launch": "in-process", "replace": False, "beat_timeout_s": 60}
    with Fleet(checkpoint(), ranks=PLACES, policy=policy, **options) as fleet:
        alone = [instance.load.total_blocks for instance in fleet.status().instances]
        names = burst(fleet, heard, 16)
        wait_until(lambda: "dropped" in kinds(fleet), "nothing is dropped")
        heard.wait(names)
        wait_until(lambda: not fleet.groups(), "the layers do not return")
        fleet.check()
        for i, name in enumerate(names):
            assert heard.tokens[name] == expected()[i % 4]
        events = {event.kind: event for event in fleet.events()}
        assert {"dropped", "restored", "parted"} <= events.keys()
        assert "; KV r" in events["dropped"].why
        assert fleet.status().totals.recomputed_tokens == 0
        assert fleet.status().totals.exchanged_bytes > 0
        assert [instance.path for instance in fleet.status().instances] == [(), ()]
        assert [rank.dropped for rank in fleet.status().ranks] == [(), ()]
        wait_until(
            lambda: [instance.load.total_blocks for instance in fleet.status().instances] == alone,
            "the caches are not what they were",
        )


@pytest.mark.slow
def test_a_fleet_with_room_drops_nothing() -> None:
    heard = Collector()
    options: dict[str, Any] = {"launch": "in-process", "replace": False, "beat_timeout_s": 60}
    with elastic.Fleet(checkpoint(), ranks=PLACES, policy=SOON, **options) as fleet:
        names = burst(fleet, heard, 4)
        heard.wait(names)
        assert fleet.status().policy
        assert not {"dropped", "drop failed", "overloaded"} & set(kinds(fleet))


@pytest.mark.slow
def test_an_instance_that_is_added_in_an_overload_takes_requests_and_the_group_parts(
    launcher: SharedLauncher,
) -> None:
    """No drop is enough for the burst, so another rank comes; it is there before the group has its layers back."""
    heard = Collector()
    options: dict[str, Any] = {"launch": launcher, "replace": False, "beat_timeout_s": 60, "routing": "least_load"}
    with Fleet(checkpoint(), ranks=PLACES, policy=replace(SOON, scale_out=1), **options) as fleet:
        names = burst(fleet, heard, 32)
        wait_until(lambda: len(fleet.status().instances) == 3, "no instance is added")
        assert [event.kind for event in fleet.events() if event.kind in ("dropped", "overloaded")]
        more = [Request(PROMPTS[i % 4], TOKENS, ignore_eos=True, id=f"{i}") for i in range(32, 44)]
        for request in more:
            fleet.submit(request, heard)
        wait_until(lambda: "r2" in map(fleet.instance_of, [request.id for request in more]), "it gets no request")
        names += [request.id for request in more]
        heard.wait(names)
        wait_until(lambda: not fleet.groups(), "the layers do not return")
        fleet.check()
        for i, name in enumerate(names):
            assert same_unless_close(small_model(), PROMPTS[i % 4], heard.tokens[name])
        happened = [event.kind for event in fleet.events()]
        assert happened.count("joined") == 3
        assert "parted" in happened[len(happened) - 1 - happened[::-1].index("joined") :]
        assert fleet.status().totals.recomputed_tokens == 0
        assert [rank.dropped for rank in fleet.status().ranks] == [()] * 3
