"""Ranks come, also at the same time: who is refused leaves nothing behind, and no name is there twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic.cluster.control.messages import RankPlace
from elastic.cluster.fleet import membership
from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.instance import Instance
from elastic.cluster.fleet.membership import Membership
from elastic.cluster.fleet.records.event_log import EventLog
from elastic.cluster.rank.spec import RankSpec
from elastic.controller.sensors.request_metrics import RequestMetrics
from elastic.errors import ConfigError, StateError
from support.cluster.fake_rank import MODEL, FakeLauncher, FakeRank


@pytest.fixture
def members() -> Membership:
    log = EventLog()
    return Membership(Dispatcher("prefix", None, RequestMetrics(), log), log)


def join(members: Membership, rank: Any) -> Instance:
    return members.join(rank, RankSpec(rank.hello.name, "no model"), "join")


def test_the_model_of_a_rank_that_is_refused_is_not_the_fleets(members: Membership) -> None:
    refused = FakeRank("r0")
    refused.hello = replace(refused.hello, places=(RankPlace("cpu=2", "cpu", "cpu", 2, 1),))
    with pytest.raises(ConfigError, match="2 bytes together; there are 1"):
        join(members, refused)
    assert members.facts is None
    join(members, FakeRank("r1", model=replace(MODEL, vocabulary=7)))
    with pytest.raises(ConfigError, match="its vocabulary has 1000 tokens, the fleet's 7"):
        join(members, FakeRank("r2"))


def test_a_rank_that_cannot_be_listened_to_is_none_of_the_fleet(members: Membership) -> None:
    class Deaf(FakeRank):
        def listen(self, *_: object) -> None:
            raise StateError("no threads are left")

    deaf = Deaf("r0")
    with pytest.raises(StateError, match="no threads are left"):
        join(members, deaf)
    assert "no threads are left" in deaf.refused
    assert not members.has("r0")
    assert members.facts is None


def test_of_two_that_come_with_one_name_at_the_same_time_one_is_refused(
    members: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = FakeRank("r0"), FakeRank("r0")

    def hold(*_: object) -> None:  # while the memory of the first is opened
        monkeypatch.setattr(membership, "hold_memory", lambda *_: None)
        join(members, second)

    monkeypatch.setattr(membership, "hold_memory", hold)
    with pytest.raises(ConfigError, match="rank 'r0' is there already; choose another name"):
        join(members, first)
    assert members._dispatcher.instances["r0"].client is second
    assert "choose another name" in first.refused


def test_a_rank_without_a_name_gets_one_that_no_other_has() -> None:
    launcher = FakeLauncher(lambda spec: FakeRank("r1" if spec.name == "r0" else ""))
    with Fleet("no model", ranks=2, launch=launcher) as fleet:
        assert {rank.name for rank in fleet.status().ranks} == {"r1", "r2"}
        assert fleet.add() == "r3"
