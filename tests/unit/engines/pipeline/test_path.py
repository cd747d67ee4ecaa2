"""The path of an instance's steps: every rank's plan of a step fits the others'."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.engines.pipeline.path import LayerPath, StagePlan
from elastic.errors import ConfigError

LAYERS = st.sampled_from([1, 2, 4]).flatmap(
    lambda shards: st.lists(
        st.lists(st.sampled_from("abcd"), min_size=shards, max_size=shards), min_size=1, max_size=8
    ).map(lambda layers: (shards, tuple(rank for layer in layers for rank in layer)))
)
"""Shards of a layer, and the rank of each shard."""


def computes_all(plan: StagePlan) -> bool:
    return not plan.receives and not plan.sends and all(part.whole for part in plan.layers.values())


def test_two_stages() -> None:
    path = LayerPath("a", ("a", "a", "b", "b"))
    first, second = path.plan("a"), path.plan("b")
    assert (first.receives, first.sends, first.last) == ({4: "b"}, {1: ("b",)}, 4)
    assert (second.receives, second.sends, second.last) == ({2: "a"}, {3: ("a",)}, 3)
    assert path.runs == ((("a",), range(2)), (("b",), range(2, 4)))


def test_a_home_that_is_the_second_stage_gets_the_hidden_states_once() -> None:
    path = LayerPath("b", ("a", "a", "b", "b"))
    assert path.plan("a").sends == {1: ("b",)}
    assert path.plan("b").receives == {2: "a"}
    assert not path.plan("a").receives


def test_layers_of_two_ranks_need_no_hidden_states_of_each_other() -> None:
    path = LayerPath("a", ("a", "a", "b", "b") * 2, shards=4)
    for rank, own in (("a", (0, 1)), ("b", (2, 3))):
        plan = path.plan(rank)
        assert not plan.receives
        assert not plan.sends
        assert not computes_all(plan)
        assert [part.own for part in plan.layers.values()] == [own, own]
        assert plan.layers[0].shards == {"a": (0, 1), "b": (2, 3)}
        assert plan.awaited_by() == ({"a": "b", "b": "a"}[rank],)
    assert path.plan("b").last == 1
    assert path.shards_of("b") == (2, 3, 6, 7)


def test_two_ranks_beside_a_pipeline_stage() -> None:
    path = LayerPath("a", ("a", "a", "b", "a", "c", "c"), shards=2)
    assert path.runs == ((("a",), range(1)), (("b", "a"), range(1, 2)), (("c",), range(2, 3)))
    a, b, c = (path.plan(rank) for rank in "abc")
    assert (a.receives, a.sends, a.awaited_by(1)) == ({3: "c"}, {0: ("b",)}, ("b",))
    assert (b.receives, b.sends, b.awaited_by(1)) == ({1: "a"}, {1: ("c",)}, ("a", "c"))
    assert (c.receives, c.sends) == ({2: "b"}, {2: ("a",)})
    assert a.layers[0].whole
    assert not a.layers[1].whole


def test_copies_are_paths_of_their_own_that_begin_and_end_as_one() -> None:
    path = LayerPath("a", ("a",) * 3, epoch=4).with_copies(2)
    assert (path.layers, path.numbers, path.copies, path.epoch) == (3, 3, 2, 5)
    assert path.copies_of(1) == (("a",),)
    split = path.redirected({4: "b", 5: "b"})
    assert split.helpers == ("b",)
    assert split.of_copy(0).ranks == ("a",) * 3
    assert split.of_copy(1).ranks == ("a", "b", "b")
    assert split.copies_of(0) == (("a",),)
    assert split.copies_of(2) == (("a",), ("b",))
    assert split.shards_of("b") == (4, 5)
    own, guest = split.plans("a"), split.plans("b")
    assert own[0] is not None
    assert computes_all(own[0])
    assert own[1] is not None
    assert (own[1].sends, own[1].receives) == ({0: ("b",)}, {3: "b"})
    assert guest[0] is None
    with pytest.raises(ConfigError, match="evict replicas first"):
        split.with_copies(1)
    assert split.redirected({4: "a", 5: "a"}).with_copies(1) == LayerPath("a", ("a",) * 3, epoch=8)
    with pytest.raises(ConfigError, match="copies=2"):
        LayerPath("a", ("a",) * 3, copies=2)


@given(st.sampled_from("abcd"), LAYERS)
def test_what_one_rank_sends_another_receives(home: str, cut: tuple[int, tuple[str, ...]]) -> None:
    shards, ranks = cut
    path = LayerPath(home, ranks, shards=shards)
    plans = {rank: path.plan(rank) for rank in {home, *ranks}}
    sent = {(rank, to, layer + 1) for rank, plan in plans.items() for layer, all_ in plan.sends.items() for to in all_}
    received = {(frm, rank, layer) for rank, plan in plans.items() for layer, frm in plan.receives.items()}
    assert sent == received
    own = sorted(i * shards + p for plan in plans.values() for i, part in plan.layers.items() for p in part.own)
    assert own == list(range(len(ranks)))
    for rank, plan in plans.items():
        assert plan.last == (path.layers if rank == home else max(plan.layers))
        assert computes_all(plan) == (len(plans) == 1)
        for frm in {frm for frm, to, _ in sent if to == rank}:
            assert rank in plans[frm].awaited_by()


@given(st.sampled_from("abcd"), LAYERS)
def test_hidden_states_are_where_they_are_needed(home: str, cut: tuple[int, tuple[str, ...]]) -> None:
    """Walk a step: a rank that computes a layer has, or is given, what the layer before returned."""
    path = LayerPath(home, cut[1], shards=cut[0])
    plans = {rank: path.plan(rank) for rank in {home, *path.ranks}}
    has = dict.fromkeys(plans, 0)  # up to which layer's input a rank's hidden states are
    for layer in range(path.layers + 1):
        before = dict(has)
        for rank in path.holders(layer) if layer < path.layers else (home,):
            if layer in plans[rank].receives:
                assert before[plans[rank].receives[layer]] == layer
                has[rank] = layer
            assert has[rank] == layer
            has[rank] = layer + 1


def test_moved_shards_are_another_epoch() -> None:
    path = LayerPath.alone("a", 3).redirected({1: "b", 2: "b"})
    assert (path.ranks, path.epoch, path.helpers) == (("a", "b", "b"), 1, ("b",))
    with pytest.raises(ConfigError, match="computes no layer"):
        path.plan("c")
    cut = LayerPath.alone("a", 2, shards=2).redirected({1: "b", 3: "b"})
    assert (cut.ranks, cut.shards, cut.layers) == (("a", "b", "a", "b"), 2, 2)
    assert cut.redirected({1: "a", 3: "a"}).ranks == ("a",) * 4


def test_shards_go_to_several_ranks_in_one_epoch() -> None:
    alone = LayerPath.alone("a", 2, shards=4)
    path = alone.redirected({1: "b", 2: "c", 3: "d", 5: "b"})
    assert (path.ranks, path.epoch) == (("a", "b", "c", "d", "a", "b", "a", "a"), 1)
    assert alone.moves_to(path) == (((1, 5), "a", "b"), ((2,), "a", "c"), ((3,), "a", "d"))
    assert path.moves_to(path.redirected({2: "c"})) == ()


def test_a_layer_has_all_of_its_shards() -> None:
    with pytest.raises(ConfigError, match="not those of whole layers of shards=2"):
        LayerPath("a", ("a", "b", "a"), shards=2)


@pytest.mark.parametrize(
    ("ranks", "shards", "stages"),
    [("aaaa", 1, 1), ("aabb", 1, 2), ("abab", 1, 2), ("abca", 1, 3), ("bbbb", 1, 1), ("abab", 2, 1), ("abcd", 2, 2)],
)
def test_stages_are_runs_of_layers_that_no_rank_has_two_of(ranks: str, shards: int, stages: int) -> None:
    assert LayerPath("a", tuple(ranks), shards=shards).stages == stages


def test_a_layer_that_is_shared_with_the_stage_before_is_no_stage() -> None:
    assert LayerPath("a", ("a", "a", "a", "b", "c", "c"), shards=2).stages == 2


def test_shards_of_a_rank_are_looked_for_once_and_a_path_is_sent_without_them() -> None:
    path = LayerPath("a", ("a", "b") * 3, shards=2)
    before = pickle.dumps(path)
    assert [path.shards_of(rank) for rank in "abc"] == [(0, 2, 4), (1, 3, 5), ()]
    assert path.shards_of("b") is path.shards_of("b")
    assert pickle.dumps(path) == before
    assert pickle.loads(before) == path
