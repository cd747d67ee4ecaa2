"""Rows of a batch on a GPU, for replicas beside it."""

from __future__ import annotations

import pytest
import torch

from elastic.hooks.replicas.split_rows import BatchSlice


@pytest.mark.cuda
def test_rows_are_there_once_they_are_taken_to_a_cpu() -> None:
    hidden = torch.full((4, 3, 8), 2.0, device="cuda") * 3
    rows = BatchSlice(1, 3, 4, torch.device("cpu")).take(hidden)
    assert torch.equal(rows, torch.full((2, 3, 8), 6.0))
