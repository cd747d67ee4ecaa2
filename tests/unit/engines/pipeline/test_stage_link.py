"""A home's end of the logs to other ranks."""

from __future__ import annotations

from functools import partial

import pytest

from elastic.engines.pipeline import stage_link
from elastic.engines.pipeline.stage_link import all_answers
from elastic.errors import RankLost


def test_ranks_that_were_asked_together_have_their_time_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is computed meanwhile: two that hang would hold up the others for twice as long."""
    now_s, given = 100.0, []

    def answer(rank: str, hangs: bool, timeout_s: float) -> str:
        nonlocal now_s
        given.append(timeout_s)
        now_s += timeout_s if hangs else 1.0
        if hangs:
            raise RankLost(f"{rank} did not answer", rank=rank)
        return rank

    monkeypatch.setattr(stage_link.time, "monotonic", lambda: now_s)
    asked = [partial(answer, rank, rank in ("r2", "r3")) for rank in ("r1", "r2", "r3", "r4")]
    with pytest.raises(RankLost, match="r2"):
        all_answers(asked, 30.0)
    assert given == [30.0, 29.0, 0.0, 0.0], "the answer of the last is taken all the same, if it is there"
