"""Which requests move: those that give room where it is short; no move undoes another."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from elastic.cluster.fleet.planning.balance import InstanceBooks, Movable, Move, plan_moves
from elastic.cluster.fleet.planning.router import freeness


def books(name: str, *needed: int, total: int = 100, most: int = 8, steady: bool = True) -> InstanceBooks:
    requests = (Movable(f"{name}{i}", max(1, n // 2), n, 1, steady) for i, n in enumerate(needed))
    return InstanceBooks(name, total, tuple(requests), most)


def moved(instances: list[InstanceBooks], move: Move) -> list[InstanceBooks]:
    (request,) = [r for b in instances for r in b.requests if r.request == move.request and b.name == move.source]
    change = {
        move.source: lambda b: replace(b, requests=tuple(r for r in b.requests if r is not request)),
        move.target: lambda b: replace(b, requests=(*b.requests, request)),
    }
    return [change[b.name](b) if b.name in change else b for b in instances]


def test_a_request_leaves_the_least_free_instance_for_the_freest() -> None:
    (move,) = plan_moves([books("a", 40, 40), books("b"), books("c", 40)])
    assert (move.source, move.target) == ("a", "b")


def test_nothing_moves_that_does_not_help() -> None:
    assert plan_moves([books("a", 40)]) == []
    assert plan_moves([books("a", 40), books("b")]) == []
    assert plan_moves([books("a", 30, 30), books("b", 30, 35)]) == []
    assert plan_moves([books("a", 40, 40, steady=False), books("b")]) == []
    assert plan_moves([books("a", 40, 40), books("b", total=39)]) == []
    assert plan_moves([books("a", 40, 40), books("b", most=0)]) == []


def test_of_equal_gains_the_one_that_copies_least_moves() -> None:
    requests = tuple(Movable(f"a{held}", held, 40) for held in (9, 3, 20))
    (move,) = plan_moves([InstanceBooks("a", 130, requests, 8), books("b")])
    assert move.request == "a3"


def test_room_is_made_for_a_long_request_that_fits_nowhere() -> None:
    instances = [books("a", 30, 30), books("b", 10, 40)]
    assert plan_moves(instances, 40) == []  # it fits at one, and is about to go there
    plan = plan_moves(instances, 60)
    assert plan == [Move("b0", "b", "a")]
    assert plan_moves([books("a", 30, 30), books("b", 90)], 60) == []  # not even with moves


def test_room_is_made_by_several_moves_where_one_does_not_do() -> None:
    instances = [books("a", 20, 20, 20), books("b", 45, most=9), books("c", 60)]
    for move in (plan := plan_moves(instances, 75)):
        instances = moved(instances, move)
    assert len(plan) == 2
    assert max(b.free_blocks for b in instances) >= 75


needs = st.lists(st.integers(1, 60), max_size=6)


@settings(max_examples=50)
@given(st.lists(needs, min_size=2, max_size=4))
def test_moves_end_and_the_least_freeness_grows_with_each(needed: list[list[int]]) -> None:
    instances = [books(f"i{i}", *n) for i, n in enumerate(needed)]

    def frees(all_books: list[InstanceBooks]) -> list[float]:
        return sorted(freeness(b.free_blocks, b.sequences) for b in all_books)

    for _ in range(200):
        plan = plan_moves(instances)
        if not plan:
            return
        before, instances = frees(instances), moved(instances, plan[0])
        assert frees(instances) > before
        assert all(len(b.requests) <= b.max_requests for b in instances if b.name == plan[0].target)
    raise AssertionError("moves without an end")


@settings(max_examples=50)
@given(st.lists(needs, min_size=2, max_size=4), st.integers(1, 100))
def test_room_that_is_made_suffices(needed: list[list[int]], wanted: int) -> None:
    instances = [books(f"i{i}", *n) for i, n in enumerate(needed)]
    short = all(b.free_blocks < wanted for b in instances)
    for move in (plan := plan_moves(instances, wanted)):
        (target,) = [b for b in instances if b.name == move.target]
        needed_there = next(r.needed for b in instances for r in b.requests if r.request == move.request)
        assert not short or target.free_blocks >= needed_there
        instances = moved(instances, move)
    assert not (short and plan) or max(b.free_blocks for b in instances) >= wanted


class BalanceMachine(RuleBasedStateMachine):
    """Requests come, grow and go; the planner moves one now and then. None goes back and forth."""

    @initialize(count=st.integers(2, 4))
    def begin(self, count: int) -> None:
        self.instances = [books(f"i{i}") for i in range(count)]
        self.numbers = 0
        self.quiet: dict[str, set[str]] = {}  # where a request has been since something came or went

    @rule(needed=st.integers(1, 60), where=st.integers(0, 3))
    def arrive(self, needed: int, where: int) -> None:
        where %= len(self.instances)
        self.numbers += 1
        there = self.instances[where]
        request = Movable(f"r{self.numbers}", max(1, needed // 2), needed)
        self.instances[where] = replace(there, requests=(*there.requests, request))
        self.quiet.clear()

    @rule(where=st.integers(0, 3))
    def end(self, where: int) -> None:
        where %= len(self.instances)
        there = self.instances[where]
        self.instances[where] = replace(there, requests=there.requests[1:])
        self.quiet.clear()

    @rule(wanted=st.none() | st.integers(1, 100))
    def balance(self, wanted: int | None) -> None:
        self.quiet.clear()
        for _ in range(100):
            plan = plan_moves(self.instances, wanted)
            if not plan:
                return
            been = self.quiet.setdefault(plan[0].request, {plan[0].source})
            assert plan[0].target not in been, "a request went back"
            been.add(plan[0].target)
            self.instances = moved(self.instances, plan[0])
        raise AssertionError("moves without an end")

    @invariant()
    def requests_are_at_one_instance(self) -> None:
        names = [r.request for b in getattr(self, "instances", ()) for r in b.requests]
        assert len(names) == len(set(names))


TestBalanceMachine = BalanceMachine.TestCase
TestBalanceMachine.settings = settings(max_examples=30, stateful_step_count=20)
