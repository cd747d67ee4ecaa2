"""The action that has a layer's weights leave the process, which keeps no copy: others have them. (KunServe, 4.1)

Nothing is read, hashed or copied: what the weights are was noted before, and they come back by that. Where only some
parts of a layer go, their pages are taken out from under it, and the others stay where they are. (AMOEBA, 3.2)
"""

from __future__ import annotations

from elastic.actions.base import ActionHandler
from elastic.actions.deferred import (
    DeferredActions,
    PreparedAction,
    SlotSwitch,
    by_place,
    require_no_gradients,
    retire,
)
from elastic.actions.pages.broker import PageBroker
from elastic.actions.shards.parts import release_parts
from elastic.errors import ConfigError, StateError
from elastic.types import Change, Drop, PlanStep
from elastic.weights.layer import Absence, WeightUnit
from elastic.weights.model import ModelWeights
from elastic.weights.slot_contents import absent_contents


class DropHandler(ActionHandler):
    """`Drop`: check, prepare, commit, roll back, finish."""

    def __init__(self, weights: ModelWeights, broker: PageBroker, deferred: DeferredActions) -> None:
        self._weights = weights
        self._broker = broker
        self._deferred = deferred

    def dry_run(self, action: Drop) -> PlanStep:
        """Return what the action would do now, if the digests of its layers were known. Raises `ConfigError` or
        `StateError` if it cannot be done."""
        leaving = self._check(action, restored=action.after_restore)
        pages = sum(unit.shard_pages.pages(unit.shards_here) - unit.shard_pages.pages(left) for unit, left in leaving)
        return PlanStep(action, "applied", 0, pages, 0, 0.0)

    def prepare(self, action: Drop) -> PreparedAction:
        """Make what sits in the slots of a dropped layer."""
        prepared = PreparedAction(action)
        for unit, left in self._check(action):
            self._require_digests(unit)
            contents = absent_contents(unit, Absence.DROPPED, left)
            prepared.switches.append(SlotSwitch(unit, unit.full, contents, unit.version(), left))
        return prepared

    def commit(self, prepared: PreparedAction) -> None:
        """Switch the slots: from now on the layers cannot be called."""
        prepared.begin_commit()
        for switch in prepared.switches:
            switch.unit.hide(switch.contents, Absence.DROPPED, switch.shards or frozenset())

    def rollback(self, prepared: PreparedAction) -> None:
        """Switch the slots back: the buffers still have everything."""
        prepared.undo()

    def finish(self, prepared: PreparedAction) -> Change:
        """Retire the buffers, or parts: their pages are KV capacity, but for those that tensors outside still show."""
        prepared.drop_contents()
        released = retained = 0
        for place, units in by_place(prepared.units).items():
            pool = units[0].pool
            switches = [switch for switch in prepared.switches if switch.unit in units]
            gone = sum(
                switch.unit.shard_pages.pages(switch.shards_before) - switch.unit.held_pages for switch in switches
            )
            freed = sum(
                release_parts(unit, self._broker) if unit.shards_here else retire(unit, unit.full, self._broker)
                for unit in units
            )
            self._broker.give_to_cache(place, freed)
            released += freed * pool.page_bytes
            retained += (gone - freed) * pool.page_bytes
            pool.notify()
        self._deferred.forget(self._weights.units_of(prepared.action.layers))
        return Change("applied", tuple(unit.index for unit in prepared.units), (), 0, released, retained)

    def _check(self, action: Drop, *, restored: bool = False) -> list[tuple[WeightUnit, frozenset[int]]]:
        """Return the units of which something is dropped, each with the parts that are left.

        `restored`: as if layers in a variant were in their full weights.
        """
        leaving = []
        for layer in (self._weights.layers[index] for index in self._weights.layer_indices(action.layers)):
            gone = layer.layer.parts_in(action.shards)
            if layer.absent is Absence.DROPPED and not gone & layer.shards_here:
                continue
            self._require_its_own(layer)
            if layer.absent is Absence.HOST or (layer.precision.key != layer.full.key and not restored):
                form = "in host memory" if layer.absent else f"in variant {layer.variant!r}"
                raise StateError(f"{layer.name} is {form}; restore it before it is dropped: rt.restore({layer.index})")
            if layer.written:
                raise StateError(
                    f"{layer.name} was written since the model was wrapped: no other process has its weights, so it "
                    "cannot be dropped; unwrap the model and wrap it again in all of them"
                )
            require_no_gradients(layer)
            leaving.append((layer, layer.shards_here - gone))
        return leaving

    def _require_its_own(self, layer: WeightUnit) -> None:
        """Raise for a layer that is not whole and alone at its place."""
        shared = layer.layer.unpaged.parameters()
        if shared or not layer.slots:
            raise ConfigError(
                f"{layer.name} has parameters that are quantized, used elsewhere too, or adapters "
                f"({shared[0] if shared else 'all of them'}): it cannot be dropped; merge adapters before the model "
                "is wrapped, or drop other layers"
            )
        self._weights.require_alone(layer.index)
        apart = next((unit for unit in self._weights.units(layer.index) if unit.part), None)
        if apart is not None:
            raise StateError(
                f"{layer.name}.{apart.part} is at {apart.pool.name}, apart from its layer; migrate the whole layer to "
                "one place before it is dropped"
            )

    def _require_digests(self, layer: WeightUnit) -> None:
        """Raise `StateError` for a layer that nobody could know again when it comes back."""
        if not layer.digests:
            raise StateError(
                f"the digest of {layer.name} is not known, by which its weights are known again when they come back; "
                f"call rt.digests({layer.index}) ahead of the drop"
            )
