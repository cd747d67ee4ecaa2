"""Orders by rule, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic import ConfigError, Profile
from elastic.quant.sensitivity.order import RULES, contiguous, order, random_order
from elastic.quant.sensitivity.profile_file import ProfileSettings, SearchRound

SETTING = ProfileSettings("int4", {}, 0.25, 0.25, 0.5, False, "float32", ("a", "b"), "", 1, 1)


@given(layers=st.integers(1, 200), seed=st.integers())
def test_every_rule_orders_every_layer_once(layers: int, seed: int) -> None:
    for found in (*(order(rule, layers) for rule in RULES), random_order(layers, seed)):
        assert sorted(found) == list(range(layers))
    block = contiguous(layers)
    for k in range(1, layers + 1):
        assert max(block[:k]) - min(block[:k]) == k - 1
    assert RULES["last_first"](layers) == RULES["front_to_back"](layers)[::-1]
    assert random_order(layers, seed) == random_order(layers, seed)


def test_a_contiguous_block_begins_in_the_middle() -> None:
    assert contiguous(5) == (2, 1, 3, 0, 4)
    assert contiguous(4) == (1, 2, 0, 3)


def test_an_order_is_a_rule_or_a_profile_of_as_many_layers() -> None:
    rounds = (SearchRound(1, {0: 0.5, 1: 1.0}, {0: 0.5, 1: 1.0}), SearchRound(0, {0: 0.5}, {0: 0.5}))
    profile = Profile(SETTING, (1.0, 1.0), (1.0, 1.0), rounds)
    assert order(profile, 2) == (1, 0)
    with pytest.raises(ConfigError, match="orders 2 layers, the model has 3"):
        order(profile, 3)
    with pytest.raises(ConfigError, match="use a profile, or one of front_to_back, last_first, contiguous"):
        order("middle_out", 3)
