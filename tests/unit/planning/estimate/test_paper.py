"""The paper's methods on synthetic footprints and latencies, whose parts are known."""

from __future__ import annotations

import pytest

from elastic.errors import ConfigError
from elastic.planning.estimate.paper import Latency, MemoryParts
from support.estimation.fingerprints import PerLayer, extrapolated_latency, extrapolated_memory

PARTS = MemoryParts(weights=1000.0, activations=30.0, stage_activations=4.0)


def test_figure_8_has_these_footprints() -> None:
    assert PARTS.footprint(1, 1) == 1030
    assert PARTS.footprint(4, 1) == 1030 + 3 * 30
    assert PARTS.footprint(1, 4) == 1030 + 4 * 4
    assert PARTS.footprint(4, 2) == 1030 + 3 * 30 + 8 * 4


def test_m1_solves_three_footprints() -> None:
    solved = MemoryParts.solve(*(PARTS.footprint(tp, pp) for tp, pp in ((1, 1), (1, 2), (2, 1))))
    assert solved == PARTS


def test_m2_extrapolates_kinds_of_layers_apart() -> None:
    """One layer of each kind and one more of each tell what a layer of either is; two layers of one kind do not."""
    layers = {"sliding": 25, "full": 5}

    def footprint(counts: dict[str, int], tp: int, pp: int) -> float:
        weights = 100 + 7.0 * counts["sliding"] + 31.0 * counts["full"]
        return MemoryParts(weights, 2.0 * sum(counts.values()), 0.5 * sum(counts.values())).footprint(tp, pp)

    measured = []
    for tp, pp in ((1, 1), (1, 2), (2, 1)):
        one = footprint({"sliding": 1, "full": 1}, tp, pp)
        more = {kind: footprint({"sliding": 1, "full": 1, kind: 2}, tp, pp) for kind in layers}
        measured.append((one, more))
    solved = extrapolated_memory(measured, layers)
    for tp, pp in ((1, 1), (4, 2), (8, 1), (1, 8)):
        assert solved.footprint(tp, pp) == pytest.approx(footprint(layers, tp, pp))
    blind = PerLayer.solve(measured[0][0], {"sliding": measured[0][1]["sliding"]}).of({"sliding": 30})
    assert blind != pytest.approx(footprint(layers, 1, 1), rel=0.02)


def test_l1_and_l2_solve_equations_1_to_3() -> None:
    whole = Latency(ttft_s=0.2, tpot_s=0.03)
    assert Latency.solve((8, whole(8)), (32, whole(32))).ttft_s == pytest.approx(0.2)
    one, two = Latency(0.05 + 0.01, 0.002 + 0.001), Latency(0.05 + 0.02, 0.002 + 0.002)
    found = extrapolated_latency(one, {"layer": two}, {"layer": 12})
    assert (found.ttft_s, found.tpot_s) == (pytest.approx(0.05 + 0.12), pytest.approx(0.002 + 0.012))


def test_outputs_of_one_length_are_refused() -> None:
    with pytest.raises(ConfigError, match="two outputs of 8 tokens"):
        Latency.solve((8, 1.0), (8, 1.1))
