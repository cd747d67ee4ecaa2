"""What a fleet does by itself, as `Fleet(policy=)` says it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from elastic.config import Overload
from elastic.errors import ConfigError

FleetPolicy = Literal["balance", "drop"] | Overload
"""`balance`: requests move to where there is room. `drop`, or the numbers of it: layers leave when KV runs out."""


@dataclass(frozen=True)
class FleetPolicies:
    """The policies of a fleet."""

    balance: bool = False
    overload: Overload | None = None

    @property
    def lookahead(self) -> bool:
        """Whether ranks measure what their steps cost before they serve."""
        return self.overload is not None and self.overload.lookahead


def chosen(policy: FleetPolicy | Sequence[FleetPolicy] | None) -> FleetPolicies:
    """Return one policy or several as a record. Raises `ConfigError` for what is none, or is given twice."""
    given = () if policy is None else (policy,) if isinstance(policy, str | Overload) else tuple(policy)
    unknown = [one for one in given if not isinstance(one, Overload) and one not in ("balance", "drop")]
    if unknown:
        raise ConfigError(f"policy={unknown[0]!r} must be 'balance', 'drop', an elastic.Overload, or several of these")
    drops = [Overload() if one == "drop" else one for one in given if one != "balance"]
    if len(drops) > 1 or given.count("balance") > 1:
        raise ConfigError(f"policy={given!r} says one of them twice; 'drop' is Overload() with its defaults")
    overload = drops[0] if drops else None
    assert overload is None or isinstance(overload, Overload)
    return FleetPolicies("balance" in given, overload)
