"""What a fleet does by itself, as `Fleet(policy=)` says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from elastic.config import Lengths, Overload
from elastic.errors import ConfigError, is_list
from elastic.planning.sharding.share import Share
from elastic.runtime.options import check_shards

FleetPolicy = Literal["balance", "drop", "lengths"] | Overload | Lengths
"""`balance`: requests move to where there is room. `drop`, or the numbers of it: layers leave when KV runs out.
`lengths`, or the numbers of it: instances share their layers for requests that none of them could hold."""
SHARDS = 4
"""In how many parts each layer is cut for the policy of lengths, unless something else is said."""


@dataclass(frozen=True)
class FleetPolicies:
    """The policies of a fleet."""

    balance: bool = False
    overload: Overload | None = None
    lengths: Lengths | None = None

    @property
    def lookahead(self) -> bool:
        """Whether ranks measure what their steps cost before they serve."""
        return self.overload is not None and self.overload.lookahead

    def wrap_options(
        self, wrap: Mapping[str, Any], shards: int | None, shares: Sequence[Share] = (Share(),)
    ) -> dict[str, Any]:
        """Return the options of `elastic.wrap` in each rank, with layers cut as was said, or as is needed.

        `shares` are those of ranks that begin to serve together. Raises `ConfigError` for `shards` that layers cannot
        be cut in, for those said among the options, for policies that have ranks part, and for prepacked weights where
        ranks share layers.
        """
        parts = shares[0].parts
        if "shards" in wrap:
            raise ConfigError(
                f"wrap={{'shards': {wrap['shards']!r}}}: say shards={wrap['shards']!r} of the fleet itself"
            )
        if len(shares) > 1 and (self.overload or self.lengths):
            raise ConfigError(
                "policy: 'drop' and 'lengths' have ranks share what each has all of, and part again; with tp= or pp= "
                "none has: leave one of them out"
            )
        if wrap.get("prepack") and (self.overload or self.lengths or len(shares) > 1 or (shards or 1) > 1):
            raise ConfigError(
                "wrap={'prepack': True}: ranks that share layers read each other's memory: their weights are plain; "
                "leave it out, or the policies 'drop' and 'lengths', shards=, tp= and pp="
            )
        if shards is None:
            shards = parts if self.lengths is None else max(SHARDS, self.lengths.most_ranks)
        if check_shards(shards) % parts:
            raise ConfigError(f"tp={parts}: layers are cut in {shards} shards; give shards={parts}, or more")
        return {**wrap, "shards": shards}


def chosen(policy: FleetPolicy | Sequence[FleetPolicy] | None) -> FleetPolicies:
    """Return one policy or several as a record. Raises `ConfigError` for what is none, or is given twice."""
    given = () if policy is None else (policy,) if isinstance(policy, str | Overload | Lengths) else policy
    named = {"balance": None, "drop": Overload(), "lengths": Lengths()}
    if not is_list(
        given, lambda each: isinstance(each, Overload | Lengths) or (isinstance(each, str) and each in named)
    ):
        raise ConfigError(
            f"policy={policy!r} must be 'balance', 'drop', 'lengths', an elastic.Overload, an elastic.Lengths, or "
            "several of these"
        )
    meant = [named[each] if isinstance(each, str) else each for each in given]
    overload = [each for each in meant if isinstance(each, Overload)]
    lengths = [each for each in meant if isinstance(each, Lengths)]
    if any(len(same) > 1 for same in (overload, lengths, [each for each in meant if each is None])):
        raise ConfigError(
            f"policy={given!r} says one of them twice; 'drop' is Overload() with its defaults, 'lengths' is Lengths()"
        )
    return FleetPolicies(None in meant, next(iter(overload), None), next(iter(lengths), None))
