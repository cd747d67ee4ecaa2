"""A home's end of the logs to other ranks."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest

from elastic.engines.pipeline import stage_link
from elastic.engines.pipeline.items import EndItem, Located
from elastic.engines.pipeline.stage_link import StageLink, all_answers
from elastic.errors import RankLost


class BrokenLog:
    """A log on which something comes that is not whole, once it may."""

    def __init__(self) -> None:
        self.may_come = threading.Event()

    def send(self, message: Any) -> None:
        pass

    def receive(self) -> Any:
        assert self.may_come.wait(10)
        return Located.__new__(Located)

    def close(self) -> None:
        self.may_come.set()


def test_a_rank_whose_log_cannot_be_read_is_lost() -> None:
    """The thread that reads it ended in silence: who had asked waited for as long as an answer may take."""
    log, lost = BrokenLog(), threading.Event()
    link = StageLink("r1", log, (), lost.set)
    log.may_come.set()
    assert lost.wait(10)
    with pytest.raises(RankLost, match="its log has ended"):
        link.answer(10.0)
    with pytest.raises(RankLost, match="it has ended"):
        link.send(EndItem())


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
