"""Verbs wait for the repair of groups that have lost a rank, over ranks that only keep their books."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.records.delivery import Delivery
from elastic.errors import NotFound, StateError
from elastic.planning.arrangement.drop import DropPlan, GroupPlan
from support.cluster.fake_group import LAYERS, GroupRank
from support.cluster.fake_rank import FakeLauncher

FIRST = {"r0": range(3, LAYERS), "r1": range(3)}


@pytest.fixture
def served() -> Iterator[tuple[Fleet, list[GroupRank]]]:
    """Four ranks that none comes in the place of."""
    world: dict[str, GroupRank] = {}
    launcher: Any = FakeLauncher(lambda spec: GroupRank(spec.name, world))
    fleet = Fleet("no model", ranks=4, launch=launcher, beat_timeout_s=1e6, hang_timeout_s=1e6, replace=False)
    fleet.start()
    fleet._policies.stop()
    yield fleet, [world[name] for name in sorted(world)]
    fleet.stop(drain=False)


def recovered(fleet: Fleet) -> list[str]:
    return [event.rank for event in fleet.events() if event.kind == "recovered"]


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


VERBS: dict[str, Callable[[Fleet], Any]] = {
    "drop": lambda fleet: fleet.drop(layers={"r0": range(3, LAYERS), "r2": range(3)}),
    "drop of bytes": lambda fleet: fleet.drop(need=1),
    "restore": lambda fleet: fleet.restore(),
    "restore of a rank": lambda fleet: fleet.restore("r0"),
    "dry run": lambda fleet: fleet.restore(dry_run=True),
    "reshard": lambda fleet: fleet.reshard("r0", tp=1),
    "replicate": lambda fleet: fleet.replicate("r2", [0], "r0"),
    "evict": lambda fleet: fleet.evict("r0"),
    "migrate": lambda fleet: fleet.migrate("r0", [0], "r2"),
    "merge": lambda fleet: fleet.merge("r0", "r2"),
    "capacity": lambda fleet: fleet.capacity([1]),
    "plan": lambda fleet: fleet.plan(1),
}
OTHERS = DropPlan((GroupPlan((0, 1), ("r2", "r3"), ((3, 4, 5), (0, 1, 2)), (range(3, 6), range(3)), 1),), 1)
"""A drop of the ranks that are in no group."""
ASKING: dict[str, Callable[[Fleet], Any]] = {
    **VERBS,
    "budgets": lambda fleet: fleet.budgets(),
    "layer bytes": lambda fleet: fleet.layer_bytes(),
    "look": lambda fleet: fleet.look("r0"),
    "apply": lambda fleet: fleet.apply("r0", ()),
    "check": lambda fleet: fleet.check(),
    "remove": lambda fleet: fleet.remove("r0"),
}


def never_begins(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have repairs wait for an event."""
    repair, begins = fleet._groups.registry._repair, threading.Event()
    monkeypatch.setattr(fleet._groups.registry, "_repair", lambda rank: begins.wait(20) and repair(rank))
    return begins


def that_one_waits(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that is set when a verb waits for a repair."""
    waits, changed = threading.Event(), fleet._groups.registry._changed
    wait_for = changed.wait_for
    monkeypatch.setattr(changed, "wait_for", lambda *args: (waits.set(), wait_for(*args))[1])
    return waits


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_that_comes_before_the_repair_waits_for_it(
    served: tuple[Fleet, list[GroupRank]], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Of a group whose lost rank it does not name: that was a KeyError, and then an error at once."""
    fleet, (a, b, c, _) = served
    fleet.drop(layers=FIRST)
    begins = never_begins(fleet, monkeypatch)
    b.die()
    waits = that_one_waits(fleet, monkeypatch)
    asked = begin(lambda: VERBS[verb](fleet))
    assert waits.wait(20)
    begins.set()
    done = asked.result(20)
    assert getattr(done, "status", "applied") in ("applied", "planned")
    assert recovered(fleet) == ["r0,r1"]
    fleet.restore()
    for rank in (a, c):
        rank.check()


def test_a_verb_that_names_a_lost_rank_says_so(served: tuple[Fleet, list[GroupRank]]) -> None:
    fleet, (_, b, *_) = served
    fleet.drop(layers=FIRST)
    b.die()
    with pytest.raises(NotFound, match="no rank 'r1' that serves; there are: r0, r2, r3"):
        fleet.replicate("r2", [0], "r1")


def test_a_rank_of_which_nobody_knows_yet_that_it_is_lost_holds_up_no_verb(
    served: tuple[Fleet, list[GroupRank]],
) -> None:
    """It ends as the verb asks it the first time."""
    fleet, (a, b, *_) = served
    fleet.drop(layers=FIRST)

    def dies(question: Any) -> Exception:
        b.fails = lambda _: None
        b.die()
        return StateError("it has ended")

    b.fails = dies
    assert fleet.restore().status == "applied"
    assert recovered(fleet) == ["r0,r1"]
    a.check()


def test_a_verb_that_waits_for_a_repair_ends_with_the_fleet(
    served: tuple[Fleet, list[GroupRank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, (_, b, *_) = served
    fleet.drop(layers=FIRST)
    begins = never_begins(fleet, monkeypatch)
    b.die()
    waits = that_one_waits(fleet, monkeypatch)
    restore = begin(fleet.restore)
    assert waits.wait(20)
    stop = begin(lambda: fleet.stop(drain=False))
    with pytest.raises(StateError, match="the fleet ends"):
        restore.result(20)
    begins.set()
    stop.result(20)


def test_a_verb_that_waits_for_a_repair_holds_up_none_of_other_ranks(
    served: tuple[Fleet, list[GroupRank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, (_, b, *_) = served
    fleet.drop(layers=FIRST)
    begins = never_begins(fleet, monkeypatch)
    b.die()
    waits = that_one_waits(fleet, monkeypatch)
    restore = begin(fleet.restore)
    assert waits.wait(20)
    assert begin(lambda: fleet.drop(plan=OTHERS)).result(20).status == "applied"
    assert begin(lambda: fleet.restore("r2")).result(20).status == "applied"
    assert not fleet._groups.verbs.locked()
    begins.set()
    assert restore.result(20).status == "applied"


def test_a_rank_that_is_lost_while_a_verb_waits_for_another_one_is_waited_for_too(
    served: tuple[Fleet, list[GroupRank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, (_, b, *_) = served
    fleet.drop(layers=FIRST)
    begins, settled, settle = never_begins(fleet, monkeypatch), threading.Event(), fleet._groups.registry.settle
    monkeypatch.setattr(fleet._groups.registry, "settle", lambda names: (settle(names), settled.set()))
    with fleet._groups.verbs:
        restore = begin(fleet.restore)
        assert settled.wait(20)
        b.die()
    begins.set()
    assert restore.result(20).status == "applied"
    assert recovered(fleet) == ["r0,r1"]


@pytest.mark.parametrize("verb", ASKING)
def test_a_listener_may_ask_no_rank(
    served: tuple[Fleet, list[GroupRank]], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Its thread is the one that reads the answer: it waited for ever, or for minutes."""
    fleet, ranks = served
    with monkeypatch.context() as listening:
        listening.setattr(Delivery._inside, "depth", 1, raising=False)
        with pytest.raises(StateError, match="by a listener; use another thread"):
            ASKING[verb](fleet)
    assert not any(rank.asked for rank in ranks)
