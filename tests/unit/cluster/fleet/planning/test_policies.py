"""What `Fleet(policy=)` takes."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.cluster.fleet.planning.policies import FleetPolicies, chosen
from elastic.config import Lengths, Overload
from elastic.errors import ConfigError
from elastic.planning.sharding.share import shares

LATE = Overload(kv_high=0.99)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (None, FleetPolicies()),
        ((), FleetPolicies()),
        ("balance", FleetPolicies(balance=True)),
        ("drop", FleetPolicies(overload=Overload())),
        (LATE, FleetPolicies(overload=LATE)),
        (("drop", "balance"), FleetPolicies(True, Overload())),
        (["balance", LATE], FleetPolicies(True, LATE)),
        (("drop", "lengths"), FleetPolicies(False, Overload(), Lengths())),
    ],
)
def test_policies_by_name_by_their_numbers_and_together(policy: Any, expected: FleetPolicies) -> None:
    assert chosen(policy) == expected


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("scale", "policy='scale' must be 'balance', 'drop', 'lengths', an elastic.Overload"),
        (("balance", None), "policy=('balance', None) must be"),
        (("drop", LATE), "says one of them twice"),
        (("balance", "balance"), "says one of them twice"),
    ],
)
def test_what_is_no_policy_of_a_fleet(policy: Any, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        chosen(policy)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("policy", "shards", "expected"),
    [
        (None, None, 1),
        ("drop", None, 1),
        (None, 2, 2),
        ("lengths", None, 4),
        (Lengths(most_ranks=8), None, 8),
        (Lengths(most_ranks=2), None, 4),
        ("lengths", 2, 2),
    ],
)
def test_layers_are_cut_as_was_said_or_as_a_policy_needs(policy: Any, shards: int | None, expected: int) -> None:
    assert chosen(policy).wrap_options({"variants": ()}, shards) == {"variants": (), "shards": expected}


@pytest.mark.parametrize(
    ("wrap", "shards", "words"),
    [
        ({}, 3, "shards=3 cannot be; it must be a power of two"),
        ({}, 0, "shards=0 cannot be"),
        ({"shards": 4}, None, "say shards=4 of the fleet itself"),
        ({"shards": 4}, 4, "say shards=4 of the fleet itself"),
    ],
)
def test_parts_that_layers_cannot_be_cut_in(wrap: dict[str, Any], shards: int | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        chosen(None).wrap_options(wrap, shards)


@pytest.mark.parametrize(
    ("policy", "shards", "together"),
    [("drop", None, (1, 1)), ("lengths", None, (1, 1)), (None, 2, (1, 1)), (None, None, (2, 1)), (None, None, (1, 2))],
)
def test_ranks_that_share_layers_have_them_plain(policy: Any, shards: int | None, together: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=r"wrap=\{'prepack': True\}: .* are plain; leave it out"):
        chosen(policy).wrap_options({"prepack": True}, shards, shares(*together))
    kept = chosen("balance").wrap_options({"prepack": True}, None)
    assert kept == {"prepack": True, "shards": 1}
