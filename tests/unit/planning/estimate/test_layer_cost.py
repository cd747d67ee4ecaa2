"""Costs of layers, fitted to batches whose seconds are known, and tested at others."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import ConfigError
from elastic.planning.estimate.layer_cost import LayerCost, r_squared
from elastic.planning.least_squares import not_negative
from elastic.planning.pipeline.chunk_cost import BatchTiming, Chunk, ChunkCost

EXPANDED = LayerCost(
    ((1, 2e-3), (2, 5e-3), (64, 5.5e-3), (256, 2e-2)), chunk=1e-5, pair=2e-9, prefix=2e-6, seen=1e-6, block=16
)
"""A variant whose weights are expanded for two tokens and more, and products that are bound by bytes up to 64."""
MIXES = (
    *(((0, size),) for size in (256, 128, 64, 32)),
    *(((start, size),) for start, size in ((200, 128), (400, 128), (200, 32))),
    *(((start, 1),) * count for count in (1, 2, 4, 8) for start in (50, 400)),
    ((0, 64),) * 2,
    (*((200, 1),) * 4, (0, 64)),
)
HELD_OUT = (((0, 90),), ((170, 120),), ((333, 1),), ((150, 1),) * 2, ((210, 1),) * 8, ((0, 200), (310, 1)))


def seconds(cost: LayerCost | ChunkCost, mix: tuple[tuple[int, int], ...]) -> float:
    return cost.batch([Chunk(str(i), start, count) for i, (start, count) in enumerate(mix)])


def samples(cost: LayerCost) -> list[BatchTiming]:
    return [BatchTiming(mix, seconds(cost, mix)) for mix in MIXES]


@pytest.mark.parametrize("window", [None, 100])
def test_lengths_and_batches_that_were_not_fitted_are_near(window: int | None) -> None:
    """Within 2 %, where a cost that is linear in tokens is off by more than 20 %."""
    true = replace(EXPANDED, window=window)
    found, linear = LayerCost.fit(samples(true), window, 16), ChunkCost.fit(samples(true), "two alphas")
    errors = {
        cost: max(abs(seconds(cost, mix) / seconds(true, mix) - 1) for mix in HELD_OUT) for cost in (found, linear)
    }
    assert errors[found] < 0.02 < 0.2 < errors[linear]
    assert r_squared(found, samples(true)) > 0.9999 > r_squared(linear, samples(true))  # type: ignore[arg-type]


def test_a_window_that_is_not_known_costs_accuracy() -> None:
    """Tokens that left a window are not read: a term of all that came before is no term of a sliding layer."""
    true = replace(EXPANDED, seen=2e-5, window=100, block=1)
    errors = {}
    for window in (100, None):
        cost = LayerCost.fit(samples(true), window)
        errors[window] = max(abs(seconds(cost, mix) / seconds(true, mix) - 1) for mix in HELD_OUT)
    assert errors[100] < 0.02 < 0.1 < errors[None]


def test_without_the_attention_terms_context_costs_nothing() -> None:
    true = replace(EXPANDED, seen=1e-5)
    blind = LayerCost.fit(samples(true), attention=False)
    assert (blind.pair, blind.seen) == (0, 0)
    short, long = (((start, 1),) * 8 for start in (20, 480))
    assert seconds(blind, short) == seconds(blind, long)
    assert seconds(true, long) > 2 * seconds(true, short)


def test_ranks_divide_weights_that_are_cut_and_heads() -> None:
    half = EXPANDED.shared(0.75, 2, kv_parts=1)
    assert [each for _, each in half.matrices] == pytest.approx([0.625 * each for _, each in EXPANDED.matrices])
    assert (half.pair, half.prefix, half.seen) == (EXPANDED.pair / 2, EXPANDED.prefix, EXPANDED.seen)
    assert half.chunk == EXPANDED.chunk
    assert EXPANDED.shared(0.0, 1, 1) == EXPANDED


@pytest.mark.parametrize(("hidden", "network", "calls_s"), [(256, 768, 4e-4), (768, 2304, 8e-4), (1024, 3072, 8e-4)])
def test_ranks_that_share_a_layer_are_spared_its_weights_and_not_its_calls(
    hidden: int, network: int, calls_s: float
) -> None:
    """Within 4 % of a layer with half of its feed-forward network, which without overhead is off by 6 % and more."""

    def layer(network: int) -> tuple[LayerCost, float]:
        weights = 3 * hidden * hidden + 3 * hidden * network
        read_s = 4 * weights / 12e9
        products = tuple((tokens, calls_s + read_s * (1 + tokens / 20)) for tokens in (1, 64, 256))
        return replace(EXPANDED, matrices=products, pair=0.0, prefix=0.0, seen=0.0), read_s

    (whole, read_s), (half, _) = layer(network), layer(network // 2)
    share = 3 * hidden * network / (3 * hidden * hidden + 3 * hidden * network)
    fitted = LayerCost.fit(samples(whole), block=16)
    for mix in HELD_OUT:
        blind, told = (cost.shared(share, 2, 1) for cost in (fitted, fitted.with_reading(read_s)))
        assert seconds(told, mix) == pytest.approx(seconds(half, mix), rel=0.04)
        assert seconds(blind, mix) < seconds(told, mix)
    decode = ((333, 1),)
    assert seconds(told, decode) == pytest.approx(seconds(half, decode), rel=0.04)
    assert seconds(blind, decode) < 0.94 * seconds(half, decode)


def test_what_calls_take_is_the_same_beside_others_and_never_more_than_the_least_batch_takes() -> None:
    cost = LayerCost(((1, 1.0), (64, 3.0)), 0.1, 1e-9, 1e-8, 1e-7).with_reading(0.25)
    assert cost.overhead == 0.75
    assert cost.beside(2.0).matrices == ((1, 1.5), (64, 3.5))
    assert cost.shared(1.0, 4, 1).matrices == ((1, 0.75 + 0.25 / 4), (64, 0.75 + 2.25 / 4))
    assert cost.times(2.0).overhead == 1.5
    assert cost.with_reading(3.0).overhead == 0.0


def test_others_that_read_the_same_memory_slow_down_what_is_read() -> None:
    cost = LayerCost(((1, 1.0), (64, 3.0)), 0.1, 1e-9, 1e-8, 1e-7)
    beside = cost.beside(0.5)
    decode, prompt = [Chunk("", 1000, 1)], [Chunk("", 0, 64)]
    assert beside.batch(decode) == pytest.approx(1.5 * cost.batch(decode))
    assert beside.batch(prompt) == pytest.approx(cost.batch(prompt) + 0.5)
    assert cost.beside(0.0) == cost
    assert cost.times(2.0).batch(prompt) == pytest.approx(2 * cost.batch(prompt))


def test_replayed_batches_of_single_tokens_take_less_and_no_others() -> None:
    one, eight = ((10, 1),), ((10, 1),) * 8
    less = EXPANDED.with_replays([(one, 0.75), (eight, 0.75), (one, 0.75)])
    saved = 0.25 * seconds(EXPANDED, one)
    for mix in (one, eight, ((300, 1),) * 20):
        assert seconds(less, mix) == pytest.approx(seconds(EXPANDED, mix) - saved)
    for mix in (((0, 2),), ((10, 1), (0, 7))):
        assert seconds(less, mix) == seconds(EXPANDED, mix)
    assert EXPANDED.with_replays([(one, 1.3)]).replay_saving == 0, "a machine that changed its pace"
    assert seconds(less.times(2.0), one) == pytest.approx(2 * seconds(less, one))


def test_costs_go_through_json() -> None:
    for cost in (EXPANDED, replace(EXPANDED, window=64, overhead=1e-3, replay_saving=1e-4)):
        assert LayerCost.of(json.loads(json.dumps(asdict(cost)))) == cost
    good = asdict(EXPANDED)
    for wrong in (
        {"matrices": [[1, 2.0]]},
        {"matrices": [[2, 1.0], [1, 2.0]]},
        {"pair": -1.0},
        {"seen": math.nan},
        {"overhead": -1.0},
        {"replay_saving": -1.0},
    ):
        with pytest.raises(ValueError, match="is no cost"):
            LayerCost.of({**good, **wrong})


def test_too_little_to_fit_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"batches of \[4\] tokens cannot be fitted; measure two numbers or more"):
        LayerCost.fit([BatchTiming(((0, 4),), 1.0), BatchTiming(((8, 4),), 1.1)])
    with pytest.raises(ConfigError, match="in seconds above 0"):
        LayerCost.fit([BatchTiming(((0, 4),), 1.0), BatchTiming(((0, 8),), 0.0)])


@given(st.integers(0, 10_000))
def test_no_coefficient_below_zero_is_nearer(seed: int) -> None:
    """Conditions of the best: where a coefficient is above zero the slope is zero, elsewhere it points below zero."""
    choose = random.Random(seed)
    count = choose.randint(1, 7)
    rows = [[choose.random() * (choose.random() < 0.7) for _ in range(count)] for _ in range(choose.randint(count, 20))]
    found = not_negative(rows)
    left = [1 - math.fsum(a * x for a, x in zip(row, found, strict=True)) for row in rows]
    for column, x in enumerate(found):
        slope = math.fsum(row[column] * rest for row, rest in zip(rows, left, strict=True))
        assert x >= 0
        assert slope < 1e-6
        assert x == 0 or abs(slope) < 1e-6


def test_columns_alike_and_columns_of_zeros_do_no_harm() -> None:
    found = not_negative([[1.0, 1.0, 0.0], [2.0, 2.0, 0.0]])
    assert found[2] == 0
    assert sum(found) == pytest.approx(0.6)
