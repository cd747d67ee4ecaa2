"""Engines of one process that compute each other's layers: joined by logs and by an exchange of hidden states."""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from elastic.cluster.control.connection import QueueConnection, queue_pair
from elastic.cluster.peers.hub import PeerHub
from elastic.engines.base import Request
from elastic.engines.continuous import ContinuousEngine
from elastic.engines.continuous.ranks.layer_exchange import Flipped
from elastic.engines.core.kv_state import KVSource
from elastic.engines.pipeline.path import ShardMove
from elastic.engines.pipeline.written_blocks import Blocks
from elastic.kvcache.storage.guest import GuestMemory
from elastic.memory.backends.shared_file import OpenFile
from support import architectures
from support.pipeline.queue_transport import QueueExchange
from support.serving.generations import Collector, same_unless_close
from support.serving.tracked_engine import TrackedEngine

T = TypeVar("T")


def nothing() -> None:
    pass


def shards_of(parts: range, shards: int, layers: range = range(3)) -> tuple[int, ...]:
    """These parts of these layers, each of so many shards."""
    return tuple(layer * shards + part for layer in layers for part in parts)


def read_file(file: OpenFile, offset: int, nbytes: int) -> bytes:
    """What is in a rank's memory."""
    buffer = ctypes.create_string_buffer(nbytes)
    file.read_into(ctypes.addressof(buffer), offset, nbytes)
    return buffer.raw


def require_plain_tokens(
    heard: dict[str, Collector], prompts: Sequence[list[int]], tokens: int, architecture: str
) -> None:
    """Wait for all requests, and see that each has the plain model's tokens, nearly equal ones apart."""
    model = architectures.build(architecture)
    for told in heard.values():
        told.wait([f"r{number}" for number in range(len(prompts))])
        for number, prompt in enumerate(prompts):
            got = told.tokens[f"r{number}"]
            assert len(got) == tokens, told.ends[f"r{number}"]
            assert same_unless_close(model, prompt, got)


class EngineGroup:
    """Ranks of equal models, by name; each is a home, and computes layers of others once they are joined.

    Those on GPUs read each other's memory over the network: in no file is it.
    """

    def __init__(
        self,
        ranks: str,
        architecture: str = "llama-gqa",
        nbytes: int = 4 << 20,
        devices: Sequence[str] = ("cpu",),
        **options: Any,
    ) -> None:
        """The ranks are on these devices in turn."""
        on = dict(zip(ranks, itertools.cycle(devices), strict=False))
        models = {rank: architectures.build(architecture, device=on[rank]) for rank in ranks}
        self.architecture = architecture
        self.tracked = {rank: TrackedEngine(models[rank], nbytes, **options) for rank in ranks}
        self.exchange = QueueExchange()
        self._left: list[tuple[GuestMemory, Callable[[], None]]] = []
        self.logs: dict[tuple[str, str], QueueConnection] = {}
        self.hubs = {rank: PeerHub(rank, b"key") for rank in ranks if on[rank] != "cpu"}
        for rank in ranks:
            self[rank].rank = rank
        for rank, hub in self.hubs.items():
            hub.meet({name: other.address for name, other in self.hubs.items() if name != rank})
            hub.memory.serve(self[rank].runtime.pools)
            self[rank].ranks.use_peers(hub)

    def __getitem__(self, rank: str) -> ContinuousEngine:
        return self.tracked[rank].engine

    def plain(self) -> Any:
        """Return the model that every rank has, as it is without an engine, on a CPU."""
        return architectures.plain(self.architecture)

    def sectors_alone(self, rank: str) -> int:
        """Count the sectors that the KV cache of a rank could have at the present limit with all layers there."""
        memory = self[rank]._memory
        with memory.lock:
            whole = memory.groups[0]
            return memory.kv.limits.open // (len(whole.group.layers) * whole.layer_pages)

    def join(self, home: str, guest: str, sectors: int | None = None) -> None:
        """Have a rank be ready to compute layers of a home."""
        here, there = queue_pair()
        sectors = self.sectors_alone(home) // 4 if sectors is None else sectors
        end = self.exchange.transport(guest, home)
        self[home].ranks.set_cap(sectors)
        while not self[home].ranks.cap_reached():
            time.sleep(0.001)
        self[guest].stages.open(home, there, end, self[home].path, sectors)
        self[home].ranks.attach(guest, here, self[home]._home.transport or self.exchange.transport(home, home))
        self.logs[home, guest] = there

    def move(
        self,
        home: str,
        layers: Sequence[int],
        rank: str,
        rounds: int = 2,
        meanwhile: Callable[[], object] = nothing,
        *,
        hurried: bool = False,
    ) -> Flipped:
        """Have another rank compute layers of a home, with copies in rounds while its steps go on."""
        return self.move_all(home, dict.fromkeys(layers, rank), rounds, meanwhile, hurried=hurried)

    def move_all(
        self,
        home: str,
        ranks: Mapping[int, str],
        rounds: int = 2,
        meanwhile: Callable[[], object] = nothing,
        *,
        hurried: bool = False,
    ) -> Flipped:
        """Have other ranks compute layers of a home, at one pause of it."""
        engine = self[home]
        path = engine.path.redirected(ranks)
        moves, prepared = engine.path.moves_to(path), dict[str, list[int]]()
        if hurried:
            for each in (home, *ranks.values()):
                self[each].exchange.shorten_steps()
        began = engine.exchange.begin(tuple(ranks))
        try:
            try:
                for rank in dict.fromkeys(ranks.values()):
                    coming = [layer for layer, to in ranks.items() if to == rank]
                    self[rank].exchange.prepare(home, coming, began)
                    prepared[rank] = coming
                blocks = engine.exchange.written_blocks()
                for _ in range(rounds):
                    meanwhile()
                    self._copy(home, moves, blocks)
                    blocks = engine.exchange.written_blocks()
                if any(blocks):
                    self._copy(home, moves, blocks)
                return engine.exchange.flip(path, hurried=hurried)
            except BaseException:
                for rank, coming in prepared.items():
                    self[rank].exchange.give_up(home, coming)
                raise
        finally:
            engine.exchange.end()

    def submit(self, homes: str, prompts: Sequence[list[int]], tokens: int) -> dict[str, Collector]:
        """Submit prompts as r0, r1 and so on at each home; return who hears of them."""
        heard = {home: Collector() for home in homes}
        for home in homes:
            for number, prompt in enumerate(prompts):
                self[home].submit(Request(prompt, tokens, id=f"r{number}"), heard[home])
        return heard

    def record_flips(self, home: str, read: Callable[[], T], monkeypatch: pytest.MonkeyPatch) -> list[tuple[T, T]]:
        """Have a home read something before and after each flip, when nothing is in flight; return the pairs so far."""
        engine, pairs = self[home], list[tuple[T, T]]()
        flip = engine.exchange._flip

        def record(*args: Any, **options: Any) -> bool:
            engine._loop.settle_intact()
            before = read()
            if flipped := flip(*args, **options):
                engine._home.confirm()
                pairs.append((before, read()))
            return flipped

        monkeypatch.setattr(engine.exchange, "_flip", record)
        return pairs

    def _copy(self, home: str, moves: Iterable[ShardMove], blocks: Blocks) -> None:
        for layers, owner, rank in moves:
            source = self[home].kv.locate(layers) if owner == home else self[owner].stages.of(home).layers_kv(layers)
            self[rank].exchange.copy(home, layers, source, blocks, coordinated=False)

    def part(self, home: str) -> None:
        """Have all layers of a home come back to it, and other ranks forget it."""
        engine = self[home]
        if away := [shard for guest in engine.path.helpers for shard in engine.path.shards_of(guest)]:
            self.move_all(home, dict.fromkeys(away, home))
        for known, guest in [*self.logs]:
            if known == home:
                engine.ranks.detach(guest)
                self[guest].stages.close(home)
                del self.logs[home, guest]
        engine.ranks.set_cap(None)

    def lose(self, rank: str) -> None:
        """Have a rank be gone for all others, as when its process was killed."""
        self.exchange.lost(rank)
        for (home, guest), log in [*self.logs.items()]:
            if rank in (home, guest):
                log.close()
                del self.logs[home, guest]

    def kill(self, rank: str) -> dict[str, KVSource]:
        """Have a rank be gone, but what others had of keys and values there stay as it was; return its memory."""
        for stage in self[rank].stages.by_home.values():
            self._left.append((stage.memory, stage.memory.close))
            stage.memory.close = nothing  # type: ignore[method-assign]
        self.lose(rank)
        source = self[rank].reports.kv_source()
        assert source is not None
        return {rank: source}

    def check(self) -> None:
        for each in self.tracked.values():
            each.engine.check()
            each.engine.runtime.check()

    def close(self) -> None:
        for memory, close in self._left:
            memory.close = close  # type: ignore[method-assign]
            close()
        for each in self.tracked.values():
            each.go_on()
        for each in self.tracked.values():
            each.engine.stop(drain=False)
        for hub in self.hubs.values():
            hub.close()
        for each in self.tracked.values():
            each.close()


@contextmanager
def engine_groups() -> Iterator[Callable[..., EngineGroup]]:
    """Yield what makes groups; they are closed and checked at the end."""
    made: list[EngineGroup] = []

    def make(*args: Any, **options: Any) -> EngineGroup:
        made.append(EngineGroup(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
