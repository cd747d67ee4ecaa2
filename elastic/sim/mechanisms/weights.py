"""Weights of a simulated rank: they are dropped, fetched, restored, and swapped to a variant."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from elastic.clock import settle
from elastic.cluster.control.messages import Apply, Look, RuntimeView
from elastic.cluster.control.stage_questions import WeightDigests, WeightsOf
from elastic.errors import CapacityError, ConfigError, RankLost, StateError
from elastic.planning.pipeline.chunk_cost import Chunk
from elastic.planning.sharding.numbers import by_layer, shared_out, whole_layers
from elastic.sim.mechanisms.books import RankBooks
from elastic.sim.mechanisms.instance import RankInstance
from elastic.sim.mechanisms.model import LayeredModel, WeightLocation
from elastic.sim.mechanisms.wires import Wires
from elastic.types import DROPPED, Action, Change, Drop, Fetch, PlanStep, Residency, Restore, Swap

PLACE, FULL = "simulated", "float16"


@dataclass(frozen=True)
class PackedSteps:
    """Seconds of steps of one rank, of whose layers some are in the variant."""

    model: LayeredModel
    packed: int = 0

    def batch(self, chunks: Sequence[Chunk]) -> float:
        """Return the seconds of a batch."""
        variant = self.model.packed
        layers = self.model.layers - self.packed * (1 - (variant.seconds if variant else 1))
        return self.model.parts(chunks).alone_s(layers)


class Weights:
    """Answers `Apply`, `Look` and where weights are."""

    def __init__(self, instance: RankInstance, books: RankBooks, wires: Wires) -> None:
        self._instance, self._books, self._wires, self._model = instance, books, wires, instance.model
        self._waiting: list[tuple[int, ...]] = []  # shards that come when there is room
        self.kept_full: frozenset[int] = frozenset()
        """Layers that are computed in parts: they go to no variant."""

    def answer(self, question: Any) -> Any:
        """Answer. Raises errors of Elastic."""
        match question:
            case WeightsOf(shards):
                if missing := set(shards) - self._books.resident:
                    raise StateError(f"rank {self._books.name!r} has no weights of shards {sorted(missing)}")
                return WeightLocation(self._books.name, frozenset(shards))
            case WeightDigests(shards):
                return {shard: shard for shard in shards}
            case Look():
                return self._look()
            case Apply(actions, _, True):
                return tuple(map(self._planned, actions))
            case Apply((action,), _):
                return self._do(action)
        raise StateError("a simulated rank does one action at a time")

    def retry(self) -> None:
        """Have weights come that waited for pages, if there are some now."""
        waiting, self._waiting = self._waiting, []
        for shards in waiting:
            try:
                self._books.bring(shards)
            except CapacityError:
                self._waiting.append(shards)

    # -- inside

    def _do(self, action: Action) -> Any:
        match action:
            case Drop():
                freed = self._books.drop(action.shards) * self._model.page_bytes
                self._instance.wake()
                layers = tuple(by_layer(action.shards, self._model.shards))
                return (Change("applied", layers, released_bytes=freed),)
            case Fetch():
                sources: tuple[Any, ...] = action.sources
                asked = shared_out(action.shards, {source.rank: source.shards for source in sources})
                return self._bring(action.shards, asked, coordinated=action.coordinated)
            case Restore() if action.shards:
                return self._bring(action.shards, {})
            case Restore():
                return self._pack(action.layers or (), packed=False)
            case Swap():
                if parts := sorted(self.kept_full.intersection(action.layers)):
                    raise StateError(f"layers {parts} are computed in parts with other ranks")
                return self._pack(action.layers, packed=True)
        raise StateError(f"a simulated rank does no {type(action).__name__}")

    def _bring(self, shards: Collection[int], asked: Mapping[str, Collection[int]], *, coordinated: bool = True) -> Any:
        """Have weights come, from several ranks at once or, if none is asked, from the checkpoint; they wait where
        there is no room."""
        layers, new = tuple(by_layer(shards, self._model.shards)), set(shards) - self._books.resident
        try:
            nbytes = self._books.bring(shards) * self._model.page_bytes
        except CapacityError:
            self._waiting.append(tuple(shards))
            return (Change("deferred", (), deferred=layers),)
        done, coming = Future[Any](), set(asked)

        def there(rank: str = "") -> None:
            coming.discard(rank)
            if not coming and not done.done():
                done.set_result((Change("applied", layers, moved_bytes=nbytes),))

        def lose(rank: str) -> None:
            if not done.done():
                self._books.drop(new - self._books.needed)
                done.set_exception(RankLost(f"rank {rank!r} was lost before its weights were here", rank=rank))

        for rank, theirs in asked.items():
            share, ends = nbytes * len(theirs) / len(shards), (rank, self._books.name)
            self._wires.copy(ends, share, partial(there, rank), lost=lose, coordinated=coordinated)
        if not asked:
            self._instance.clock.after(nbytes / self._model.links.checkpoint_bytes_s, there)
        return done

    def _pack(self, layers: Collection[int], *, packed: bool) -> Any:
        """Have layers go to the variant, or back, when their bytes are here."""
        model, books = self._model, self._books
        if model.packed is None:
            raise ConfigError("the ranks have no variants")
        each = model.packed_pages if packed else model.rank.pages.layer_weights
        nbytes = each * len(layers) * model.page_bytes
        done: Future[Any] = Future()

        def switch() -> tuple[Change]:
            freed = books.pack(layers, packed=packed) * model.page_bytes
            count = len(books.packed)
            self._instance.local.cost = PackedSteps(model, count) if count else model.rank.cost
            return (Change("applied", tuple(layers), moved_bytes=nbytes, released_bytes=freed),)

        seconds = nbytes / model.links.checkpoint_bytes_s
        self._instance.clock.after(seconds, lambda: self._instance.between_steps(partial(settle, done, switch)))
        return done

    def _planned(self, action: Action) -> PlanStep:
        if isinstance(action, Drop):
            left = self._model.weight_pages(self._books.resident.difference(action.shards), self._books.packed)
            return PlanStep(action, "applied", 0, self._books.weight_pages() - left, 0, 0.0)
        if not isinstance(action, Swap) or self._model.packed is None:
            raise StateError(f"a simulated rank plans no {type(action).__name__}")
        freed = len(action.layers) * (self._model.rank.pages.layer_weights - self._model.packed_pages)
        moved = len(action.layers) * self._model.packed_pages * self._model.page_bytes
        return PlanStep(action, "applied", moved, freed, 0, 0.0)

    def _look(self) -> RuntimeView:
        model, books = self._model, self._books
        whole = set(whole_layers(books.resident, model.shards))
        homes = {}
        for layer in range(model.layers):
            variant = model.packed.name if model.packed is not None and layer in books.packed else FULL
            homes[str(layer)] = (Residency(PLACE if layer in whole else DROPPED, variant),)
        place = SimpleNamespace(name=PLACE, page_bytes=model.page_bytes)
        status = SimpleNamespace(places=(place,), residencies=homes, layers=model.layers)
        return RuntimeView(status, None, variants=() if model.packed is None else (model.packed.name,))
