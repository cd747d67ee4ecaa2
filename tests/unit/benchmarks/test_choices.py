"""What the benchmark of choices computes for each of the engine's block layouts."""

from __future__ import annotations

import choices
import pytest
import torch

from elastic.engines.executor.block_layout import LAYOUTS


@pytest.mark.parametrize("heads", [2, 6])
def test_a_step_attends_for_all_heads_of_all_requests_in_each_layout(heads: int) -> None:
    works = choices.blocks(torch.float32, 3, 64, 2, heads)
    assert works.keys() == LAYOUTS.keys()
    for work in works.values():
        for out in work():
            assert out.shape == (3, heads, 64)
            assert out.isfinite().all()
