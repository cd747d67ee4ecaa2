"""What `Fleet(policy=)` takes."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.cluster.fleet.planning.policies import FleetPolicies, chosen
from elastic.config import Overload
from elastic.errors import ConfigError

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
    ],
)
def test_policies_by_name_by_their_numbers_and_together(policy: Any, expected: FleetPolicies) -> None:
    assert chosen(policy) == expected


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("scale", "policy='scale' must be 'balance', 'drop', 'lengths', an elastic.Overload"),
        (("balance", None), "policy=None must be"),
        (("drop", LATE), "says one of them twice"),
        (("balance", "balance"), "says one of them twice"),
    ],
)
def test_what_is_no_policy_of_a_fleet(policy: Any, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        chosen(policy)
    assert words in str(error.value)
