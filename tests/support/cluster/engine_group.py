"""Engines of one process that compute each other's layers: joined by logs and by an exchange of hidden states."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from elastic.cluster.control.connection import QueueConnection, queue_pair
from elastic.engines.continuous import ContinuousEngine
from elastic.engines.continuous.layer_exchange import Flipped
from elastic.engines.pipeline.queue_transport import QueueExchange
from support import architectures
from support.serving.tracked_engine import TrackedEngine


def nothing() -> None:
    pass


class EngineGroup:
    """Ranks of equal models, by name; each is a home, and computes layers of others once they are joined."""

    def __init__(self, ranks: str, architecture: str = "llama-gqa", nbytes: int = 4 << 20, **options: Any) -> None:
        self.tracked = {rank: TrackedEngine(architectures.build(architecture), nbytes, **options) for rank in ranks}
        self.exchange = QueueExchange()
        self.logs: dict[tuple[str, str], QueueConnection] = {}
        for rank in ranks:
            self[rank].rank = rank

    def __getitem__(self, rank: str) -> ContinuousEngine:
        return self.tracked[rank].engine

    def join(self, home: str, guest: str, sectors: int | None = None) -> None:
        """Have a rank be ready to compute layers of a home."""
        here, there = queue_pair()
        sectors = self[home].sectors_alone() // 4 if sectors is None else sectors
        end = self.exchange.transport(guest, home)
        self[home].set_cap(sectors)
        while not self[home].cap_reached():
            time.sleep(0.001)
        self[guest].open_stage(home, there, end, self[home].path, sectors)
        if self[home]._home.transport is None:
            self[home].use_transport(self.exchange.transport(home, home))
        self[home].attach_stage(guest, here)
        self.logs[home, guest] = there

    def move(
        self,
        home: str,
        layers: Sequence[int],
        rank: str,
        rounds: int = 2,
        meanwhile: Callable[[], object] = nothing,
    ) -> Flipped:
        """Have another rank compute layers of a home, with copies in rounds while its steps go on."""
        engine = self[home]
        path = engine.path.moved(tuple(layers), rank)
        owner = engine.path.ranks[layers[0]]
        began = engine.begin_exchange(layers)
        try:
            self[rank].prepare_layers(home, layers, began)
            try:
                blocks = None
                for _ in range(rounds):
                    meanwhile()
                    source = engine.layers_kv(layers) if owner == home else self[owner].stage_kv(home, layers)
                    self[rank].copy_layers(home, source, blocks, coordinated=False)
                    blocks = engine.written_blocks()
                if blocks is not None and any(blocks):
                    source = engine.layers_kv(layers) if owner == home else self[owner].stage_kv(home, layers)
                    self[rank].copy_layers(home, source, blocks, coordinated=False)
                return engine.flip(path)
            except BaseException:
                self[rank].give_up_layers(home, layers)
                raise
        finally:
            engine.end_exchange()

    def part(self, home: str) -> None:
        """Have all layers of a home come back to it, and other ranks forget it."""
        engine = self[home]
        for guest in engine.path.guests:
            self.move(home, engine.path.layers_of(guest), home)
        for known, guest in [*self.logs]:
            if known == home:
                engine.detach_stage(guest)
                self[guest].close_stage(home)
                del self.logs[home, guest]
        engine.set_cap(None)

    def lose(self, rank: str) -> None:
        """Have a rank be gone for all others, as when its process was killed."""
        self.exchange.lost(rank)
        for (home, guest), log in [*self.logs.items()]:
            if rank in (home, guest):
                log.close()
                del self.logs[home, guest]

    def check(self) -> None:
        for each in self.tracked.values():
            each.engine.check()
            each.engine.runtime.check()

    def close(self) -> None:
        for each in self.tracked.values():
            each.go_on()
        for each in self.tracked.values():
            each.engine.stop(drain=False)
        for each in self.tracked.values():
            each.close()
