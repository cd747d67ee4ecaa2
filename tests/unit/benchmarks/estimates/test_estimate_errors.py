"""Errors of bytes: what one rank holds by itself is not averaged with what several hold."""

from __future__ import annotations

import pytest
from estimate import memory_errors


def test_errors_of_one_rank_and_of_several_are_told_apart() -> None:
    rows = [
        {"tp": 1, "pp": 1, "ours": 90, "measured": 100, "paper": None},
        {"tp": 1, "pp": 2, "ours": 102, "measured": 100, "paper": 150},
        {"tp": 2, "pp": 1, "ours": 99, "measured": 100, "paper": None},
    ]
    told = memory_errors(rows)
    assert told["ours, one rank"] == pytest.approx([-0.1])
    assert told["ours, several ranks"] == pytest.approx([0.02, -0.01])
    assert told["paper, several ranks"] == pytest.approx([0.5])
