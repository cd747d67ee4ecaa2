from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.planning.measured_cost import LinearLatency
from elastic.planning.pipeline.chunk_cost import Chunk, ChunkCost, ModelCost
from elastic.planning.pipeline.step_time import pipeline_step_s, plain_step_s, sharded_step_s
from elastic.planning.pipeline.timeline import run_pipeline

MODEL = ModelCost(ChunkCost(1e-8, 1e-8, 1e-5, 2e-4, 2e-4), ChunkCost(0, 0, 1e-5, 3e-4, 3e-4), 12)
DECODING = [Chunk(str(i), 500, 1) for i in range(8)]


def test_batches_pass_one_stage_after_the_other() -> None:
    found = run_pipeline([[1, 2], [1, 1], [3, 1]], hop_s=0.5)
    assert found.ends_s == ((1, 3.5), (2, 4.5), (5, 6.5))
    assert found.span_s == 6.5
    assert found.busy_s == 9
    assert found.bubbles == pytest.approx(1 - 9 / 13)
    assert run_pipeline([]).bubbles == 0


@given(st.integers(1, 9), st.integers(1, 5))
def test_equal_batches_lose_only_the_ends(batches: int, stages: int) -> None:
    found = run_pipeline([[1.0] * stages] * batches)
    assert found.bubbles == pytest.approx((stages - 1) / (batches + stages - 1))


def test_one_stage_is_a_plain_instance() -> None:
    assert pipeline_step_s(MODEL, [12], [DECODING]) == pytest.approx(plain_step_s(MODEL, [DECODING]))
    assert plain_step_s(MODEL, []) == pipeline_step_s(MODEL, [6, 6], []) == 0


def test_a_pipeline_is_as_slow_as_its_busiest_stage_over_all_cohorts() -> None:
    cohorts = [DECODING[:4], DECODING[4:]]
    even, uneven = (pipeline_step_s(MODEL, layers, cohorts) for layers in ([7, 5], [10, 2]))
    assert even < uneven
    assert uneven == pytest.approx(2 * MODEL.stage(10, last=False).batch(DECODING[:4]))


def test_with_one_cohort_hops_are_waited_for() -> None:
    without = pipeline_step_s(MODEL, [6, 6], [DECODING])
    assert pipeline_step_s(MODEL, [6, 6], [DECODING], hop_s=1e-3) == pytest.approx(without + 2e-3)


def test_shards_halve_the_layers_and_add_sums() -> None:
    all_reduce = LinearLatency(1e-4, 0.0)
    whole = sharded_step_s(MODEL, 1, DECODING, all_reduce, 1024)
    assert whole == pytest.approx(plain_step_s(MODEL, [DECODING]))
    halved = sharded_step_s(MODEL, 2, DECODING, all_reduce, 1024)
    assert halved == pytest.approx((whole + MODEL.rest.batch(DECODING)) / 2 + 24e-4)
