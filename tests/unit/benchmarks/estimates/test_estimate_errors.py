"""Errors of bytes: what one rank holds by itself is not averaged with what several hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from estimate import memory_errors
from estimate_fleets import RANKS, at_rest, done, memory_file_bytes, ranks, serve
from estimate_shapes import config, save

from elastic.estimation.model_layout import layout_of
from elastic.estimation.weight_pages import WeightPages, kernel_target
from elastic.planning.estimate.devices import CPU_PAGE_BYTES


def test_errors_of_one_rank_and_of_several_are_told_apart() -> None:
    rows = [
        {"tp": 1, "pp": 1, "ours": 90, "measured": 100, "paper": None},
        {"tp": 1, "pp": 2, "ours": 102, "measured": 100, "batch": 6, "measured_batch": 4, "paper": 150},
        {"tp": 2, "pp": 1, "ours": 99, "measured": 100, "batch": 3, "measured_batch": 4, "paper": None},
    ]
    told = memory_errors(rows)
    assert told["ours, one rank"] == pytest.approx([-0.1])
    assert told["ours, several ranks"] == pytest.approx([0.02, -0.01])
    assert told["ours, their batches"] == pytest.approx([0.5, -0.25])
    assert told["paper, several ranks"] == pytest.approx([0.5])


def test_a_memory_file_counts_once_and_only_with_the_pages_that_the_kernel_has() -> None:
    before, page = memory_file_bytes("self"), 64 << 10
    file = os.memfd_create("pages")
    again = os.dup(file)
    try:
        os.ftruncate(file, 8 * page)
        assert memory_file_bytes("self") == before
        os.posix_fallocate(file, 0, 3 * page)
        assert memory_file_bytes("self") == before + 3 * page
    finally:
        os.close(file)
        os.close(again)
    assert memory_file_bytes("self") == before


@pytest.mark.slow
def test_two_stages_hold_the_pages_of_their_layers_and_a_page_of_keys_and_values_in_each(tmp_path: Path) -> None:
    """The kernel's count against the estimate's, whose code the ledger shares."""
    path = save(config("llama", 6, 256), tmp_path)
    pages = WeightPages(layout_of(str(path), torch.float32), CPU_PAGE_BYTES, kernel_target("cpu", ""))
    with ranks(path, ("full",), 1) as (engine, _):
        done(engine.drop(layers={"r0": range(4, 6), "r1": range(4)}))
        serve(engine, (2, 8, 4))
        held = [at_rest(engine, rank)[0] // CPU_PAGE_BYTES for rank in RANKS]
    assert held == [pages.fixed + pages.layers(layers, "full", 1) + len(layers) for layers in (range(4), range(4, 6))]
