"""The path of an instance's steps: every rank's plan of a step fits the others'."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.engines.pipeline.path import LayerPath
from elastic.errors import ConfigError

RANKS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12).map(tuple)


def test_two_stages() -> None:
    path = LayerPath("a", ("a", "a", "b", "b"))
    first, second = path.plan("a"), path.plan("b")
    assert (first.receives, first.sends, first.last) == ({4: "b"}, {1: "b"}, 4)
    assert (second.receives, second.sends, second.last) == ({2: "a"}, {3: "a"}, 3)


def test_a_home_that_is_the_second_stage_gets_the_hidden_states_once() -> None:
    path = LayerPath("b", ("a", "a", "b", "b"))
    assert path.plan("a").sends == {1: "b"}
    assert path.plan("b").receives == {2: "a"}
    assert not path.plan("a").receives


@given(st.sampled_from("abcd"), RANKS)
def test_what_one_rank_sends_another_receives(home: str, ranks: tuple[str, ...]) -> None:
    path = LayerPath(home, ranks)
    plans = {rank: path.plan(rank) for rank in {home, *ranks}}
    sent = {(rank, to, layer + 1) for rank, plan in plans.items() for layer, to in plan.sends.items()}
    received = {(frm, rank, layer) for rank, plan in plans.items() for layer, frm in plan.receives.items()}
    assert sent == received
    assert sorted(layer for plan in plans.values() for layer in plan.layers) == list(range(len(ranks)))
    for rank, plan in plans.items():
        assert plan.last == (len(ranks) if rank == home else max(plan.layers))


@given(st.sampled_from("abcd"), RANKS)
def test_hidden_states_are_where_they_are_needed(home: str, ranks: tuple[str, ...]) -> None:
    """Walk a step: a rank that computes a layer has, or is given, what the layer before returned."""
    path = LayerPath(home, ranks)
    plans = {rank: path.plan(rank) for rank in {home, *ranks}}
    has = dict.fromkeys(plans, 0)  # up to which layer's input a rank's hidden states are
    for layer in range(len(ranks) + 1):
        rank = ranks[layer] if layer < len(ranks) else home
        if layer in plans[rank].receives:
            assert has[plans[rank].receives[layer]] == layer
            has[rank] = layer
        assert has[rank] == layer
        has[rank] = layer + 1


def test_moved_layers_are_another_epoch() -> None:
    path = LayerPath.alone("a", 3).moved((1, 2), "b")
    assert (path.ranks, path.epoch, path.guests) == (("a", "b", "b"), 1, ("b",))
    with pytest.raises(ConfigError, match="computes no layer"):
        path.plan("c")
