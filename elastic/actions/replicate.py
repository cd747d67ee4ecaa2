"""The actions that have a decoder layer at one more place, and no longer there (CoCoServe, section 3.2).

Bytes are copied from page to page while the layer serves; the safe point tells the replica dispatcher of the copy. A
replica is in the variant that its layer is in, and stays so: a layer with replicas is not swapped, released or moved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from elastic.actions.base import ActionHandler
from elastic.actions.deferred import DeferredActions, require_no_gradients, require_unwritten
from elastic.actions.pages.allocation import WeightPageAllocator, find_pool
from elastic.actions.pages.copy_plan import copy_plan
from elastic.errors import ConfigError, StateError
from elastic.hooks.forward_override import dispatches
from elastic.hooks.replicas.dispatcher import ReplicaDispatcher
from elastic.hooks.replicas.layer_copy import LayerCopy
from elastic.hooks.replicas.replica import Replica
from elastic.hooks.replicas.worker import ReplicaWorker
from elastic.memory.copy_engine import CopyBatch, CopyHandle
from elastic.memory.pages.page_pool import PagePool
from elastic.memory.rate_limit import RateLimiter
from elastic.types import Change, Evict, PlanStep, Replicate
from elastic.weights.layer import Absence, WeightUnit
from elastic.weights.model import ModelWeights
from elastic.weights.module_groups import merge_units
from elastic.weights.proxy.dropped_source import dropped_error
from elastic.weights.slot_contents import resident_contents

Replicas = Mapping[int, Mapping[str, Replica]]


@dataclass
class PreparedReplication:
    """An action on replicas in preparation."""

    action: Replicate | Evict
    replicas: dict[int, Replica] = field(default_factory=dict)
    """The replicas that come, or go, by layer."""
    before: Replicas | None = None
    """The replicas that there were; None before the commit."""


class ReplicateHandler(ActionHandler):
    """`Replicate` and `Evict`: check, prepare, commit, roll back, finish."""

    def __init__(
        self,
        weights: ModelWeights,
        modules: Sequence[nn.Module],
        dispatcher: ReplicaDispatcher,
        allocator: WeightPageAllocator,
        deferred: DeferredActions,
        copy_rate: RateLimiter,
        unsplittable: Collection[int],
        on_copied: Callable[[nn.Module, nn.Module], None],
    ) -> None:
        """`on_copied` hears of a layer and of the module that computes its replica, before that is used."""
        self._weights = weights
        self._modules = [weakref.ref(module) for module in modules]
        self._dispatcher = dispatcher
        self._allocator = allocator
        self._deferred = deferred
        self._copy_rate = copy_rate
        self._unsplittable = unsplittable
        self._on_copied = on_copied
        self._replicas: Replicas = {}
        self._workers: dict[str, ReplicaWorker] = {}

    def close(self) -> None:
        """End the threads and give the pages of all replicas back. No forward may be in flight. Can be called twice."""
        while self._workers:
            self._workers.popitem()[1].close()
        replicas = [replica for by_place in self._replicas.values() for replica in by_place.values()]
        self._set_replicas({})
        for replica in replicas:
            self._free(replica)

    def dry_run(self, action: Replicate | Evict) -> PlanStep:
        """Return what the action would do now. Raises `CapacityError` if the place has no room for it."""
        if isinstance(action, Evict):
            pages = sum(self._replicas[i][action.place].unit.held_pages for i in self._check_evict(action))
            return PlanStep(action, "applied", 0, pages, 0, 0.0)
        units = [self._copied_unit(layer, action.place) for layer in self._check_replicate(action)]
        pages = sum(unit.held_pages for unit in units)
        self._allocator.require_room(action.place, pages)
        return PlanStep(action, "applied", sum(unit.precision.nbytes for unit in units), -pages, pages, 0.0)

    def prepare(self, action: Replicate | Evict) -> PreparedReplication:
        """Take pages for replicas that come, and copy the bytes into them."""
        prepared = PreparedReplication(action)
        if isinstance(action, Evict):
            prepared.replicas = {layer: self._replicas[layer][action.place] for layer in self._check_evict(action)}
            return prepared
        copies = CopyBatch()
        try:
            for layer in self._check_replicate(action):
                copies.handles.append(self._replicate(layer, prepared))
            copies.finish()
        except BaseException:
            copies.discard()
            self.rollback(prepared)
            raise
        return prepared

    def commit(self, prepared: PreparedReplication) -> None:
        """Have batches shared out between the replicas that there are from now on."""
        for layer, replica in prepared.replicas.items():
            if isinstance(prepared.action, Replicate):
                require_unwritten(self._weights.units(layer), replica.version)
        prepared.before, place = self._replicas, prepared.action.place
        after = {layer: dict(by_place) for layer, by_place in self._replicas.items()}
        for layer, replica in prepared.replicas.items():
            if isinstance(prepared.action, Evict):
                del after[layer][place]
            else:
                after.setdefault(layer, {})[place] = replica
        self._set_replicas(after)

    def rollback(self, prepared: PreparedReplication) -> None:
        """Have the replicas as they were, and give new pages back."""
        if prepared.before is not None:
            self._set_replicas(prepared.before)
        if isinstance(prepared.action, Replicate):
            self._free_all(prepared)
        prepared.replicas.clear()

    def finish(self, prepared: PreparedReplication) -> Change:
        """Give the pages of evicted replicas to the KV cache, but for those that tensors outside still show."""
        place, done = prepared.action.place, tuple(prepared.replicas)
        pages = sum(replica.unit.held_pages for replica in prepared.replicas.values())
        size = self._allocator.pools[place].page_bytes
        if isinstance(prepared.action, Evict):
            freed = self._free_all(prepared)
            self._allocator.shares[place].record_resident(-pages)
            prepared.replicas.clear()
            return Change("applied", done, (), 0, freed * size, (pages - freed) * size)
        moved = sum(replica.unit.precision.nbytes for replica in prepared.replicas.values())
        self._allocator.shares[place].record_resident(pages)
        prepared.replicas.clear()
        return Change("applied", done, (), moved, -pages * size)

    # -- checks

    def _check_replicate(self, action: Replicate) -> list[int]:
        """Return the layers that have no replica there yet."""
        pool = find_pool(self._allocator.pools, action.place)
        layers = [
            i for i in self._weights.layer_indices(action.layers) if action.place not in self._replicas.get(i, {})
        ]
        for layer in layers:
            self._require_replicable(layer, pool)
        return layers

    def _check_evict(self, action: Evict) -> list[int]:
        """Return the layers whose replica there is to go. Raises `StateError` for one that has none."""
        find_pool(self._allocator.pools, action.place)
        layers = list(self._weights.layer_indices(action.layers))
        for layer in layers:
            if action.place not in self._replicas.get(layer, {}):
                places = sorted(self._replicas.get(layer, {})) or "no place"
                name = self._weights.layers[layer].name
                raise StateError(f"{name} has no replica at {action.place}; it has replicas at {places}")
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
                f"{name} has parameters that are quantized, used elsewhere too, or adapters ({shared[0]}): a copy "
                "would not follow what becomes of them; merge the adapters first"
            )
        if any(unit.pool is pool for unit in units):
            raise StateError(f"{name} is at {pool.name} itself; replicate it at another place, or migrate it first")
        if units[0].absent is Absence.DROPPED:
            raise dropped_error(name, units[0].index)
        if any(unit.absent for unit in units):
            raise StateError(f"{name} is in host memory; restore it before it is replicated")
        self._deferred.require_settled(units, "replicate")
        for unit in units:
            require_no_gradients(unit)

    # -- replicas

    def _copied_unit(self, layer: int, place: str) -> WeightUnit:
        """Make one unit of all of a layer, for a place; it has no pages yet."""
        units = self._weights.units(layer)
        names = {name for unit in units for name in unit.slots}
        return merge_units(units, names, self._allocator.pools[place])

    def _replicate(self, layer: int, prepared: PreparedReplication) -> CopyHandle:
        """Begin to copy; meanwhile the copy of the module is put over the pages."""
        units, unit = self._weights.units(layer), self._copied_unit(layer, prepared.action.place)
        module = self._modules[layer]()
        if module is None:
            raise StateError("the model is gone")
        copied = LayerCopy(module)
        self._on_copied(module, copied.module)
        place, device = unit.pool.name, unit.pool.backend.device
        worker = self._workers.get(place) or self._workers.setdefault(place, ReplicaWorker(place, device))
        self._allocator.take(unit, self._copy_rate)
        version = sum(unit.version() for unit in units)
        prepared.replicas[layer] = Replica(unit, copied, worker, dispatches(module), version)
        copy = self._weights.streamer(unit).copier.copy_async(copy_plan(unit, units), self._copy_rate)
        copied.put(unit.slots, resident_contents(unit, unit.precision), device)
        return copy

    def _set_replicas(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._weights.replicas = {
            layer: tuple(replica.unit for replica in by_place.values())
            for layer, by_place in replicas.items()
            if by_place
        }
        self._dispatcher.set_replicas(replicas)

    def _free_all(self, prepared: PreparedReplication) -> int:
        """Free the pages of the prepared replicas; return those that are free now."""
        freed = 0
        while prepared.replicas:
            freed += self._free(prepared.replicas.popitem()[1])
        return freed

    def _free(self, replica: Replica) -> int:
        """Free the pages of a replica that is no more; return those that are free now."""
        replica.copy.empty()
        pages = self._allocator.give_up(replica.unit)
        self._allocator.give_to_cache(replica.unit, pages)
        return pages
