"""A small fleet in simulated time whose ranks compute layers for each other, and what is told of its requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from elastic.cluster.fleet.planning.policies import chosen
from elastic.engines.base import Output, Request
from elastic.planning.pipeline.chunk_cost import ChunkCost
from elastic.sim.core.clock import VirtualClock
from elastic.sim.core.executor import STOP
from elastic.sim.core.fleet import RankModel
from elastic.sim.core.instance import EngineOptions, PlacePages
from elastic.sim.core.threads import SimulatedThreads
from elastic.sim.mechanisms.fleet import ElasticFleet
from elastic.sim.mechanisms.model import LayeredModel, Links, Packed

LAYERS, SECTORS, WEIGHTS, FIXED = 4, 40, 40, 10
"""Sectors that a rank has by itself; pages of a layer's weights, and of what is in no layer."""
BLOCK = 16
COST = ChunkCost(prefix=2e-7, own=1e-7, token=1e-4, chunk=5.5e-2, shared=5e-2)
"""Steps are long, so that runs have few events."""


def model(
    *,
    shards: int = 1,
    kv_shards: int = 1,
    packed: bool = False,
    noise: float = 0.0,
    links: Links | None = None,
    cost: ChunkCost = COST,
    sector_blocks: int = 1,
) -> LayeredModel:
    """A model of which a rank has as many pages of weights as for keys and values; a sector has so many blocks."""
    weights, sector = FIXED + LAYERS * WEIGHTS, LAYERS * kv_shards
    pages = PlacePages(weights + SECTORS * sector, weights, sector, sector_blocks, LAYERS, WEIGHTS)
    rank = RankModel(EngineOptions(BLOCK, 32, 128), pages, cost, noise)
    form = Packed("int4", 0.25, 1.0) if packed else None
    return LayeredModel(rank, shards, kv_shards, 4096, 256, 0.05, links or Links(bytes_s=1e8), form)


@dataclass
class Told:
    """Outputs of a request, as its listener gets them."""

    request: Request
    at_s: float
    outputs: list[Output] = field(default_factory=list)

    def __call__(self, output: Output) -> None:
        self.outputs.append(output)

    @property
    def tokens(self) -> int:
        return sum(len(output.tokens) for output in self.outputs)

    @property
    def finishes(self) -> list[str]:
        return [output.finish for output in self.outputs if output.finish is not None]

    @property
    def ttft_s(self) -> float:
        return self.outputs[0].at_s - self.at_s


@dataclass
class Play:
    """A fleet, and what it is to do."""

    fleet: ElasticFleet
    told: list[Told] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    """Tokens of each step that was not lost."""

    def come(self, requests: Iterable[tuple[float, int, int]]) -> None:
        """Have requests come: (seconds, prompt, answer)."""
        for at_s, prompt, answer in requests:
            request = Request((1,) * prompt, answer, stop_tokens=(STOP,), id=f"q{len(self.told)}")
            self.told.append(Told(request, at_s))
            self.fleet.clock.at(at_s, partial(self.fleet.submit, request, self.told[-1]))

    def run(self, *, more_s: float = 10.0, most_s: float = 600.0) -> None:
        """Have all of them end, and then what the policies do; count pages and blocks now and then."""
        fleet, last = self.fleet, max(told.at_s for told in self.told)
        for rank in fleet.world.ranks.values():
            self._count(rank.instance.scheduler)
        fleet.start()
        while fleet.clock.now < most_s and (fleet.clock.now <= last or fleet.dispatcher.records):
            fleet.threads.run(fleet.clock.now + 0.5)
            fleet.check()
        fleet.threads.run(fleet.clock.now + more_s)
        fleet.check()

    def check_ends(self) -> None:
        """Each request ends once, with all of its tokens."""
        for told in self.told:
            assert told.finishes == ["length"], (told.request.id, told.finishes)
            assert told.tokens == told.request.max_tokens
        assert not self.fleet.dispatcher.records
        assert not self.fleet.failed

    def check_computed(self) -> None:
        """No token is computed twice, but for those that the fleet says."""
        needed = sum(len(told.request.prompt) + told.request.max_tokens - 1 for told in self.told)
        again = sum(rank.instance.recomputed_tokens for rank in self.fleet.world.ranks.values())
        assert sum(self.computed) == needed + again

    def kinds(self) -> list[str]:
        """List what has happened to the fleet."""
        return [event.kind for event in self.fleet.log.events()]

    def _count(self, scheduler: Any) -> None:
        update = scheduler.update

        def counted(step: Any, result: Any) -> Any:
            self.computed.append(sum(len(chunk.tokens) for chunk in step.chunks))
            return update(step, result)

        scheduler.update = counted


def play(policy: Any, ranks: int, *, layered: LayeredModel | None = None, **options: Any) -> Play:
    """Return a fleet that serves by a policy."""
    return Play(ElasticFleet(SimulatedThreads(VirtualClock()), layered or model(), ranks, chosen(policy), **options))


def burst(count: int, *, prompt: int = 64, answer: int = 64, at_s: float = 0.5) -> Sequence[tuple[float, int, int]]:
    """Requests that come together."""
    return [(at_s + 0.01 * number, prompt, answer) for number in range(count)]
