from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.planning.arrangement.arrangement import Arrangement
from elastic.planning.arrangement.routes import Route, routes
from support.planning.random_arrangements import arrangements, assignments

SPANS = [("x", 3), ("y", 1), ("z", 2)]
X, Y = (("a",),), (("b",),)
BOTH, CUT = (("a",), ("b",)), (("a", "b"),)


def one_boundary(before: tuple, after: tuple, **copies: tuple[int, int]) -> tuple[Route, ...]:  # type: ignore[type-arg]
    arrangement = Arrangement((before, after), before[0][0])
    assignment = {request: copies.get(request, (0, 0)) for request, _ in SPANS}
    return routes(arrangement, assignment, SPANS, 0)


def test_the_patterns_fall_out() -> None:
    assert one_boundary(X, X) == ()
    assert one_boundary(X, Y) == (Route("a", "b", 0, 6),)  # stages
    assert one_boundary(X, BOTH, y=(0, 1), z=(0, 1)) == (Route("a", "b", 3, 6),)  # scatter
    assert one_boundary(BOTH, X, y=(1, 0), z=(1, 0)) == (Route("b", "a", 3, 6),)  # gather
    assert one_boundary(BOTH, CUT, z=(1, 0)) == (Route("a", "b", 0, 4), Route("b", "a", 4, 6))  # all-gather
    assert one_boundary(CUT, BOTH, y=(0, 1)) == ()  # each keeps its span
    assert one_boundary(BOTH, BOTH, y=(1, 1)) == ()


def test_behind_the_last_layer_nothing_goes_anywhere() -> None:
    assert routes(Arrangement((X, Y), "a"), {"x": (0, 0)}, [("x", 3)], 1) == ()


def test_a_rank_of_the_same_host_is_asked_first_and_shards_take_turns() -> None:
    arrangement = Arrangement(((("a", "b"),), (("c", "d"),)), "a")
    given_ = arrangement, {"x": (0, 0)}, [("x", 3)], 0
    assert routes(*given_) == (Route("a", "c", 0, 3), Route("b", "d", 0, 3))
    hosts = {"a": "1", "b": "2", "c": "2", "d": "2"}
    assert routes(*given_, hosts) == (Route("b", "c", 0, 3), Route("b", "d", 0, 3))


@given(st.data())
def test_who_needs_tokens_and_has_not_gets_each_once_from_one_that_has(data: st.DataObject) -> None:
    arrangement = data.draw(arrangements(3))
    requests = [f"r{i}" for i in range(4)]
    assignment = data.draw(assignments(arrangement, requests))
    spans = [(request, data.draw(st.integers(0, 3))) for request in requests]
    owners = [request for request, count in spans for _ in range(count)]
    for layer in range(2):
        found = routes(arrangement, assignment, spans, layer)
        got = [(route.to, token) for route in found for token in range(route.start, route.stop)]
        needed = []
        for token, request in enumerate(owners):
            have = arrangement.layers[layer][assignment[request][layer]]
            need = arrangement.layers[layer + 1][assignment[request][layer + 1]]
            needed += [(rank, token) for rank in need if rank not in have]
            assert all(r.frm in have for r in found if r.start <= token < r.stop and r.to in need)
        assert sorted(got) == sorted(needed)
