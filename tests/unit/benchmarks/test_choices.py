"""What the benchmark of choices computes for the engine's blocks."""

from __future__ import annotations

import choices
import pytest
import torch

from elastic.engines.executor.block_layout import LAYOUTS


@pytest.mark.parametrize("heads", [2, 6])
def test_a_step_attends_for_all_heads_of_all_requests_in_each_layout(heads: int) -> None:
    works = choices.blocks(torch.float32, 3, 64, 2, heads)
    assert works.keys() == set(LAYOUTS)
    for work in works.values():
        for out in work():
            assert out.shape == (3, heads, 64)
            assert out.isfinite().all()


def test_slots_that_nobody_wrote_change_nothing_either_way() -> None:
    for work in choices.unwritten(torch.float32, 3, 64, 2).values():
        for out in work():
            assert out.shape == (3, 2, 1, 64)
            assert out.isfinite().all()
