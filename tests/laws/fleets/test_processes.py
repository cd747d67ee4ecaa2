from __future__ import annotations

import pytest

from laws.fleets.process_machine import machine
from support.cluster.shared_launcher import SharedLauncher

ONCE, MANY = 8, 200
"""Actions of a run without deaths; of one with them there are as many."""


def run(launcher: SharedLauncher, ranks: int, seed: int, actions: int) -> None:
    """Have a fleet live through random actions, first without deaths: then nothing at all is computed twice."""
    with machine(launcher, ranks, seed) as one:
        one.run(actions, deadly=False)
        least, most = one.traffic.computed_once()
        totals = one.fleet.status().totals
        assert (totals.ranks_lost, totals.recomputed_tokens) == (0, 0)
        assert least <= one.computed() <= most
        one.run(actions, deadly=True)


@pytest.mark.slow
def test_every_request_gets_its_tokens_once_whatever_processes_do(launcher: SharedLauncher) -> None:
    run(launcher, 2, 4, ONCE)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 30))
def test_every_request_gets_its_tokens_once_whatever_processes_do_for_long(launcher: SharedLauncher, seed: int) -> None:
    run(launcher, 2 + seed % 2, seed, MANY)
