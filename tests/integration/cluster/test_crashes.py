"""Real processes that are killed and stopped at random points under load: a gap, and nothing else."""

from __future__ import annotations

import logging
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from elastic.cluster.fleet.fleet import Fleet
from elastic.engines.base import Request
from support.child_process import TESTS, end_of_fork
from support.cluster.shared_launcher import SharedLauncher
from support.cluster.small_checkpoint import VOCABULARY, checkpoint, small_model
from support.isolation.named_memory import NamedMemory
from support.processes import alive, wait_until
from support.serving.generations import Collector, prompts, same_unless_close

logger = logging.getLogger(__name__)
pytestmark = pytest.mark.slow
TOKENS = 300
PROMPTS = prompts([5, 40, 90, 200, 33, 64], VOCABULARY)
ENGINE = {"block_tokens": 16, "max_batch_tokens": 128}


@pytest.fixture(scope="module")
def fleet(launcher: SharedLauncher) -> Iterator[Fleet]:
    made = Fleet(checkpoint(), ranks=2, launch=launcher, places=["cpu=48MiB"], engine=ENGINE)
    named = NamedMemory()
    with made:
        yield made
        pids = {rank.pid for rank in made.status().ranks}
        made.stop(drain=False)
    wait_until(lambda: not any(map(alive, pids)), "a rank is left")
    assert named.left() == set()


def assert_right(heard: Collector, asked: dict[str, int]) -> None:
    """Every request has all of its tokens, each once."""
    for name, which in asked.items():
        assert heard.ends[name].finish == "length", heard.ends[name]
        got = heard.tokens[name]
        assert len(got) == TOKENS
        assert same_unless_close(small_model(), PROMPTS[which], got)


def serving(fleet: Fleet) -> list[Any]:
    return [rank for rank in fleet.status().ranks if rank.serves]


def test_a_killed_rank_loses_no_token_and_nothing_is_computed_again(fleet: Fleet) -> None:
    heard, asked = Collector(), {}
    for which, prompt in enumerate(PROMPTS):
        request = Request(prompt, TOKENS, ignore_eos=True)
        asked[request.id] = which
        fleet.submit(request, heard)
    for name in asked:
        heard.wait_for_tokens(name, 30)
    least = min(asked, key=lambda name: len(heard.tokens[name]))  # the others may have ended
    victim = next(rank for rank in serving(fleet) if rank.name == fleet.instance_of(least))
    os.kill(victim.pid, signal.SIGKILL)
    heard.wait(list(asked))
    assert_right(heard, asked)
    lost, resumed = (next(e for e in fleet.events() if e.kind == k) for k in ("lost", "requests resumed"))
    assert lost.requests == resumed.requests > 0
    assert resumed.recomputed_tokens == 0
    wait_until(lambda: len(serving(fleet)) == 2, "it was not replaced")


def test_nothing_is_computed_again_that_two_ranks_in_a_row_were_lost_with(fleet: Fleet) -> None:
    wait_until(lambda: len(serving(fleet)) == 2, "a rank is missing")
    heard, request = Collector(), Request(PROMPTS[2], TOKENS, ignore_eos=True)
    before = fleet.status().totals.recomputed_tokens
    fleet.submit(request, heard)
    heard.wait_for_tokens(request.id, 30)
    first = next(rank for rank in serving(fleet) if rank.name == fleet.instance_of(request.id))
    second = next(rank for rank in serving(fleet) if rank.name != first.name)
    os.kill(second.pid, signal.SIGSTOP)  # it computes nothing of what it is given
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: fleet.instance_of(request.id) not in (None, first.name), "it went nowhere")
    os.kill(second.pid, signal.SIGKILL)
    heard.wait([request.id])
    assert_right(heard, {request.id: 2})
    assert fleet.status().totals.recomputed_tokens == before, "the memory of the first was let go"
    wait_until(lambda: len(serving(fleet)) == 2, "they were not replaced")


def test_a_request_moves_with_its_keys_and_values(fleet: Fleet) -> None:
    wait_until(lambda: len(serving(fleet)) == 2, "a rank is missing")
    heard, request = Collector(), Request(PROMPTS[3], TOKENS, ignore_eos=True)
    fleet.submit(request, heard)
    heard.wait_for_tokens(request.id, 20)
    here = fleet.instance_of(request.id)
    target = next(rank.name for rank in serving(fleet) if rank.name != here)
    moved = fleet.move(request.id, target)
    heard.wait([request.id])
    assert_right(heard, {request.id: 3})
    assert (moved.source, moved.target, moved.recomputed_tokens) == (here, target, 0)
    assert moved.moved_bytes > 0
    assert next(event for event in reversed(fleet.events()) if event.kind == "moved").copy_s > 0
    fleet.check()


def chaos(fleet: Fleet, faults: int, seed: int) -> None:
    """Kill and stop ranks while requests come; another serves meanwhile, or all wait for the next."""
    chance = random.Random(seed)
    heard, asked = Collector(), dict[str, int]()
    before = fleet.status().totals.ranks_lost
    for fault in range(faults):
        for _ in range(4):
            which = chance.randrange(len(PROMPTS))
            request = Request(PROMPTS[which], TOKENS, ignore_eos=True)
            asked[request.id] = which
            fleet.submit(request, heard)
        heard.wait_for_tokens(request.id, chance.randrange(1, 60))
        if chance.random() < 0.3:
            names = [rank.name for rank in serving(fleet)]
            try:
                fleet.move(chance.choice(sorted(asked)), chance.choice(names))
            except Exception as error:  # it has ended, waits, or is there: moves under faults are told elsewhere
                logger.info("not moved: %s", error)
        wait_until(lambda: bool(serving(fleet)), "no rank came")
        victim = chance.choice(serving(fleet))
        kill = signal.SIGKILL if chance.random() < 0.7 else signal.SIGSTOP
        try:
            os.kill(victim.pid, kill)
        except ProcessLookupError:
            continue  # it was fenced meanwhile: this machine stood still for too long
        lost = before + fault + 1
        wait_until(lambda lost=lost: fleet.status().totals.ranks_lost >= lost, f"{kill} was not noticed")  # type: ignore[misc]
    heard.wait(list(asked), timeout_s=300)
    assert_right(heard, asked)
    fleet.check()


def test_ranks_that_are_killed_and_stopped_at_random_points_cost_a_gap(fleet: Fleet) -> None:
    chaos(fleet, 3, seed=3)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_ranks_are_killed_and_stopped(fleet: Fleet, seed: int) -> None:
    chaos(fleet, 10, seed=100 + seed)


@pytest.mark.parametrize("end", [pytest.param("SIGKILL", marks=pytest.mark.long), "exit"])
def test_nothing_is_left_of_a_fleet_whose_process_ends(end: str) -> None:
    code = f"""
        import os, signal, sys, time
        sys.path.append({TESTS!r})
        from support.isolation.forked_server import fork_the_server

        fork_the_server()
        from elastic.cluster.fleet.fleet import Fleet
        from elastic.engines.base import Request

        fleet = Fleet({checkpoint()!r}, ranks=2, places=["cpu=48MiB"])
        fleet.start()
        fleet.submit(Request((5,) * 40, 400, ignore_eos=True), lambda output: None)
        print(*(rank.pid for rank in fleet.status().ranks), flush=True)
        if {end!r} != "exit":
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
    """
    named = NamedMemory()
    status, said, errors = end_of_fork(code, timeout=120)
    pids = list(map(int, said.split()))
    assert len(pids) == 2, errors
    assert status == (-9 if end == "SIGKILL" else 0)
    assert "Traceback" not in errors
    assert "ranks may hang" not in errors
    wait_until(lambda: not any(map(alive, pids)), "a rank is left")
    assert named.left() == set()
