"""The machine of groups over ranks whose layers are cut: they share every layer, and part again, besides."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

import elastic
from laws.fleets.fleet_machine import PROMPTS
from laws.fleets.group_machine import PLACES, REFUSALS, SOON_S, GroupMachine, checkpoint
from support import architectures
from support.lossless_variant import HALF, exact
from support.serving.generations import same_unless_close
from support.wrapped_model import small

SHARDS = 4


@cache
def plain(name: str) -> Any:
    return exact(architectures.build(name))


class ShardedMachine(GroupMachine):
    """Sums over ranks round otherwise than one product: of two nearly equal tokens either may come."""

    def wrap(self, name: str, model: Any) -> None:
        self.name = name
        place = small(2 << 20, f"cpu#{next(PLACES)}")
        elastic.wrap(model, places=place, variants=[HALF], checkpoint=checkpoint(name).name, shards=SHARDS)

    def compare(self, answer: str, which: int) -> None:
        request = self.asked[answer.split("/")[0]][1]
        got, end = self.heard.tokens[answer], self.heard.ends[answer]
        assert end.finish == "length" or (end.finish == "cancelled" and request.id in self.cancelled), end
        assert end.finish == "cancelled" or len(got) == request.max_tokens
        assert not got or same_unless_close(plain(self.name), PROMPTS[which], got)

    @rule(data=st.data(), tp=st.sampled_from([1, 2, 4]), several=st.integers(1, 4), most=st.sampled_from([None, 1, 2]))
    def reshard(self, data: Any, tp: int, several: int, most: int | None) -> None:
        names = list(dict.fromkeys(self.any_rank(data) for _ in range(several)))
        with suppress(*REFUSALS):
            done = self.fleet.reshard(names, tp=tp, layers_per_step=most, timeout_s=SOON_S)
            groups = {name: group for group in self.fleet.groups() for name in group.members}
            for name in done.members if done.status == "applied" else ():
                assert (groups[name].tp if name in groups else 1) == tp

    @rule(tp=st.sampled_from([2, 4]))
    def reshard_all(self, tp: int) -> None:
        with suppress(*REFUSALS):
            self.fleet.reshard(self.ranks, tp=tp, timeout_s=SOON_S)
