"""The banker's sum: enough that all can end, and no less than that."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from hypothesis import example, given
from hypothesis import strategies as st

from elastic.kvcache.storage.admission import RequestDemand, reserved_sectors

CLAIMS = st.lists(
    st.builds(
        RequestDemand,
        st.tuples(st.integers(0, 6)),
        st.tuples(st.integers(0, 6)),
        st.tuples(st.frozensets(st.integers(0, 4), max_size=3)),
    ),
    max_size=5,
)


def peak(order: Sequence[RequestDemand]) -> int:
    """Blocks that must be there beforehand if they end in this order."""
    returned, most = 0, 0
    for i, claim in enumerate(order):
        most = max(most, claim.needed[0] - returned)
        later = frozenset().union(*(other.shared[0] for other in order[i + 1 :]))
        returned += claim.held[0] + len(claim.shared[0] - later)
    return most


@given(CLAIMS, st.integers(0, 12), st.integers(1, 4))
def test_it_is_what_the_order_by_need_takes_and_with_no_sharing_the_least_of_all_orders(
    claims: list[RequestDemand], free: int, size: int
) -> None:
    blocks = peak(sorted(claims, key=lambda claim: claim.needed[0]))
    assert reserved_sectors(claims, [free], [size]) == -(-max(0, blocks - free) // size)
    if not any(claim.shared[0] for claim in claims):
        assert blocks == min(map(peak, permutations(claims)))


PAIRS = st.lists(
    st.builds(
        RequestDemand, st.tuples(st.integers(0, 4), st.integers(0, 4)), st.tuples(st.integers(0, 4), st.integers(0, 4))
    ),
    max_size=5,
)


@given(PAIRS, st.tuples(st.integers(0, 4), st.integers(0, 4)), st.tuples(st.integers(1, 3), st.integers(1, 3)))
@example([RequestDemand((0, 0), (0, 1)), RequestDemand((0, 1), (1, 0))], (0, 0), (2, 1))
def test_with_so_many_sectors_all_end_one_after_another(
    claims: list[RequestDemand], free: tuple[int, int], sizes: tuple[int, int]
) -> None:
    blocks, sectors = list(free), reserved_sectors(claims, free, sizes)
    order = sorted(claims, key=lambda claim: sum(n / s for n, s in zip(claim.needed, sizes, strict=True)))
    for claim in order:  # a sector stays with the group that took it, so another order may need more
        taken = [-(-max(0, n - b) // s) for n, b, s in zip(claim.needed, blocks, sizes, strict=True)]
        sectors -= sum(taken)
        assert sectors >= 0, f"{claim} of {order} cannot end with {blocks} blocks"
        blocks = [b + t * s + h for b, t, s, h in zip(blocks, taken, sizes, claim.held, strict=True)]
