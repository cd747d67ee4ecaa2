from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import ConfigError
from elastic.planning.arrangement.arrangement import Arrangement, CopyRun, assign
from support.planning.random_arrangements import arrangements

A, B = Arrangement.alone(4, "a"), Arrangement.alone(4, "b")
STAGES = Arrangement(((("a",),),) * 2 + ((("b",),),) * 2, "a", 3)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layers": (), "leader": "a"}, "layers="),
        ({"layers": ((),), "leader": "a"}, "layer 0"),
        ({"layers": ((("a",),), ((),)), "leader": "a"}, "layer 1"),
        ({"layers": (("a",),), "leader": "a"}, "give one tuple of ranks"),
        ({"layers": ((("a",), ("a",)),), "leader": "a"}, "once"),
        ({"layers": ((("a", "a"),),), "leader": "a"}, "once"),
        ({"layers": ((("a", "b", "c"),),), "leader": "a"}, "power of two"),
        ({"layers": ((("a",),),), "leader": "b"}, "leader='b'"),
        ({"layers": ((("a",),),), "leader": "a", "epoch": -1}, "epoch=-1"),
    ],
)
def test_what_is_no_arrangement_is_refused_in_words(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Arrangement(**fields)


@given(arrangements(5))
def test_it_can_be_sent_and_be_a_key(one: Arrangement) -> None:
    other = pickle.loads(pickle.dumps(one))
    assert other == one
    assert {one: 1}[other] == 1
    assert {(i, shards) for i, copies in enumerate(one.layers) for shards in copies} == {
        (i, shards) for run in one.runs() for i in run.layers for shards in run.copies
    }
    assert all(set(one.at(rank)) == {i for i in range(5) if rank in sum(one.layers[i], ())} for rank in one.ranks)


def test_a_merge_is_lockstep_and_a_split_its_reverse() -> None:
    both = Arrangement.merged([A, B])
    assert both.layers == ((("a",), ("b",)),) * 4
    assert (both.leader, both.epoch) == ("a", 1)
    assert both.part(["b"]).layers == B.layers
    assert both.part(["b"]).leader == "b"
    assert both.runs() == (CopyRun(range(4), (("a",), ("b",))),)


def test_a_merge_of_unlike_models_or_with_oneself_is_refused() -> None:
    for instances in ([], [A, Arrangement.alone(5, "b")], [A, A]):
        with pytest.raises(ConfigError):
            Arrangement.merged(instances)


def test_stages_cannot_part_before_layers_return() -> None:
    with pytest.raises(ConfigError, match=r"layers \[2, 3\]"):
        STAGES.part(["a"])
    back = STAGES.changed(range(4), (("a",), ("b",)))
    assert back.epoch == 4
    assert back.part(["a"]).layers == A.layers
    with pytest.raises(ConfigError, match="reshard it first"):
        Arrangement.alone(4, "a", "b").part(["a"])


def test_more_shards_than_cuts_are_refused() -> None:
    four = Arrangement.alone(2, "a", "b", "c", "d")
    four.require_cuts([4, 8])
    with pytest.raises(ConfigError, match=r"layer 1 .* 2 shards at most"):
        four.require_cuts([4, 2])


@given(arrangements(4), st.data())
def test_requests_go_where_their_home_is(one: Arrangement, data: st.DataObject) -> None:
    homes = {f"r{i}": data.draw(st.sampled_from(one.ranks)) for i in range(4)}
    for request, path in assign(one, homes).items():
        for layer, copy in enumerate(path):
            with_home = [i for i, shards in enumerate(one.layers[layer]) if homes[request] in shards]
            assert copy in (with_home or range(len(one.layers[layer])))


def test_without_its_home_a_layer_is_computed_by_the_copy_of_the_same_index() -> None:
    one = Arrangement(((("a",), ("b",)), (("c",), ("d",)), (("e",),)), "a")
    assert assign(one, {"r": "b"}) == {"r": (1, 1, 0)}
    assert assign(one, {"r": "d"}) == {"r": (1, 1, 0)}
    with pytest.raises(ConfigError, match="'x' has no layer"):
        assign(one, {"r": "x"})
