"""Shares of a model: together they are all of it, each shard once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.errors import ConfigError
from elastic.planning.sharding.share import Share, shares

STAGES = st.one_of(st.integers(1, 4), st.lists(st.integers(1, 5), min_size=1, max_size=4))


@settings(max_examples=50)
@given(st.sampled_from([1, 2, 4]), STAGES, st.sampled_from([4, 8]), st.integers(4, 9))
def test_each_shard_is_in_one_share(tp: int, pp: int | list[int], shards: int, layers: int) -> None:
    count = layers if isinstance(pp, int) else sum(pp)
    each = shares(tp, pp)
    assert {share.ranks for share in each} == {len(each)}
    found = [share.shards_of(count, shards) for share in each]
    assert sorted(shard for own in found for shard in own) == list(range(count * shards))
    assert all(found), "each rank has something to compute"


@pytest.mark.parametrize(
    ("share", "layers", "words"),
    [
        (Share(stages=3), 2, "pp=3: the model has 2 layers"),
        (Share(stages=(1, 2)), 4, r"pp=\(1, 2\): the layers of the stages are not 4"),
        (Share(part=1, parts=4), 4, "tp=4: layers are cut in 2 shards; give shards=4"),
    ],
)
def test_shares_that_do_not_fit_the_model_are_refused(share: Share, layers: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        share.shards_of(layers, 2)
