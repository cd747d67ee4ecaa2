"""What the simulator is told of ranks that share layers is what their steps took."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sim_fit import Fitted
from sim_runs import TimedStep
from sim_shared import EXCHANGES, SharedTerms, replayed, shared_terms, with_shared_layers, with_terms

from elastic.planning.estimate.layer_cost import LayerCost
from elastic.sim.core.host import HostSharing

COST = LayerCost(((1, 0.004), (256, 0.024)), chunk=0.0, pair=0.0, prefix=0.0, seen=1e-6, block=1)
FITTED = Fitted(COST, HostSharing(), (), {"run": 1.0})


def decoded(rank: int, begin_s: float, seconds: float) -> TimedStep:
    return TimedStep(rank, begin_s, begin_s + seconds, ((999, 1),))


def shared_s(tokens: int) -> float:
    """What one rank computes of a step whose products are whole at both."""
    return COST.batch([TimedStep(0, 0.0, 1.0, ((0, tokens),)).as_chunks[0]])


@pytest.mark.parametrize(("core_s", "hop_s"), [(5e-4, 0.0), (2e-4, 3e-4), (0.0, 5e-4)])
def test_what_exchanges_keep_busy_and_what_they_wait_for_is_told_apart_by_two_instances(
    core_s: float, hop_s: float
) -> None:
    alone_s = 0.004 + 1e-3 / 2  # products whole at both, attention divided
    single = [decoded(1, float(i), alone_s + EXCHANGES * (core_s + hop_s)) for i in range(20)]
    chunks = [
        TimedStep(1, 100.0 + i, 100.0 + i + shared_s(n) + EXCHANGES * (core_s + hop_s), ((0, n),))
        for i, n in enumerate((64, 128, 256))
    ]
    rest_s = 0.05 * 0.005
    pair = [decoded(rank, 200.0 + i, 2 * (alone_s + EXCHANGES * core_s) - rest_s) for i in range(20) for rank in (1, 2)]
    found = with_terms(FITTED, shared_terms(FITTED, {"run": [*single, *chunks, *pair]}))
    assert found.core_s == pytest.approx(core_s, abs=2e-5)
    assert found.hop_s == pytest.approx(hop_s, abs=2e-5)


@pytest.mark.parametrize("sharing", [HostSharing(), HostSharing(0.1, frontend_s=3e-4, cores=2)])
def test_what_is_fitted_to_steps_of_the_simulator_computes_them_again(sharing: HostSharing) -> None:
    home = replace(FITTED, sharing=sharing, beside_s=1e-3, beside_chunk_s=2e-4)
    true = with_terms(home, SharedTerms(0.7, EXCHANGES * 2e-4, EXCHANGES * 1e-4))
    shapes = [(0, 256), (0, 128), (0, 64), (64, 32)] * 8 + [(512 + number, 1) for number in range(64)]
    asked = [
        TimedStep(rank, begin_s, begin_s + 0.1, (shapes[(number + 16 * rank) % len(shapes)],))
        for begin_s, ranks in ((0.0, 1), (100.0, 2))
        for number in range(len(shapes))
        for rank in range(ranks)
    ]
    steps = replayed(true, "run", asked)
    found = with_shared_layers(home, {"run": steps})
    assert (found.core_s, found.hop_s) == pytest.approx((2e-4, 1e-4), abs=2e-5)
    told = replayed(found, "run", steps)
    for ours, real in zip(of_one_and_two(told), of_one_and_two(steps), strict=True):
        assert ours == pytest.approx(real, rel=0.02)


def of_one_and_two(steps: list[TimedStep]) -> tuple[float, float]:
    """Return the seconds of steps while one instance has some, and while two have."""
    early = sum(step.seconds for step in steps if step.begin_s < 50.0)
    return early, sum(step.seconds for step in steps) - early
