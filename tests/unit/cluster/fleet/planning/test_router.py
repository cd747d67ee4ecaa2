"""Where a request goes: where the least has to be computed before its answer gets on, then where there is most room."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from elastic.cluster.fleet.planning.router import RoutingCandidate, freeness, route

counts = st.integers(0, 40)
candidates = st.lists(
    st.builds(RoutingCandidate, st.text("abc", min_size=1), counts, st.integers(-20, 200), counts, counts, counts),
    max_size=5,
)


def chosen(*candidates: RoutingCandidate, routing: str = "prefix") -> str | None:
    best = route(candidates, routing)  # type: ignore[arg-type]
    return best.name if best is not None else None


def test_without_candidates_there_is_none() -> None:
    assert chosen() is None


def test_the_freest_is_the_one_with_most_blocks_for_each_sequence() -> None:
    many, few = RoutingCandidate("many", 8, 80), RoutingCandidate("few", 2, 40)
    assert chosen(many, few, routing="freeness") == "few"
    assert freeness(80, 8) < freeness(40, 2)
    assert freeness(-3, 3) < freeness(-2, 1) < freeness(0, 9) < freeness(1, 9)


def test_a_cached_beginning_wins_while_it_saves_more_than_the_request_would_wait() -> None:
    idle = RoutingCandidate("idle", 0, 100)
    assert chosen(RoutingCandidate("cached", 4, 50, cached_blocks=8), idle) == "cached"
    assert chosen(RoutingCandidate("cached", 4, 50, waiting_blocks=5, cached_blocks=8), idle) == "idle"
    assert chosen(RoutingCandidate("cached", 9, 50, cached_blocks=8), idle) == "idle"


def test_equal_costs_go_to_the_freest() -> None:
    assert chosen(RoutingCandidate("a", 2, 10), RoutingCandidate("b", 2, 20)) == "b"


def test_other_policies_look_at_one_thing() -> None:
    a, b = RoutingCandidate("a", 1, 5, given=7), RoutingCandidate("b", 2, 500, cached_blocks=10, given=6)
    assert chosen(a, b, routing="least_load") == "a"
    assert chosen(a, b, routing="round_robin") == "b"


def test_blocks_of_unlike_sizes_count_by_their_tokens() -> None:
    small = RoutingCandidate("small", 0, 100, cached_blocks=8, block_tokens=4)
    large = RoutingCandidate("large", 0, 100, cached_blocks=3, block_tokens=16)
    assert chosen(small, large) == "large"
    assert chosen(small, replace(large, sequences=2)) == "small"


@given(candidates)
def test_none_is_better_than_the_chosen_one(found: list[RoutingCandidate]) -> None:
    def cost(c: RoutingCandidate) -> int:
        return c.waiting_blocks + c.sequences - c.cached_blocks

    best = route(found)
    assert (best is None) == (not found)
    assert best is None or cost(best) == min(map(cost, found))
