"""Of several remedies the cheapest that suffices is chosen; a lossless one where prices are equal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.controller.remedies import EQUAL, Offer, cheapest

OFFERS = st.lists(
    st.builds(
        Offer,
        st.sampled_from(["move", "drop", "swap", "add"]),
        st.floats(-10, 100, allow_subnormal=False),
        st.integers(0, 1000),
        st.booleans(),
    ),
    max_size=5,
)


@given(OFFERS, st.integers(1, 1000))
def test_no_other_that_suffices_is_cheaper(offers: list[Offer], needed: int) -> None:
    choice = cheapest(offers, needed)
    given_ = [offer for offer in offers if offer.relieved_bytes > 0]
    assert (choice is None) == (not given_)
    if choice is None:
        return
    enough = [offer for offer in given_ if offer.relieved_bytes >= needed]
    assert choice.suffices == bool(enough) == (choice.offer in enough)
    lowest = min(offer.seconds for offer in enough) if enough else None
    if lowest is not None:
        assert choice.offer.seconds <= lowest + EQUAL * abs(lowest)
        assert choice.offer.lossless or not any(o.lossless and o.seconds <= choice.offer.seconds for o in enough)
    assert all(str(offer) in choice.words for offer in given_)


def test_a_lossless_remedy_of_equal_price_wins() -> None:
    swap, drop = Offer("swap", 1.0, 100, lossless=False), Offer("drop", 1.04, 100)
    assert cheapest([swap, drop], 50).offer == drop  # type: ignore[union-attr]
    dear = Offer("drop", 1.2, 100)
    choice = cheapest([swap, dear], 50)
    assert choice is not None
    assert choice.offer == swap
    assert choice.words.startswith("50 bytes lack; offered: swap 1 s for 100 bytes with a loss of quality, drop 1.2 s")


def test_where_none_suffices_it_is_the_cheapest_for_its_bytes() -> None:
    small, large = Offer("move", 1.0, 10), Offer("drop", 2.0, 100)
    choice = cheapest([small, large], 1000)
    assert choice is not None
    assert (choice.offer, choice.suffices) == (large, False)


def test_for_a_request_that_fits_no_instance_only_what_makes_it_fit_counts() -> None:
    move, drop = Offer("move", 0.1, 1000), Offer("drop", 0.2, 1000, largest_bytes=300)
    reshard = Offer("reshard", 5.0, 1000, largest_bytes=500)
    choice = cheapest([move, drop, reshard], 100, largest_bytes=400)
    assert choice is not None
    assert choice.offer == reshard
    assert "move" not in choice.words
    assert cheapest([move, drop], 100, largest_bytes=400) is None
    assert cheapest([move, drop, reshard], 100).offer == move  # type: ignore[union-attr]
