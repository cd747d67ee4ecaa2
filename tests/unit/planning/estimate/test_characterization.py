"""What each choice does by itself: others differ in one, from the plainest that fits, and stand as multiples of it."""

from __future__ import annotations

import pytest

from elastic.errors import ConfigError
from elastic.planning.estimate.characterization import FIGURES, alone, ranges
from elastic.planning.estimate.configuration import Configuration, configurations
from elastic.planning.estimate.ranking import Estimate


def estimate(configuration: Configuration, why_not: str = "") -> Estimate:
    """Ranks share the time, stages do not; forms halve seconds and bytes; each rank has a GiB of its own."""
    less = 0.5 ** len(configuration.compressed)
    seconds = 8 * less / configuration.tp
    memory = round((16 * less + configuration.ranks) * 2**30)
    own = configuration, (), (), "assumed", why_not, 1
    return Estimate(*own, ttft_s=seconds, tpot_s=seconds / 8, latency_s=2 * seconds, memory_bytes=memory)


SPACE = [estimate(each) for each in configurations(4, 8, ("full", "int4"), ("full", "int8"))]


def test_configurations_that_differ_in_one_choice_stand_choice_by_choice() -> None:
    base, others = alone(SPACE[::-1])
    assert base.configuration == Configuration()
    assert [str(each.configuration) for each in others] == [
        "TP1 PP2 full",
        "TP1 PP3 full",
        "TP1 PP4 full",
        "TP2 PP1 full",
        "TP4 PP1 full",
        "TP1 PP1 int4",
        "TP1 PP1 full KV int8",
    ]
    figures = {name: figure(others[2]) for name, figure in FIGURES.items()}
    assert figures == pytest.approx(
        {"TTFT": 8, "TPOT": 1, "latency": 16, "memory": 20 * 2**30, "cost": 20 * 16, "GPU s": 4 * 16}
    )


def test_ranges_are_of_all_that_fit() -> None:
    assert ranges(SPACE)["latency"] == pytest.approx(4 * 4)
    assert ranges(SPACE)["memory"] == pytest.approx((16 + 4) / (4 + 1))
    assert ranges(SPACE).keys() == FIGURES.keys()
    slow = estimate(Configuration(), "a request takes too long")
    assert ranges([slow, *SPACE[1:]])["latency"] == pytest.approx(4 * 4)
    assert ranges([estimate(Configuration(4)), slow])["latency"] == 1


def test_where_one_rank_is_too_small_the_fewest_stages_are_compared_with() -> None:
    large = [estimate(each.configuration, "" if each.configuration.ranks > 1 else "it lacks 1 GiB") for each in SPACE]
    base, others = alone(large)
    assert base.configuration == Configuration(1, 2)
    assert [str(each.configuration) for each in others] == [
        "TP1 PP3 full",
        "TP1 PP4 full",
        "TP2 PP2 full",
        "TP1 PP2 int4",
        "TP1 PP2 full KV int8",
    ]
    with pytest.raises(ConfigError, match="nothing fits in full weights"):
        alone([each for each in SPACE if each.configuration.compressed])
