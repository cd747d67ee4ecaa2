"""Copies that let pass what computes: they wait for it, but not for ever, and take as much at once as a part of it."""

from __future__ import annotations

import time

import pytest

from elastic.memory.rate_limit import YieldingPace


class Rank:
    """Computes until it is told to be idle."""

    def __init__(self, stage_s: float) -> None:
        self.stage_s, self.idle = stage_s, True
        self.waited: list[float] = []
        self.pace = YieldingPace(self._wait, lambda: self.stage_s)

    def _wait(self, seconds: float) -> bool:
        self.waited.append(seconds)
        if not self.idle:
            time.sleep(seconds)
        return self.idle


def copy(rank: Rank, seconds: float = 0.0) -> None:
    with rank.pace.copying(1 << 20):
        time.sleep(seconds)


def test_a_chunk_waits_for_what_computes_a_multiple_of_its_own_time_at_the_most() -> None:
    rank = Rank(stage_s=60.0)
    copy(rank, 0.01)
    assert rank.waited == [pytest.approx(60.0, rel=0.01)]  # it is not known what it takes
    rank.idle = False
    for _ in range(2):
        copy(rank, 0.01)
    for waited in rank.waited[1:]:
        assert 0.99 * rank.pace.PATIENCE * 0.01 <= waited < 60.0


def test_hidden_states_that_wait_to_be_sent_go_first() -> None:
    rank, left = Rank(stage_s=60.0), [True] * 3
    rank.pace.sending = lambda: bool(left) and left.pop()
    copy(rank)
    assert not left
    assert len(rank.waited) == 1
    rank.pace.sending = lambda: True
    copy(rank)  # it goes on, although they never go
    assert len(rank.waited) == 1


def test_a_chunk_is_a_part_of_a_stage_at_the_rate_that_was_measured() -> None:
    rank = Rank(stage_s=0.0)
    assert rank.pace.chunk == YieldingPace.LEAST
    copy(rank, 0.01)
    assert rank.pace.chunk == YieldingPace.LEAST
    bytes_per_s = rank.pace._bytes_per_s["copies"]
    assert 0 < bytes_per_s <= (1 << 20) / 0.01
    rank.stage_s = (1 << 20) / bytes_per_s / YieldingPace.SHARE
    assert rank.pace.chunk == pytest.approx(1 << 20, abs=1)
    rank.stage_s = 1e6
    assert rank.pace.chunk == YieldingPace.MOST
    rank.stage_s = (1 << 20) / bytes_per_s / YieldingPace.SHARE
    with rank.pace.copying(1 << 30, "pages"):
        pass
    assert rank.pace.chunk == pytest.approx(1 << 20, abs=1), "pages are made at a rate of their own"


def test_what_is_done_between_two_steps_lasts_a_part_of_a_stage() -> None:
    assert Rank(stage_s=0.0).pace.between_s == YieldingPace.LEAST_S
    assert Rank(stage_s=1.0).pace.between_s == YieldingPace.SHARE
