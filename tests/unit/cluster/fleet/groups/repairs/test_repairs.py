"""A group that has lost a rank goes on at once, whatever other ranks do, over ranks that only keep their books."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.cluster.control.messages import Apply
from elastic.cluster.control.stage_questions import LosePeer, MeasureRoom, OpenPeers, Recover, WeightsOf
from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.groups import registry, verbs
from elastic.cluster.fleet.groups.group import Group
from elastic.cluster.fleet.groups.ranks import Ranks
from elastic.cluster.fleet.records.event_log import EventLog
from elastic.controller.sensors.request_metrics import RequestMetrics
from elastic.engines.base import Request
from elastic.errors import RankLost, StateError
from elastic.types import Change, Fetch
from support.cluster.fake_group import LAYERS, GroupRank
from support.cluster.fake_rank import FakeLauncher
from support.serving.generations import Collector

FIRST = {"r0": range(3, LAYERS), "r1": range(3)}
SECOND = {"r2": range(3, LAYERS), "r3": range(3)}


@pytest.fixture
def served() -> Iterator[tuple[Fleet, list[GroupRank]]]:
    """Four ranks; requests take nothing until a test says so."""
    world: dict[str, GroupRank] = {}
    launcher: Any = FakeLauncher(lambda spec: GroupRank(spec.name, world))
    fleet = Fleet(
        "no model", ranks=4, launch=launcher, beat_timeout_s=1e6, hang_timeout_s=1e6, replace=False, policy=None
    )
    fleet.start()
    fleet._policies.stop()
    yield fleet, [world[name] for name in sorted(world)]
    fleet.stop(drain=False)


def begin(verb: Callable[[], Any]) -> Future[Any]:
    """Have a verb run on a thread of its own."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(verb())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def until(true: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + 20
    while not true():
        assert time.monotonic() < give_up_s
        time.sleep(0.002)


def recovered(fleet: Fleet) -> list[str]:
    return [event.rank for event in fleet.events() if event.kind == "recovered"]


def test_a_group_is_repaired_while_another_waits_for_its_requests(served: tuple[Fleet, list[GroupRank]]) -> None:
    fleet, (a, b, c, d) = served
    assert fleet.drop(layers=FIRST).status == "applied"
    for rank in (c, d):
        rank.fill()
        rank.stuck = True
    drop = begin(lambda: fleet.drop(layers=SECOND, timeout_s=60))
    until(lambda: c.cap is not None)
    b.die()
    until(lambda: recovered(fleet) == ["r0,r1"])
    assert not drop.done(), "the repair has waited for a verb of other ranks"
    assert (a.path.helpers, a.cap, a.resident) == ((), None, set(range(LAYERS)))
    c.stuck = d.stuck = False
    assert drop.result(20).status == "applied"
    assert [group.members for group in fleet.groups()] == [("r2", "r3")]
    assert not any(isinstance(asked, Recover) for rank in (c, d) for asked in rank.asked)
    assert fleet.restore().status == "applied"
    for rank in (a, c, d):
        rank.check()


def test_two_groups_that_lose_a_rank_each_are_both_repaired(served: tuple[Fleet, list[GroupRank]]) -> None:
    fleet, (a, b, c, d) = served
    fleet.drop(layers=FIRST)
    fleet.drop(layers=SECOND)
    met = threading.Barrier(2)

    def meets(question: Any) -> None:
        if isinstance(question, Recover):
            met.wait(20)  # the other group is being repaired, too

    a.fails = c.fails = meets
    for rank in (b, d):
        threading.Thread(target=rank.die).start()
    until(lambda: sorted(recovered(fleet)) == ["r0,r1", "r2,r3"])
    assert fleet.groups() == ()
    for rank in (a, c):
        rank.check()
    assert fleet.drop(layers={"r0": range(3, LAYERS), "r2": range(3)}).status == "applied"


def test_a_verb_waits_for_the_repair_of_its_ranks(
    served: tuple[Fleet, list[GroupRank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, (a, b, c, _) = served
    fleet.drop(layers=FIRST)
    drops, waits, changed = list[Future[Any]](), threading.Event(), fleet._groups.registry._changed
    wait_for = changed.wait_for
    monkeypatch.setattr(changed, "wait_for", lambda *args: (waits.set(), wait_for(*args))[1])

    def also(question: Any) -> None:
        if isinstance(question, Recover):
            drops.append(begin(lambda: fleet.drop(layers={"r0": range(3, LAYERS), "r2": range(3)})))
            assert waits.wait(20)

    a.fails = also
    b.die()
    until(lambda: drops)
    assert drops[0].result(20).status == "applied"
    kinds = [event.kind for event in fleet.events()]
    assert kinds.index("recovered") < len(kinds) - 1 - kinds[::-1].index("dropped")
    for rank in (a, c):
        rank.check()


def test_a_rank_that_waits_for_pages_waits_no_more_when_its_group_has_lost_one(
    served: tuple[Fleet, list[GroupRank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, (a, b, *_) = served
    fleet.drop(layers=FIRST)
    apply, waits = a.on_apply, threading.Event()

    def deferred(question: Apply) -> tuple[Change, ...]:
        if isinstance(question.actions[0], Fetch):
            waits.set()
            return (Change("deferred", (), deferred=(3,)),)
        return apply(question)

    monkeypatch.setattr(a, "on_apply", deferred)
    restore = begin(lambda: fleet.restore(timeout_s=60))
    assert waits.wait(20)
    until(lambda: isinstance(a.asked[-1], MeasureRoom))  # it is asked again and again
    b.die()
    with pytest.raises(RankLost):
        restore.result(20)
    until(lambda: recovered(fleet) == ["r0,r1"])


def test_nobody_is_asked_where_one_of_several_has_gone(served: tuple[Fleet, list[GroupRank]]) -> None:
    """Who was asked, and is not waited for, could still do it while its group is repaired."""
    fleet, (a, b, *_) = served
    b.die()
    asked = len(a.asked)
    with pytest.raises(RankLost):
        fleet._groups.ranks.ask_all({"r0": MeasureRoom("r0"), "r1": MeasureRoom("r1")})
    assert len(a.asked) == asked


def weights_told(rank: GroupRank) -> tuple[Any, ...]:
    """What a rank was told of where the weights are that it lacks."""
    (asked,) = [question for question in rank.asked if isinstance(question, Recover)]
    return asked.weights


def test_a_rank_is_told_who_has_the_weights_that_it_lacks(served: tuple[Fleet, list[GroupRank]]) -> None:
    fleet, (a, b, c, d) = served
    fleet.drop(layers={"r0": range(3, LAYERS), "r1": range(3)})
    c.resident -= {3}
    b.die()
    until(lambda: recovered(fleet) == ["r0,r1"])
    assert weights_told(a) == (((4, 5), ("r2", {4, 5})), ((3,), ("r3", {3})))
    assert (a.path.helpers, a.resident) == ((), set(range(LAYERS)))
    assert not any(isinstance(asked, Recover) for rank in (c, d) for asked in rank.asked)


def test_ranks_of_a_group_are_asked_for_weights_before_others(served: tuple[Fleet, list[GroupRank]]) -> None:
    fleet, (a, b, c, d) = served
    fleet.drop(layers={"r0": range(4), "r1": (*range(2), 4, 5), "r2": range(2, LAYERS)})
    d.asked.clear()
    b.die()
    until(lambda: recovered(fleet) == ["r0,r1,r2"])
    assert weights_told(a) == (((0, 1), ("r2", {0, 1})), ((2, 3), ("r3", {2, 3})))
    assert weights_told(c) == (((4, 5), ("r0", {4, 5})), ((2, 3), ("r3", {2, 3})))
    assert d.asked


def test_a_repair_waits_for_no_rank_that_hangs(served: tuple[Fleet, list[GroupRank]]) -> None:
    fleet, (a, b, c, d) = served
    fleet.drop(layers={"r0": range(3, LAYERS), "r1": range(3)})
    asked = c.ask
    c.ask = lambda question: Future() if isinstance(question, WeightsOf) else asked(question)  # type: ignore[method-assign]
    b.die()
    until(lambda: recovered(fleet) == ["r0,r1"])
    assert weights_told(a) == ()
    assert a.resident == set(range(LAYERS))
    d.check()


def test_a_repair_that_has_a_bug_fences_the_group_and_its_requests_go_on_elsewhere(
    served: tuple[Fleet, list[GroupRank]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fleet, (a, b, c, d) = served
    heard, requests = Collector(), [Request((1, 2, 3), 20) for _ in range(4)]
    for request in requests:
        fleet.submit(request, heard)
    for rank in (a, b, c, d):
        rank.step(2)
    fleet.drop(layers=FIRST)
    assert {fleet.instance_of(request.id) for request in requests} == {"r0", "r1", "r2", "r3"}

    def fails(*_: Any) -> Any:
        raise KeyError("r1")

    monkeypatch.setattr("elastic.cluster.fleet.groups.recovery.find_weights", fails)
    b.die()
    until(lambda: a.lost and fleet.groups() == ())
    for rank in (c, d):
        rank.step(60)
    heard.wait([request.id for request in requests])
    assert {end.finish for end in heard.ends.values()} == {"length"}
    (told,) = [record for record in caplog.records if record.exc_info is not None]
    assert told.getMessage() == "the group r0, r1 could not be repaired without rank r1; its others are fenced"
    assert "KeyError: 'r1'" in next(rank.why for rank in fleet.status().ranks if rank.name == "r0")
    assert fleet.drop(layers=SECOND).status == "applied"


def dispatcher_of(instances: dict[str, Any]) -> Dispatcher:
    """One that has these."""
    dispatcher = Dispatcher("prefix", None, RequestMetrics(), EventLog())
    dispatcher.instances |= instances
    return dispatcher


def test_a_rank_that_goes_while_another_begins_to_listen_is_lost_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is, and nobody is told later where it listened."""
    there = {name: SimpleNamespace(name=name, client=SimpleNamespace(lost=False)) for name in ("r0", "r1")}
    dispatcher = dispatcher_of(there)
    ranks, going = Ranks(dispatcher, "sockets"), list[str]()

    def ask_all(questions: dict[str, Any]) -> dict[str, tuple[str, int]]:
        for rank in going:
            del dispatcher.instances[rank]
            ranks.lose(rank)
        return dict.fromkeys(questions, ("127.0.0.1", 1))

    monkeypatch.setattr(ranks, "ask_all", ask_all)
    assert ranks.listen(["r0"]) == {"r0": ("127.0.0.1", 1)}
    for name in ("r0", "r1"):  # one that listened already, and the one that is asked to
        going[:] = [name]
        with pytest.raises(RankLost, match=name):
            ranks.listen(["r0", "r1"])
        going.clear()
        dispatcher.instances |= there
        assert name not in ranks._addresses
        ranks.listen(["r0"])


def test_those_that_have_met_a_rank_hear_that_it_was_lost_and_no_others() -> None:
    asked: list[tuple[str, Any]] = []

    def rank(name: str) -> Any:
        def ask(question: Any) -> Future[Any]:
            asked.append((name, question))
            answer: Future[Any] = Future()
            answer.set_result(("127.0.0.1", 1) if isinstance(question, OpenPeers) else None)
            return answer

        hello = SimpleNamespace(host="here")
        return SimpleNamespace(name=name, hello=hello, client=SimpleNamespace(lost=False, ask=ask))

    ranks = Ranks(dispatcher_of({name: rank(name) for name in "abcd"}), "sockets")
    ranks.introduce("ab")
    ranks.introduce("ac")
    ranks.lose("d")
    ranks.lose("a")
    assert sorted((name, q.rank) for name, q in asked if isinstance(q, LosePeer)) == [("b", "a"), ("c", "a")]
    ranks.lose("b")
    assert sum(isinstance(question, LosePeer) for _, question in asked) == 2


def test_a_rank_that_is_lost_while_instances_become_a_group_leaves_none_that_nobody_repairs(
    served: tuple[Fleet, list[GroupRank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, (_, b, *_) = served
    shape_of = registry.shape_of
    monkeypatch.setattr(registry, "shape_of", lambda *about: (b.die(), shape_of(*about))[1])
    with pytest.raises(StateError, match="rank 'r1', with which r0 would be one group, was lost"):
        fleet.drop(layers=FIRST)
    assert fleet.groups() == ()
    monkeypatch.undo()
    assert fleet.merge("r0", "r2").members == ("r0", "r2")


def test_a_rank_that_is_lost_while_a_group_is_split_up_is_repaired(
    served: tuple[Fleet, list[GroupRank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group of three came to nothing; the two that were one before are so again."""
    fleet, (_, b, *_) = served
    fleet.merge("r0", "r1")
    close = Group.close

    def lose_one(group: Group) -> None:
        close(group)
        if len(group.members) == 3:
            b.heard_all = True
            b.die()

    def differ(*_: object) -> None:
        raise StateError("other weights")

    monkeypatch.setattr(Group, "close", lose_one)
    monkeypatch.setattr(verbs, "compare_weights", differ)
    with pytest.raises(StateError, match="other weights"):
        fleet.merge("r0", "r2")
    until(lambda: recovered(fleet) == ["r0,r1"])
    assert fleet.groups() == ()


@pytest.mark.parametrize("dry_run", [True, False])
def test_who_still_goes_by_a_rank_that_has_gone_is_named_where_a_drop_is_planned(
    served: tuple[Fleet, list[GroupRank]], dry_run: bool
) -> None:
    """Its group has parted already, and it is about to be by itself, or to end."""
    fleet, (a, *_) = served
    a.path = a.path.redirected({1: "gone"})
    with pytest.raises(
        RankLost, match=r"rank 'r0' goes by rank 'gone', which is not there any more.*try again"
    ) as told:
        fleet.drop(1, dry_run=dry_run)
    assert told.value.rank == "gone"
    with pytest.raises(RankLost, match="being repaired"):
        fleet.drop(layers=FIRST, dry_run=dry_run)
    assert fleet.groups() == ()


def test_a_rank_that_has_the_only_weights_released_is_named_where_they_are_to_be_restored(
    served: tuple[Fleet, list[GroupRank]],
) -> None:
    fleet, (a, b, *_) = served
    assert fleet.drop(layers=FIRST).status == "applied"
    resident = set(a.resident)
    b.fails = lambda question: StateError("layer 3 is released") if isinstance(question, WeightsOf) else None
    a.fails = lambda question: (
        StateError("fetch them from a process that has them") if isinstance(question, Apply) else None
    )
    restored = fleet.restore(timeout_s=1)
    assert restored.status in ("deferred", "partial")
    assert restored.why == "at rank 'r1', whose weights 'r0' needs: layer 3 is released"
    assert a.resident == resident
    a.fails = b.fails = lambda question: None
    assert fleet.restore().status == "applied"
    for rank in (a, b):
        rank.check()
