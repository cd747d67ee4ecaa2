"""Admission by promise: the sum of what requests may need never exceeds what there is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.engines.vllm.kv.admission import PATIENCE, GroupDemand, PromiseLedger


def test_a_window_holds_no_more_than_its_bound() -> None:
    group = GroupDemand(16, most_blocks=3, extra_blocks=1)
    assert [group.blocks(tokens) for tokens in (1, 16, 17, 400)] == [2, 2, 3, 4]


def test_demand_is_bounded_by_the_longest_request() -> None:
    ledger = PromiseLedger([GroupDemand(32), GroupDemand(16)], longest=64, lookahead=5)
    assert ledger.demand(10_000) == ledger.largest == 2 + 4
    assert ledger.demand(28) == 2 + 3, "5 more slots reach into another block"


def test_a_request_that_entered_may_always_come_back() -> None:
    ledger = PromiseLedger([GroupDemand(1)], longest=100)
    ledger.enter("a", 10)
    assert not ledger.may_enter("b", 1, room=10)
    assert ledger.may_enter("a", 10, room=0)


def test_one_that_waits_is_known_until_it_enters_or_leaves() -> None:
    ledger = PromiseLedger([GroupDemand(1)], longest=100)
    assert not ledger.may_enter("a", 7, room=3)
    assert ledger.alone == 7
    ledger.leave("b")
    assert ledger.alone == 7
    ledger.leave("a")
    assert ledger.alone == 0


def test_a_large_request_is_overtaken_no_more_than_a_bounded_number_of_times() -> None:
    ledger = PromiseLedger([GroupDemand(1)], longest=100)
    ledger.enter("s0", 4)
    for number in range(1, 200):  # small ones that come as others end, while a large one asks again and again
        assert not ledger.may_enter("large", 8, room=10)
        if not ledger.may_enter(f"s{number}", 4, room=10):
            break
        ledger.enter(f"s{number}", 4)
        ledger.leave(f"s{number - 1}")
    assert number == PATIENCE + 1
    ledger.leave(f"s{number - 1}")
    assert ledger.may_enter("large", 8, room=10)
    ledger.enter("large", 8)
    ledger.leave("large")
    assert ledger.may_enter("s", 4, room=10)


def test_nothing_is_set_aside_for_a_large_request_that_left() -> None:
    ledger = PromiseLedger([GroupDemand(1)], longest=100)
    ledger.enter("s0", 4)
    assert not ledger.may_enter("large", 8, room=10)
    for number in range(1, PATIENCE + 1):
        ledger.enter(f"s{number}", 4)
        ledger.leave(f"s{number - 1}")
    assert not ledger.may_enter("late", 4, room=10)
    ledger.leave("large")
    assert ledger.may_enter("late", 4, room=10)


def test_without_promises_all_may_enter_and_what_one_needs_is_known() -> None:
    ledger = PromiseLedger([GroupDemand(1)], longest=100, binding=False)
    assert ledger.may_enter("a", 7, room=3)
    assert ledger.alone == 7, "nothing runs, and its prompt may not go in"
    ledger.enter("a", 7)
    ledger.enter("b", 9)
    assert ledger.alone == 9, "it may be preempted until it has them"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40))), st.integers(1, 60))
def test_promises_never_exceed_the_room(calls: list[tuple[int, int]], room: int) -> None:
    ledger = PromiseLedger([GroupDemand(2)], longest=40)
    held: dict[str, int] = {}
    for number, tokens in calls:
        name = str(number)
        if name in held:
            ledger.leave(name)
            del held[name]
        elif ledger.may_enter(name, tokens, room):
            ledger.enter(name, tokens)
            held[name] = ledger.demand(tokens)
        assert ledger.total == sum(held.values()) <= room
        assert ledger._promised.keys() == held.keys()
