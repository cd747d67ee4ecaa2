"""A process of a group that is killed, or stands still, at a random point of a drop or a restore costs no request."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

import elastic
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.rank.client import RankClient
from elastic.cluster.rank.spec import RankSpec
from elastic.engines.base import Output, Request
from elastic.errors import ElasticError
from support.cluster.shared_launcher import SharedLauncher
from support.cluster.small_checkpoint import TOKEN_BYTES, VOCABULARY, checkpoint, small_model
from support.isolation.named_memory import NamedMemory
from support.processes import FORKSERVER, alive, held, wait_for_end, wait_until
from support.serving.generations import Collector, prompts, same_unless_close

pytestmark = pytest.mark.slow
PROMPTS = prompts([5, 40, 90, 200, 33, 64], VOCABULARY)
ENGINE = {"block_tokens": 16, "max_batch_tokens": 128}


def drop_and_restore(fleet: Fleet) -> None:
    """Until a rank is lost."""
    count = len(fleet.layer_bytes())
    with suppress(ElasticError):
        while True:
            fleet.drop(layers={"r0": range(count // 2, count), "r1": range(count // 2)})
            fleet.restore()


def replicate_and_evict(fleet: Fleet) -> None:
    """Until a rank is lost."""
    count = len(fleet.layer_bytes())
    with suppress(ElasticError):
        while True:
            fleet.replicate("r0", range(count // 2, count), "r1")
            fleet.evict("r0")


def share_and_part(fleet: Fleet) -> None:
    """Until a rank is lost."""
    with suppress(ElasticError):
        while True:
            fleet.reshard(["r0", "r1"], tp=2, layers_per_step=2)
            fleet.reshard("r0", tp=1)


def survive(
    seed: int,
    how: signal.Signals,
    launch: str | SharedLauncher = "local",
    change: Callable[[Fleet], None] = drop_and_restore,
) -> None:
    """Have a rank be lost at a random point; nothing of the fleet is left when it has ended."""
    named, before = NamedMemory(), held()
    pids = serve_through(seed, how, launch, change)
    wait_until(lambda: not any(map(alive, pids)))
    assert named.left() == set()
    wait_until(lambda: not held() - before - FORKSERVER)


def serve_through(
    seed: int, how: signal.Signals, launch: str | SharedLauncher, change: Callable[[Fleet], None]
) -> list[int]:
    """Lose a rank under load, and see that every request ends well; return the ranks' processes."""
    chosen = random.Random(seed)
    victim, after_s = chosen.choice(["r0", "r1"]), chosen.uniform(0, 1)
    options: dict[str, Any] = {"places": ["cpu=48MiB"], "engine": ENGINE, "replace": False, "beat_timeout_s": 3}
    options["shards"] = 2 if change is share_and_part else None
    with Fleet(checkpoint(), ranks=2, launch=launch, **options) as fleet:
        pids = [rank.pid for rank in fleet.status().ranks]
        pid = next(rank.pid for rank in fleet.status().ranks if rank.name == victim)
        heard, requests = Collector(), [Request(prompt, 120, ignore_eos=True) for prompt in PROMPTS]
        for request in requests:
            fleet.submit(request, heard)
        for request in requests:
            heard.wait_for_tokens(request.id, 3)
        threading.Timer(after_s, os.kill, (pid, how)).start()
        change(fleet)
        heard.wait([request.id for request in requests])
        wait_until(lambda: not fleet.groups() and fleet.status().totals.ranks_lost == 1)
        for request in requests:
            assert heard.ends[request.id].finish == "length", heard.ends[request.id]
            assert same_unless_close(small_model(), request.prompt, heard.tokens[request.id])
        fleet.check()
        assert [rank.state for rank in fleet.status().ranks].count("serving") == 1
        return pids


def test_a_member_that_is_killed_at_any_point_costs_no_request(launcher: SharedLauncher) -> None:
    survive(1, signal.SIGKILL, launcher)


def test_a_killed_rank_with_replicas_costs_their_home_no_token(launcher: SharedLauncher) -> None:
    """The home's requests go on from the killed rank's memory file; in the copied layers half of them were there."""
    with Fleet(checkpoint(), ranks=2, launch=launcher, places=["cpu=48MiB"], engine=ENGINE, replace=False) as fleet:
        layers = range(1, len(fleet.layer_bytes()))
        assert fleet.replicate("r0", layers, "r1").layers == tuple(layers)
        heard, requests = Collector(), [Request(prompt, 150, ignore_eos=True) for prompt in PROMPTS]
        for request in requests:
            fleet.submit(request, heard)
        for request in requests:
            heard.wait_for_tokens(request.id, 10)
        at_home = [request for request in requests if fleet.instance_of(request.id) == "r0"]
        os.kill(next(rank.pid for rank in fleet.status().ranks if rank.name == "r1"), signal.SIGKILL)
        heard.wait([request.id for request in requests])
        for request in requests:
            assert heard.ends[request.id].finish == "length", heard.ends[request.id]
            assert same_unless_close(small_model(), request.prompt, heard.tokens[request.id])
        wait_until(lambda: not fleet.groups())
        (recovered,) = [event for event in fleet.events() if event.kind == "recovered"]
        assert len(at_home) > 1
        assert recovered.recomputed_tokens == 0
        fleet.check()


def test_a_member_that_stands_still_costs_no_request(launcher: SharedLauncher) -> None:
    survive(4, signal.SIGSTOP, launcher)


def test_a_rank_is_lost_at_any_point_while_layers_are_shared_and_parted(launcher: SharedLauncher) -> None:
    survive(3, signal.SIGKILL, launcher, share_and_part)


LENGTHS = elastic.Lengths(tick_s=0.02, wait_s=0.0, dwell_s=0.0, cooldown_s=0.1, patience_s=1.0)
ROOM, LONG = 400, 700
"""Tokens for which a rank has room by itself, and of a prompt for which ranks must become one."""
MANY = [5, 40, LONG, 90, 33, LONG, 64, LONG, 20, LONG]


def fixed_bytes(launcher: SharedLauncher) -> int:
    """Return what a rank whose layers are cut has besides keys and values."""
    with Fleet(checkpoint(), ranks=1, launch=launcher, places=["cpu=48MiB"], engine=ENGINE, shards=4) as fleet:
        (place,) = fleet.look("r0").status.places
        return sum(nbytes for owner, nbytes in place.owners.items() if not owner.startswith("kv"))


def survive_with_long_requests(
    seed: int, how: signal.Signals, launcher: SharedLauncher, lengths: Sequence[int] = MANY
) -> None:
    """Lose one of three ranks at a random point while the policy of lengths has them share layers and part.

    Two are left, which together can hold what each cannot.
    """
    chosen = random.Random(seed)
    victim, after_s = f"r{chosen.randrange(3)}", chosen.uniform(0, 1)
    places = [f"cpu={fixed_bytes(launcher) + ROOM * TOKEN_BYTES}"]
    options: dict[str, Any] = {"places": places, "engine": ENGINE, "replace": False, "beat_timeout_s": 3}
    with Fleet(checkpoint(), ranks=3, launch=launcher, policy=LENGTHS, **options) as fleet:
        alone, pair = (max(blocks[degree] for blocks in fleet.capacity((1, 2)).values()) for degree in (1, 2))
        assert alone * ENGINE["block_tokens"] < LONG < LONG + 60 < pair * ENGINE["block_tokens"]
        heard, requests = Collector(), [Request(prompt, 60, ignore_eos=True) for prompt in prompts(lengths, VOCABULARY)]
        pid = pid_of(fleet, victim)
        for request in requests:
            fleet.submit(request, heard)
        heard.wait_for_tokens(requests[0].id, 1)
        threading.Timer(after_s, os.kill, (pid, how)).start()
        heard.wait([request.id for request in requests])
        wait_until(lambda: not fleet.groups() and fleet.status().totals.ranks_lost == 1)
        for request in requests:
            assert heard.ends[request.id].finish == "length", heard.ends[request.id]
            assert same_unless_close(small_model(), request.prompt, heard.tokens[request.id])
        assert any(event.kind == "resharded" for event in fleet.events())
        fleet.check()


def test_a_rank_is_lost_while_the_policy_of_lengths_acts(launcher: SharedLauncher) -> None:
    survive_with_long_requests(6, signal.SIGKILL, launcher, MANY[:6])


class UnkillableLauncher:
    """Starts ranks that the fleet cannot kill, as those that have joined: it only hears them no more."""

    name = "joined"

    def __init__(self, launcher: SharedLauncher) -> None:
        self._launcher = launcher

    def start(self, spec: RankSpec) -> RankClient:
        client = self._launcher.start(spec)
        client._process = None
        return client

    def close(self) -> None:
        """Do nothing: they end when they see that the fleet has gone."""


def begin(fleet: Fleet) -> tuple[Collector, list[Request]]:
    """Have requests run at all ranks."""
    heard, requests = Collector(), [Request(prompt, 200, ignore_eos=True) for prompt in PROMPTS]
    for request in requests:
        fleet.submit(request, heard)
    for request in requests:
        heard.wait_for_tokens(request.id, 3)
    return heard, requests


def all_end_well(fleet: Fleet, heard: Collector, requests: list[Request]) -> None:
    heard.wait([request.id for request in requests])
    for request in requests:
        assert heard.ends[request.id].finish == "length", heard.ends[request.id]
        assert same_unless_close(small_model(), request.prompt, heard.tokens[request.id])
    fleet.check()


def pid_of(fleet: Fleet, name: str) -> int:
    return next(rank.pid for rank in fleet.status().ranks if rank.name == name)


def test_a_rank_that_is_given_up_while_it_lives_and_wakes_again_misleads_nobody(launcher: SharedLauncher) -> None:
    """Its memory was the last copy of layers that both of the others had dropped, and of their keys and values there.

    What a living rank has may change while it is read: those sequences are computed anew, and the layers come from the
    checkpoint.
    """
    options: dict[str, Any] = {"places": ["cpu=48MiB"], "engine": ENGINE, "replace": False, "beat_timeout_s": 1}
    with Fleet(checkpoint(), ranks=3, launch=UnkillableLauncher(launcher), **options) as fleet:
        count = len(fleet.layer_bytes())
        keeps = {f"r{i}": range(i * count // 3, (i + 1) * count // 3) for i in range(3)}
        dropped = fleet.drop(layers={name: set(range(count)) - set(kept) for name, kept in keeps.items()})
        assert dropped.status == "applied"
        heard, requests = begin(fleet)
        pid = pid_of(fleet, "r2")
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: not fleet.groups())
        told = {request.id: len(heard.tokens[request.id]) for request in requests}
        os.kill(pid, signal.SIGCONT)
        wait_for_end(pid)
        all_end_well(fleet, heard, requests)
        assert min(told.values()) < 200  # it woke while the others computed
        (recovered,) = [event for event in fleet.events() if event.kind == "recovered"]
        assert recovered.recomputed_tokens > 0
        assert {rank.name: rank.state for rank in fleet.status().ranks} == {
            "r0": "serving",
            "r1": "serving",
            "r2": "lost",
        }


@pytest.mark.parametrize("ranks", [2, 3])
def test_requests_of_a_killed_rank_go_on_from_its_memory_and_from_what_others_computed_for_it(
    launcher: SharedLauncher, ranks: int
) -> None:
    """No token of any request is computed again, and ranks keep nothing for it afterwards."""
    options: dict[str, Any] = {"places": ["cpu=48MiB"], "engine": ENGINE, "replace": False}
    with Fleet(checkpoint(), ranks=ranks, launch=launcher, **options) as fleet:
        half, count = len(fleet.layer_bytes()) // 2, len(fleet.layer_bytes())
        assert fleet.drop(layers={"r0": range(half, count), "r1": range(half)}).status == "applied"
        heard, requests = begin(fleet)
        assert "r1" in {fleet.instance_of(request.id) for request in requests}
        os.kill(pid_of(fleet, "r1"), signal.SIGKILL)
        all_end_well(fleet, heard, requests)
        wait_until(lambda: not fleet.groups())
        (resumed,) = [event for event in fleet.events() if event.kind == "requests resumed"]
        assert (resumed.rank, resumed.recomputed_tokens) == ("r1", 0)
        assert fleet.status().totals.recomputed_tokens == 0
        left = [rank.name for rank in fleet.status().ranks if rank.serves]
        assert len(left) == ranks - 1
        wait_until(lambda: not any(kv.used_bytes for rank in left for kv in fleet.look(rank).status.kv))
        fleet.check()


def test_a_group_that_loses_a_rank_does_not_disturb_another(launcher: SharedLauncher) -> None:
    with Fleet(checkpoint(), ranks=4, launch=launcher, places=["cpu=48MiB"], engine=ENGINE, replace=False) as fleet:
        half, count = len(fleet.layer_bytes()) // 2, len(fleet.layer_bytes())
        for first, second in (("r0", "r1"), ("r2", "r3")):
            assert fleet.drop(layers={first: range(half, count), second: range(half)}).status == "applied"
        heard, requests = begin(fleet)
        before = {group.members: group for group in fleet.groups()}
        os.kill(pid_of(fleet, "r1"), signal.SIGKILL)
        wait_until(lambda: [group.members for group in fleet.groups()] == [("r2", "r3")])
        all_end_well(fleet, heard, requests)
        assert fleet.groups()[0].paths == before["r2", "r3"].paths
        assert fleet.status().totals.ranks_lost == 1
        (recovered,) = [event for event in fleet.events() if event.kind == "recovered"]
        assert (recovered.rank, recovered.recomputed_tokens) == ("r0,r1", 0)
        heard, requests = Collector(), [Request(prompt, 100, ignore_eos=True) for prompt in PROMPTS]
        computed_by: set[str | None] = set()

        def listen(output: Output) -> None:
            computed_by.add(fleet.instance_of(output.request))  # None where this is the last of it
            heard(output)

        for request in requests:
            fleet.submit(request, listen)
        all_end_well(fleet, heard, requests)
        assert "r0" in computed_by


@pytest.mark.long
@pytest.mark.parametrize("seed", range(30))
def test_members_are_killed_while_replicas_come_and_go(seed: int) -> None:
    survive(seed, signal.SIGKILL if seed % 3 else signal.SIGSTOP, change=replicate_and_evict)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100))
def test_ranks_are_lost_many_times_while_layers_are_shared_and_parted(seed: int) -> None:
    survive(seed, signal.SIGKILL if seed % 3 else signal.SIGSTOP, change=share_and_part)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(30))
def test_ranks_are_lost_many_times_while_the_policy_of_lengths_acts(launcher: SharedLauncher, seed: int) -> None:
    survive_with_long_requests(seed, signal.SIGKILL if seed % 3 else signal.SIGSTOP, launcher)


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 2, 7, *range(10, 110)])
def test_members_are_killed_many_times(seed: int) -> None:
    survive(seed, signal.SIGKILL if seed % 3 else signal.SIGSTOP)
