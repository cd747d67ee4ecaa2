"""A fleet of two ranks without models, each of which computes half of the layers, for tests of their caps."""

from __future__ import annotations

from typing import Any

from elastic.cluster.control.messages import Submit
from elastic.cluster.fleet.fleet import Fleet
from elastic.engines.base import Request
from support.cluster.fake_group import ALONE, KV, LAYERS, SECTOR, GroupRank
from support.cluster.fake_rank import BLOCK, FakeLauncher
from support.serving.generations import Collector

SECTOR_BLOCKS = SECTOR * 4096 // KV.block_bytes


class HalfGroup:
    """Two ranks with half of the layers each, idle, whose loads say what their caps are.

    `staging`: a third one serves beside them, and all keep room for a layer more.
    """

    def __init__(self, *, staging: bool = False) -> None:
        ranks: dict[str, GroupRank] = {}
        launcher = FakeLauncher(lambda spec: GroupRank(spec.name, ranks))
        options: dict[str, Any] = {"beat_timeout_s": 1e6, "hang_timeout_s": 1e6, "replace": False}
        self.fleet = Fleet("no model", ranks=2 + staging, launch=launcher, **options)
        self.fleet.start()
        self.fleet._policies.stop()  # caps follow what is needed when a test says so
        self.ranks = list(ranks.values())
        self.heard = Collector()
        self.tell()
        if staging:
            self.fleet.keep_staging()
            self.tell()
        assert self.fleet.drop(layers={"r0": range(3, LAYERS), "r1": range(3)}).status == "applied"
        self.tell()

    @property
    def caps(self) -> dict[str, int]:
        (group,) = self.fleet.groups()
        return {home: cap for home, cap in group.caps.items() if cap is not None}

    def tell(self) -> None:
        """Have all ranks say what their limits are, with nothing there."""
        for rank in self.ranks:
            rank.committed = 0
            rank.blocks = (ALONE if rank.cap is None else rank.cap) * SECTOR_BLOCKS
            rank.beat()

    def ask(self, sectors: int, name: str = "large") -> None:
        """Submit a request that needs so many sectors; names of other lengths have other prompts."""
        tokens = sectors * SECTOR_BLOCKS * BLOCK
        self.fleet.submit(Request((1 + len(name),) * (tokens - 4), 4, ignore_eos=True, id=name), self.heard)

    def given(self) -> list[str]:
        return [m.states[0].request.id for rank in self.ranks for m in rank.inbox if isinstance(m, Submit)]
