from __future__ import annotations

import random
import statistics
from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import ConfigError
from elastic.planning.pipeline.chunk_cost import (
    AMOUNTS,
    FORMS,
    BatchTiming,
    Chunk,
    ChunkCost,
    ChunkProfile,
    ModelCost,
)
from support.pipeline.chunk_errors import relative_errors

TRUE = ChunkCost(2e-8, 2e-8, 3e-5, 9e-4, 7e-4)
READING = replace(TRUE, own=1e-8, read=4e-7)
COSTS = st.just(0.0) | st.floats(1e-12, 1e-3)


def mixes(seed: int, count: int) -> list[tuple[tuple[int, int], ...]]:
    """Batches of one to eight chunks, with and without a prefix, decode steps among them."""
    choose = random.Random(seed)
    found = []
    for _ in range(count):
        chunks = [
            choose.choice([(0, choose.randint(2, 2000)), (choose.randint(1, 8000), choose.randint(1, 2000))])
            if choose.random() < 0.6
            else (choose.randint(1, 8000), 1)
            for _ in range(choose.randint(1, 8))
        ]
        found.append(tuple(chunks))
    return found


def measured(seed: int, count: int, noise: float = 0.0, true: ChunkCost = TRUE) -> list[BatchTiming]:
    choose = random.Random(seed)
    return [
        BatchTiming(chunks, true.batch([Chunk("", *chunk) for chunk in chunks]) * choose.gauss(1, noise))
        for chunks in mixes(seed, count)
    ]


def test_equations_1_and_3() -> None:
    one = ChunkCost(2.0, 2.0, 3.0, 7.0, 5.0)
    assert one(Chunk("r", 4, 3)) == 2 * (4 * 3 + 9 + 3) + 3 * 3 + 7
    assert one.batch([Chunk("r", 4, 3), Chunk("s", 0, 1)]) == one(Chunk("r", 4, 3)) + one(Chunk("s", 0, 1)) - 5
    assert one.batch([]) == 0
    assert replace(one, read=0.5)(Chunk("r", 4, 3)) == one(Chunk("r", 4, 3)) + 0.5 * 4


@pytest.mark.parametrize("true", [TRUE, READING])
def test_a_fit_finds_the_coefficients_gamma_and_lambda_apart(true: ChunkCost) -> None:
    found = ChunkCost.fit(measured(0, 60, true=true))
    assert astuple(found) == pytest.approx(astuple(true), rel=1e-6, abs=1e-12)


def test_what_is_read_once_for_a_chunk_is_not_taken_for_attention() -> None:
    samples, held_out = measured(1, 60, 0.02, READING), measured(2, 60, 0.02, READING)
    errors = {form: statistics.mean(relative_errors(ChunkCost.fit(samples, form), held_out)) for form in FORMS}
    assert errors["two alphas and reads"] <= 0.03 < 0.06 < min(errors["paper"], errors["two alphas"])


@given(st.builds(ChunkCost, *[COSTS] * 6), st.integers(0, 8000), st.integers(1, 2000))
def test_tokens_within_are_as_many_as_cost_so_much(cost: ChunkCost, start: int, tokens: int) -> None:
    for seconds in (0.0, cost.chunk, 0.5 * cost(Chunk("", start, tokens)), cost(Chunk("", start, tokens))):
        fit = cost.tokens_within(Chunk("", start, tokens), seconds)
        assert 0 <= fit <= tokens
        assert not fit or cost(Chunk("", start, fit)) <= seconds * (1 + 1e-6) + 1e-12
        if fit + 1 < tokens:
            assert cost(Chunk("", start, fit + 2)) >= seconds * (1 - 1e-6)


def test_where_tokens_cost_nothing_a_chunk_fits_whole() -> None:
    cost = ChunkCost(prefix=0, own=0, token=0, chunk=1e-3, shared=0)
    assert cost.tokens_within(Chunk("", 285, 7), 2e-3) == 7
    assert cost.tokens_within(Chunk("", 285, 7), 1e-3) == 0


def test_held_out_batches_are_predicted_and_models_blind_to_attention_fail_there() -> None:
    """Attention is 30 % of the time and more in these shapes: else the comparison would say nothing."""
    samples, held_out = measured(1, 60, 0.02), measured(2, 60, 0.02)
    assert not {s.chunks for s in samples} & {s.chunks for s in held_out}
    attention = sum(TRUE.prefix * AMOUNTS["prefix"](s.chunks) for s in held_out)
    attention += sum(TRUE.own * AMOUNTS["own"](s.chunks) for s in held_out)
    assert attention >= 0.3 * sum(s.seconds for s in held_out)
    errors = {form: relative_errors(ChunkCost.fit(samples, form), held_out) for form in FORMS}
    assert statistics.mean(errors["paper"]) <= 0.05
    assert statistics.mean(errors["two alphas"]) <= 0.05
    for blind in ("no prefix", "no self-attention", "linear", "tokens"):
        assert max(errors[blind]) >= 0.3
        assert statistics.mean(errors[blind]) > 2 * statistics.mean(errors["paper"])


@given(st.integers(0, 1 << 30), st.sampled_from(sorted(FORMS)))
def test_no_coefficient_is_below_zero_and_shared_is_no_more_than_a_chunk_pays(seed: int, form: str) -> None:
    choose = random.Random(seed)
    samples = [BatchTiming(chunks, choose.uniform(1e-4, 1e-1)) for chunks in mixes(seed, 8)]
    cost = ChunkCost.fit(samples, form)
    assert min(astuple(cost)) >= 0
    assert cost.shared <= cost.chunk


def test_a_fit_is_the_best_of_nearby_ones() -> None:
    samples = measured(3, 40, 0.3)
    cost = ChunkCost.fit(samples)

    def squares(other: ChunkCost) -> float:
        return sum(error**2 for error in relative_errors(other, samples))

    for i, value in enumerate((cost.prefix, cost.token, cost.chunk)):
        for step in (-1e-3, 1e-3):
            alpha, token, chunk = [
                one + step * (value + 1e-9) * (i == j) for j, one in enumerate((cost.prefix, cost.token, cost.chunk))
            ]
            if min(alpha, token, chunk - cost.shared) >= 0:
                assert squares(ChunkCost(alpha, alpha, token, chunk, cost.shared)) >= squares(cost) * (1 - 1e-9)


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 samples"):
        ChunkCost.fit(measured(0, 3))
    with pytest.raises(ConfigError, match="above 0"):
        ChunkCost.fit([*measured(0, 9), BatchTiming(((0, 1),), 0.0)])


@given(st.lists(COSTS, min_size=5, max_size=5), st.integers(0, 6))
def test_stages_add_up_to_the_model(values: list[float], layers: int) -> None:
    model = ModelCost(ChunkCost(*values), ChunkCost(0, 0, 1e-5, 2e-4, 1e-4), 6)
    chunks = [Chunk("r", 100, 30), Chunk("s", 7, 1)]
    parts = [model.stage(layers, last=False), model.stage(6 - layers, last=True)]
    assert sum(part.batch(chunks) for part in parts) == pytest.approx(model.whole.batch(chunks))


def test_a_profile_is_fitted_by_layer_and_adds_up_to_the_model() -> None:
    rest = ChunkCost(0, 0, 1e-5, 5e-4, 3e-4)
    chunks = mixes(5, 40)
    costs = [(TRUE, chunks), (rest, chunks)]
    layer, around = (
        tuple(BatchTiming(mix, cost.batch([Chunk("", *chunk) for chunk in mix])) for mix in mixes_)
        for cost, mixes_ in costs
    )
    profile = ChunkProfile(layer, around, 12)
    model = profile.fit()
    assert astuple(model.layer) == pytest.approx(astuple(TRUE), rel=1e-6)
    assert astuple(model.rest) == pytest.approx(astuple(rest), rel=1e-6)
    assert max(relative_errors(model.whole, profile.whole)) < 1e-6
