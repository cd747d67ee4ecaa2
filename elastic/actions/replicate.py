"""The actions that have a decoder layer at one more place, and no longer there (CoCoServe, section 3.2).

Bytes are copied from page to page while the layer serves; the safe point lets the layer's runs know of the copy. A
replica is in the variant that its layer is in, and stays so: a layer with replicas is not swapped, released or moved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from elastic.actions.deferred import DeferredActions
from elastic.actions.pages.allocation import WeightPageAllocator
from elastic.actions.pages.copy_plan import pairs
from elastic.actions.release import require_no_gradients
from elastic.errors import ConfigError, StateError
from elastic.hooks.forward_override import dispatches
from elastic.hooks.replicas.dispatcher import ReplicaDispatcher
from elastic.hooks.replicas.layer_copy import LayerCopy
from elastic.hooks.replicas.replica import Replica
from elastic.hooks.replicas.worker import ReplicaWorker
from elastic.memory.copy_engine import CopyBatch, CopyHandle
from elastic.memory.page_pool import PagePool
from elastic.memory.rate_limit import RateLimiter
from elastic.types import Change, Evict, PlanStep, Replicate
from elastic.weights.layer import WeightUnit
from elastic.weights.model import ModelWeights
from elastic.weights.module_groups import merge_units
from elastic.weights.slot_contents import resident_contents

Replicas = Mapping[int, Mapping[str, Replica]]


@dataclass
class PreparedReplication:
    """What an action on replicas will flip."""

    action: Replicate | Evict
    replicas: dict[int, Replica] = field(default_factory=dict)
    """By layer: those that come, or go."""
    before: Replicas | None = None
    """Once committed: the replicas that there were."""

    def let_go(self) -> None:
        self.replicas.clear()


class ReplicateHandler:
    """`Replicate` and `Evict`: check, prepare, commit, roll back, finish."""

    def __init__(
        self,
        weights: ModelWeights,
        modules: Sequence[nn.Module],
        runs: ReplicaDispatcher,
        tenancy: WeightPageAllocator,
        waiting: DeferredActions,
        pace: RateLimiter,
        unsplittable: Collection[int],
        on_copied: Callable[[nn.Module, nn.Module], None],
    ) -> None:
        """`on_copied` hears of a layer and of the module that computes its replica, before that is used."""
        self._weights = weights
        self._modules = [weakref.ref(module) for module in modules]
        self._runs = runs
        self._tenancy = tenancy
        self._waiting = waiting
        self._pace = pace
        self._unsplittable = unsplittable
        self._on_copied = on_copied
        self._replicas: Replicas = {}
        self._workers: dict[str, ReplicaWorker] = {}

    def close(self) -> None:
        """End the threads and give the pages of all replicas back. No forward may be in flight. Can be called twice."""
        while self._workers:
            self._workers.popitem()[1].close()
        gone = [replica for by_place in self._replicas.values() for replica in by_place.values()]
        self._have({})
        for replica in gone:
            self._lose(replica)

    def dry_run(self, action: Replicate | Evict) -> PlanStep:
        """What the action would do now. Raises `CapacityError` if the place has no room for it."""
        if isinstance(action, Evict):
            pages = sum(self._of(layer, action.place).unit.held_pages for layer in self._leaving(action))
            return PlanStep(action, "applied", 0, pages, 0, 0.0)
        units = [self._copy_of(layer, action.place) for layer in self._coming(action)]
        pages = sum(unit.held_pages for unit in units)
        self._tenancy.require_room(action.place, pages)
        return PlanStep(action, "applied", sum(unit.precision.nbytes for unit in units), -pages, pages, 0.0)

    def prepare(self, action: Replicate | Evict) -> PreparedReplication:
        """For replicas that come: pages, and the bytes copied into them."""
        prepared = PreparedReplication(action)
        if isinstance(action, Evict):
            prepared.replicas = {layer: self._of(layer, action.place) for layer in self._leaving(action)}
            return prepared
        copies = CopyBatch()
        try:
            for layer in self._coming(action):
                copies.add(self._replicate(layer, prepared))
            copies.finish()
        except BaseException:
            copies.discard()
            self.rollback(prepared)
            raise
        return prepared

    def commit(self, prepared: PreparedReplication) -> None:
        """Have the layers' runs as they are from now on."""
        if isinstance(prepared.action, Replicate):
            self._require_unwritten(prepared)
        prepared.before, place = self._replicas, prepared.action.place
        after = {layer: dict(by_place) for layer, by_place in self._replicas.items()}
        for layer, replica in prepared.replicas.items():
            if isinstance(prepared.action, Evict):
                del after[layer][place]
            else:
                after.setdefault(layer, {})[place] = replica
        self._have(after)

    def rollback(self, prepared: PreparedReplication) -> None:
        """Have the runs as they were, and give new pages back."""
        if prepared.before is not None:
            self._have(prepared.before)
        if isinstance(prepared.action, Replicate):
            self._give_up(prepared)
        prepared.let_go()

    def finish(self, prepared: PreparedReplication) -> Change:
        """What replicas have left is KV capacity there, but for pages that tensors outside still show."""
        place, done = prepared.action.place, tuple(prepared.replicas)
        pages = sum(replica.unit.held_pages for replica in prepared.replicas.values())
        size = self._tenancy.pool(place).page_bytes
        if isinstance(prepared.action, Evict):
            freed = self._give_up(prepared)
            self._tenancy.settle(place, -pages)
            prepared.let_go()
            return Change("applied", done, (), 0, freed * size, (pages - freed) * size)
        moved = sum(replica.unit.precision.nbytes for replica in prepared.replicas.values())
        self._tenancy.settle(place, pages)
        prepared.let_go()
        return Change("applied", done, (), moved, -pages * size)

    def deferred(self) -> tuple[Replicate | Evict, ...]:
        """Neither is ever deferred: without pages a replica is refused."""
        return ()

    # -- checks

    def _coming(self, action: Replicate) -> list[int]:
        """The layers that have no replica there yet."""
        pool = self._tenancy.pool(action.place)
        layers = [
            i for i in self._weights.layer_indices(action.layers) if action.place not in self._replicas.get(i, {})
        ]
        for layer in layers:
            self._require_replicable(layer, pool)
        return layers

    def _leaving(self, action: Evict) -> list[int]:
        self._tenancy.pool(action.place)
        layers = list(self._weights.layer_indices(action.layers))
        for layer in layers:
            if action.place not in self._replicas.get(layer, {}):
                there = sorted(self._replicas.get(layer, {}))
                name = self._weights.layers[layer].name
                raise StateError(f"{name} has no replica at {action.place}; it has replicas at {there or 'no place'}")
        return layers

    def _require_replicable(self, layer: int, pool: PagePool) -> None:
        units = self._weights.units(layer)
        name = units[0].name
        if layer in self._unsplittable:
            raise ConfigError(
                f"{name} keeps a state that is no KV cache of rows (linear attention, or a cache shared between "
                "layers): it cannot be replicated; choose layers with attention of their own"
            )
        if not any(unit.slots for unit in units):
            raise ConfigError(f"{name} has no weights of its own: others use them too")
        shared = units[0].layer.unpaged.parameters()
        if shared:
            raise ConfigError(
                f"{name} has parameters that are used elsewhere too, or adapters ({shared[0]}): a copy "
                "would not follow what becomes of them; merge the adapters first"
            )
        if any(unit.pool is pool for unit in units):
            raise StateError(f"{name} is at {pool.name} itself; replicate it at another place, or migrate it first")
        if any(unit.absent for unit in units):
            raise StateError(f"{name} is in host memory; restore it before it is replicated")
        if any(self._waiting.has(unit) for unit in units):
            raise StateError(f"{name} waits for pages to be swapped or restored; replicate it when that is done")
        for unit in units:
            require_no_gradients(unit)

    def _require_unwritten(self, prepared: PreparedReplication) -> None:
        for layer, replica in prepared.replicas.items():
            if self._version(layer) != replica.version:
                name = self._weights.layers[layer].name
                raise StateError(f"the weights of {name} were written while they were on their way; try again")

    # -- what is done

    def _copy_of(self, layer: int, place: str) -> WeightUnit:
        """All of a layer, as a unit of a place; nothing is there yet."""
        units = self._weights.units(layer)
        names = {name for unit in units for name in unit.slots}
        return merge_units(units, names, self._tenancy.pool(place))

    def _replicate(self, layer: int, prepared: PreparedReplication) -> CopyHandle:
        """Begin to copy; meanwhile the copy of the module is put over the pages."""
        unit = self._copy_of(layer, prepared.action.place)
        module = self._modules[layer]()
        if module is None:
            raise StateError("the model is gone")
        copied = LayerCopy(module)
        self._on_copied(module, copied.module)
        self._tenancy.take(unit, self._pace)
        prepared.replicas[layer] = Replica(
            unit, copied, self._worker(unit.pool), dispatches(module), self._version(layer)
        )
        copy = self._weights.streamer(unit).copier.copy_async(pairs(unit, self._weights.units(layer)), self._pace)
        copied.put(unit.slots, resident_contents(unit, unit.precision))
        copied.bring_buffers(unit.pool.backend.device)
        return copy

    def _have(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._weights.replicas = {
            layer: tuple(replica.unit for replica in by_place.values())
            for layer, by_place in replicas.items()
            if by_place
        }
        self._runs.set_replicas(replicas)

    def _give_up(self, prepared: PreparedReplication) -> int:
        """Pages of replicas that are no more; returns those that are free now."""
        freed = 0
        while prepared.replicas:
            freed += self._lose(prepared.replicas.popitem()[1])
        return freed

    def _lose(self, replica: Replica) -> int:
        replica.copy.empty()
        pages = self._tenancy.give_up(replica.unit)
        self._tenancy.lend(replica.unit, pages)
        return pages

    def _worker(self, pool: PagePool) -> ReplicaWorker:
        if pool.name not in self._workers:
            self._workers[pool.name] = ReplicaWorker(pool.name, pool.backend.device)
        return self._workers[pool.name]

    def _of(self, layer: int, place: str) -> Replica:
        return self._replicas[layer][place]

    def _version(self, layer: int) -> int:
        return sum(unit.version() for unit in self._weights.units(layer))
