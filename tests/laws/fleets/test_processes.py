from __future__ import annotations

import pytest

from elastic.config import Overload
from laws.fleets.process_machine import machine
from support.cluster.shared_launcher import SharedLauncher

ONCE, MANY = 8, 200
"""Actions of a run without deaths; of one with them there are as many."""


AT_ONCE = Overload(
    tick_s=0.02, queue_high_s=0.05, pressure_ticks=2, recovery_ticks=2, cooldown_s=0.1, dwell_s=0.2, idle_s=0.1
)


def run(
    launcher: SharedLauncher,
    ranks: int,
    seed: int,
    actions: int,
    policy: Overload | None = None,
    *,
    sharded: bool = False,
) -> None:
    """Have a fleet live through random actions, first without deaths: then nothing at all is computed twice."""
    with machine(launcher, ranks, seed, policy, sharded=sharded) as one:
        one.run(actions, deadly=False)
        least, most = one.traffic.computed_once()
        totals = one.fleet.status().totals
        assert (totals.ranks_lost, totals.recomputed_tokens) == (0, 0)
        assert (0 if sharded else least) <= one.computed() <= most  # what requests begin with is computed once
        one.run(actions, deadly=True)


@pytest.mark.slow
def test_every_request_gets_its_tokens_once_whatever_processes_do(launcher: SharedLauncher) -> None:
    run(launcher, 2, 4, ONCE)


@pytest.mark.slow
def test_every_request_gets_its_tokens_once_whatever_processes_and_a_policy_do(launcher: SharedLauncher) -> None:
    run(launcher, 2, 4, ONCE, AT_ONCE)


@pytest.mark.slow
def test_every_request_gets_its_tokens_once_whatever_processes_that_share_layers_do(launcher: SharedLauncher) -> None:
    run(launcher, 2, 4, ONCE, sharded=True)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40, 50))
def test_every_request_gets_its_tokens_once_whatever_processes_that_share_layers_do_for_long(
    launcher: SharedLauncher, seed: int
) -> None:
    run(launcher, 2 + seed % 2, seed, MANY, sharded=True)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(30, 40))
def test_every_request_gets_its_tokens_once_whatever_a_policy_does_for_long(
    launcher: SharedLauncher, seed: int
) -> None:
    run(launcher, 2 + seed % 2, seed, MANY, AT_ONCE)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 30))
def test_every_request_gets_its_tokens_once_whatever_processes_do_for_long(launcher: SharedLauncher, seed: int) -> None:
    run(launcher, 2 + seed % 2, seed, MANY)
