"""Admission by promise: the sum of what requests may need never exceeds what there is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.engines.vllm.kv.admission import GroupDemand, PromiseLedger


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
    assert ledger.waiting == 7
    ledger.leave("b")
    assert ledger.waiting == 7
    ledger.leave("a")
    assert ledger.waiting == 0


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
        assert ledger.admitted == len(held)
