"""Errors of bytes: what one rank holds by itself is not averaged with what several hold."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from common import Kept
from estimate import part
from estimate_fleets import done, held_bytes, memory_file_bytes, ranks, serve
from estimate_report import memory_errors, summary
from estimate_shapes import at_rest, config, save

import elastic
from elastic.estimation.model_layout import layout_of
from elastic.estimation.weight_pages import WeightPages
from elastic.planning.estimate.devices import PAGE_BYTES
from elastic.quant.formats.base import KernelTarget
from elastic.types import PlaceStatus


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


def test_of_few_errors_p90_is_not_below_nine_tenths_of_them() -> None:
    assert summary([0.1, -0.2, 0.3, -0.9])["p90"] == 0.9
    assert summary([n / 10 for n in range(1, 11)])["p90"] == 0.9


def test_each_part_is_told_when_it_is_there_and_taken_once(capsys: pytest.CaptureFixture[str]) -> None:
    kept, take = Kept(None), Mock(return_value={"bytes": 3})
    assert [part(kept, "llama, full, 1x2", take) for _ in range(2)] == [{"bytes": 3}] * 2
    assert capsys.readouterr().out.splitlines() == ["llama, full, 1x2: 0 s"] * 2
    take.assert_called_once()


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
def test_stages_hold_what_is_estimated_whatever_forms_were_there_before(tmp_path: Path, launcher: Any) -> None:
    """The kernel's count against the estimate's, whose code the ledger shares."""
    path, own = save(config("llama", 6, 256), tmp_path), {"r0": range(4), "r1": range(4, 6)}
    layout = layout_of(str(path), torch.float32)
    pages = WeightPages(layout, PAGE_BYTES["cpu"], KernelTarget.of(torch.device("cpu")))
    with ranks(path, ("full", "int8"), 1, launch=launcher) as (engine, route):
        done(engine.drop(layers={"r0": own["r1"], "r1": own["r0"]}))
        route.spread = True
        for form in ("full", "int8", "full"):
            for rank, layers in own.items():
                engine.apply(
                    rank, elastic.Restore(tuple(layers)) if form == "full" else elastic.Swap(tuple(layers), form)
                )
            serve(engine, at_rest(2))
            for rank, layers in own.items():
                due = pages.fixed + pages.layers(layers, form, 1) + 2 * len(layers)  # a page for each of two instances
                assert held_bytes(engine, rank) == due * PAGE_BYTES["cpu"]


def test_a_rank_that_may_keep_unused_pages_for_keys_and_values_is_refused() -> None:
    """Of 20 MiB that were created and that nobody uses, 8 are among those kept, and 12 are told."""
    mib = 1 << 20
    place = PlaceStatus("cpu", PAGE_BYTES["cpu"], 64 * mib, {"kv": 52 * mib}, 12 * mib, 8 * mib, 4 * mib, 1)
    engine = Mock(look=Mock(return_value=Mock(status=Mock(places=(place,)))))
    with pytest.raises(RuntimeError, match="give its place more memory"):
        held_bytes(engine, "r0")
