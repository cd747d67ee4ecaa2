from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.planning.pipelines import run_pipeline


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
