"""The banker's sum: enough that all can end, and no less than that."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from hypothesis import example, given
from hypothesis import strategies as st

from elastic.engines.core.admission import AdmissionLedger, Demand

Counts = tuple[int, ...]
DEMANDS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=5)  # (needed, held alone)


def ledger_of(sizes: Sequence[int], demands: Sequence[tuple[Counts, Counts]]) -> tuple[AdmissionLedger, list[Demand]]:
    """A ledger in which these, (needed, held alone) by group, came in this order."""
    ledger = AdmissionLedger(sizes)
    made = [Demand(list(needed), list(held)) for needed, held in demands]
    for demand in made:
        ledger.add(demand)
    return ledger, made


def peak(order: Sequence[Demand], shared: Sequence[frozenset[Demand]] = ()) -> int:
    """Blocks of the first group that must be there beforehand if they end in this order."""
    returned, most = 0, 0
    for i, demand in enumerate(order):
        most = max(most, demand.needed[0] - returned)
        ended = set(order[: i + 1])
        last_ended = [users for users in shared if demand in users and users <= ended]
        returned += demand.held[0] + len(last_ended)
    return most


@given(
    DEMANDS,
    st.lists(st.sets(st.integers(0, 4), min_size=2), max_size=4),
    st.integers(0, 12),
    st.integers(1, 4),
)
def test_it_is_what_the_order_by_need_takes_and_with_no_sharing_the_least_of_all_orders(
    demands: list[tuple[int, int]], sharers: list[set[int]], free: int, size: int
) -> None:
    ledger, made = ledger_of([size], [((needed,), (held,)) for needed, held in demands])
    shared = [frozenset(made[i] for i in users if i < len(made)) for users in sharers]
    shared = [users for users in shared if len(users) > 1]
    for users in shared:
        ledger.share(0, frozenset(), users)
    blocks = peak(sorted(made, key=lambda demand: demand.needed[0]), shared)
    assert ledger.reserved_sectors([free]) == -(-max(0, blocks - free) // size)
    if not shared:
        assert blocks == min(map(peak, permutations(made)))


@given(DEMANDS.filter(bool), st.data())
def test_it_is_the_same_after_changes_as_if_it_had_begun_so(
    demands: list[tuple[int, int]], data: st.DataObject
) -> None:
    ledger, made = ledger_of([2], [((needed,), (held,)) for needed, held in demands])
    for demand in data.draw(st.lists(st.sampled_from(made), max_size=8)):
        ledger.give(demand, [data.draw(st.integers(-demand.held[0], demand.needed[0]))])
    gone = data.draw(st.sampled_from(made))
    ledger.remove(gone)
    left = [((d.needed[0],), (d.held[0],)) for d in made if d is not gone]
    assert ledger.reserved_sectors([0]) == ledger_of([2], left)[0].reserved_sectors([0])


def test_a_block_that_two_share_comes_free_with_the_last_of_them() -> None:
    ledger, (first, last, later) = ledger_of([1], [((1,), (1,)), ((2,), (0,)), ((9,), (0,))])
    ledger.share(0, frozenset((first,)), frozenset((first, last)))
    assert first.held == [0], "it has none alone any more"
    assert ledger.reserved_sectors([2]) == 6, "the one block is back before the third begins: 9 - 2 - 1"
    ledger.share(0, frozenset((first, last)), frozenset((last,)))
    assert last.held == [1]
    assert ledger.reserved_sectors([2]) == 6
    assert later.held == [0]


PAIR = st.tuples(st.integers(0, 4), st.integers(0, 4))


@given(st.lists(st.tuples(PAIR, PAIR), max_size=5), PAIR, st.tuples(st.integers(1, 3), st.integers(1, 3)))
@example([((0, 1), (0, 0)), ((1, 0), (0, 1))], (0, 0), (2, 1))
def test_with_so_many_sectors_all_end_one_after_another(
    demands: list[tuple[Counts, Counts]], free: tuple[int, int], sizes: tuple[int, int]
) -> None:
    ledger, made = ledger_of(sizes, demands)
    blocks, sectors = list(free), ledger.reserved_sectors(free)
    for demand in (
        order := sorted(made, key=lambda demand: demand.weight)
    ):  # a sector stays with the group that took it, so another order may need more
        taken = [-(-max(0, n - b) // s) for n, b, s in zip(demand.needed, blocks, sizes, strict=True)]
        sectors -= sum(taken)
        assert sectors >= 0, f"{demand} of {order} cannot end with {blocks} blocks"
        blocks = [b + t * s + h for b, t, s, h in zip(blocks, taken, sizes, demand.held, strict=True)]
