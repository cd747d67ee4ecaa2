"""The actions that have a layer at its place in a precision: a swap to a variant, a restore or fetch of full weights.

MorphServe, section 3.3. The paper overwrites a layer's memory in place; here each precision has pages of its own, which
are filled while the old one serves, and only the switch waits for the safe point. So a fault before it costs nothing,
and no forward pass reads what is being written.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

from elastic.actions.base import ActionHandler, Layers
from elastic.actions.deferred import (
    Arrival,
    DeferredActions,
    PreparedAction,
    SlotSwitch,
    by_place,
    pages_left,
    pages_needed,
    parts_of,
    precision_after,
    refit_prefetch_buffers,
    require_no_gradients,
    resize_prefetch_buffers,
    retire,
    shards_after,
)
from elastic.actions.fetch import missing_runs, refill, require_source
from elastic.actions.pages.broker import PageBroker
from elastic.actions.shards.parts import claim_parts, give_back_parts
from elastic.errors import CapacityError
from elastic.memory.copy_engine import CopyHandle
from elastic.memory.rate_limit import RateLimiter
from elastic.types import Change, PlanStep
from elastic.weights.layer import Absence, WeightUnit
from elastic.weights.model import ModelWeights
from elastic.weights.precision import LayerPrecision, outdated
from elastic.weights.slot_contents import absent_contents, resident_contents


@dataclass(frozen=True)
class Copying:
    """A copy into the buffer of a switch that was not waited for yet."""

    switch: SlotSwitch
    copy: CopyHandle
    changed: int
    """Tensors that the host had otherwise than the layer."""


@dataclass
class PreparedSwap(PreparedAction):
    """A swap, restore or fetch in preparation."""

    action: Arrival
    copies: list[Copying] = field(default_factory=list)
    """Of the layer that was prepared last: its bytes travel while pages for the next one are mapped."""


class SwapHandler(ActionHandler):
    """`Swap`, `Restore` and `Fetch`: check, prepare, commit, roll back, finish."""

    def __init__(
        self, weights: ModelWeights, broker: PageBroker, deferred: DeferredActions, copy_rate: RateLimiter
    ) -> None:
        self._weights = weights
        self._broker = broker
        self._deferred = deferred
        self.deferred = deferred.actions
        """Those of other handlers, too."""
        self._copy_rate = copy_rate

    def dry_run(self, action: Arrival) -> PlanStep:
        """Return what the action would do if nothing changed until then."""
        chosen = self._check(action)
        fits = all(
            not self._broker.shares[place].shortfall(self._most_needed(units, action))
            for place, units in by_place(chosen).items()
        )
        arriving = sum(pages_needed(unit, action) for unit in chosen)
        moved = sum(_bytes_needed(unit, action) for unit in chosen)
        gained = sum(pages_left(unit, action) for unit in chosen) - arriving
        return PlanStep(action, "applied" if fits else "deferred", moved, gained, arriving, 0.0)

    def prepare(self, action: Arrival) -> PreparedSwap:
        """Take pages for each layer, and copy its bytes into them. Layers without pages are deferred."""
        prepared = PreparedSwap(action)
        units = self._check(action)
        try:
            prepared.prefetch_bytes = self._free_prefetch_buffers([u for u in units if u.absent is Absence.HOST])
            for _, of_layer in groupby(units, lambda unit: unit.index):
                self._prepare_layer(list(of_layer), prepared)
            self._finish_copies(prepared)
        except BaseException:
            self.rollback(prepared)
            raise
        return prepared

    def layers(self, prepared: PreparedSwap) -> Layers:
        """Return the layers that have pages."""
        return tuple(dict.fromkeys(unit.index for unit in prepared.units))

    def shorten(self, prepared: PreparedSwap, layers: Layers) -> None:
        """Defer those that are not among `layers`: their pages did not suffice on another rank."""
        dropped = [switch for switch in prepared.switches if switch.unit.index not in layers]
        self._drop(dropped)
        prepared.switches = [switch for switch in prepared.switches if switch.unit.index in layers]
        prepared.deferred = [*(switch.unit for switch in dropped), *prepared.deferred]

    def require_complete(self, prepared: PreparedSwap) -> None:
        """Raise `CapacityError` for layers that have found no pages."""
        if prepared.deferred:
            waiting = sorted({unit.index for unit in prepared.deferred})
            pages = sum(pages_needed(unit, prepared.action) for unit in prepared.deferred)
            raise prepared.deferred[0].pool.shortage(
                f"layers {waiting} find no pages now, so that nothing was prepared; prepare fewer, try again when "
                "generations have ended, or apply the action, which defers them",
                pages,
            )

    def commit(self, prepared: PreparedSwap) -> None:
        """Switch the slots to their new buffers."""
        prepared.begin_commit()
        for switch in prepared.switches:
            if switch.shards is None or switch.shards == switch.unit.every:
                switch.unit.show(switch.contents, switch.precision)
            else:
                switch.unit.hide(switch.contents, Absence.DROPPED, switch.shards)

    def rollback(self, prepared: PreparedSwap) -> None:
        """Switch the slots back, and give the pages back."""
        for copying in prepared.copies:
            copying.copy.settle()
        prepared.copies.clear()
        prepared.undo()
        self._drop(prepared.switches)
        refit_prefetch_buffers(self._weights, self._weights.units_of(prepared.action.layers), self._broker)
        prepared.switches.clear()

    def finish(self, prepared: PreparedSwap) -> Change:
        """Retire the old buffers, drop what prefetch buffers have of the layers, and note what is deferred."""
        prepared.drop_contents()
        gained, retained = prepared.prefetch_bytes, 0
        for place, units in by_place([*prepared.units, *prepared.deferred]).items():
            size = units[0].pool.page_bytes
            switches = [switch for switch in prepared.switches if switch.unit in units]
            freed, kept = self._retire_old(switches)
            freed += resize_prefetch_buffers(self._weights, place)
            self._broker.give_to_cache(place, freed)
            gained += (freed - sum(switch.pages for switch in switches)) * size
            retained += kept * size
        self._deferred.replace(self._weights.units_of(prepared.action.layers), prepared.deferred, prepared.action)
        for units in by_place(prepared.units).values():
            units[0].pool.notify()
        done = tuple(dict.fromkeys(unit.index for unit in prepared.units))
        deferred = tuple(dict.fromkeys(unit.index for unit in prepared.deferred))
        return Change("deferred" if deferred else "applied", done, deferred, prepared.moved_bytes, gained, retained)

    def _check(self, action: Arrival) -> list[WeightUnit]:
        """Return the units to be switched. Raises `CapacityError` if a place could not hold them even with no cache."""
        units = []
        for unit in self._weights.units_of(action.layers):
            self._weights.parameters_under(unit.index, parts_of(action))
            after = shards_after(unit, action)
            if after is not None and after == unit.shards_here:
                continue
            if unit.absent is Absence.DROPPED:
                require_source(unit, action, unit.every if after is None else after)
            if unit.absent or precision_after(unit, action).key != unit.precision.key:
                require_no_gradients(unit)
                self._weights.require_alone(unit.index)
                if precision_after(unit, action) is not unit.full:
                    self._weights.require_not_in_parts(unit.index)
                if unit.written:
                    _require_renewable(unit, precision_after(unit, action))
                units.append(unit)
        for place, at_place in by_place(units).items():
            self._require_room(place, at_place, action)
        return units

    def _require_room(self, place: str, units: list[WeightUnit], action: Arrival) -> None:
        arriving = sum(pages_needed(unit, action) for unit in units)
        returning = [unit for unit in units if unit.absent is Absence.HOST]
        saved = self._prefetch_buffers_after(place, returning, least=self._weights.streamers[place].fewest)[1]
        growth = arriving - sum(pages_left(unit, action) for unit in units) - saved
        room = self._broker.shares[place].claimable()
        if growth > room:
            raise units[0].pool.shortage(
                f"place {place} has no room for {len(units)} more layers beside its KV cache; restore fewer, lower "
                "the KV limit, or give it a larger budget",
                growth,
                room,
            )

    def _prefetch_buffers_after(self, place: str, returning: list[WeightUnit], least: int) -> tuple[int, int]:
        """Count the prefetch buffers that the place needs when these units are back, and the pages that saves."""
        streamer = self._weights.streamers[place]
        staying = self._weights.streamed(place) - len(returning)
        count = min(len(streamer.buffers), max(least, staying))
        return count, (len(streamer.buffers) - count) * streamer.buffer_pages

    def _prepare_layer(self, units: list[WeightUnit], prepared: PreparedSwap) -> None:
        """Prepare all units of one layer, or none."""
        first = len(prepared.switches)
        for unit in units:
            switch = SlotSwitch(
                unit, precision_after(unit, prepared.action), {}, unit.version(), shards_after(unit, prepared.action)
            )
            if prepared.deferred or not self._take_pages(switch):
                self._drop(prepared.switches[first:])
                del prepared.switches[first:]
                prepared.deferred += units
                return
            prepared.switches.append(switch)
        self._finish_copies(prepared)
        for switch in prepared.switches[first:]:
            if switch.unit.absent is Absence.DROPPED and switch.precision is switch.unit.full:
                self._refill(switch, prepared)
            else:
                self._fill(switch, prepared)

    def _drop(self, switches: list[SlotSwitch]) -> None:
        """Give the pages of new buffers back."""
        self._deferred.give_back(switch.unit for switch in switches)
        for switch in reversed(switches):
            if switch.shards is not None:
                give_back_parts(switch.unit, switch.shards, self._broker)
            else:
                self._broker.give_to_cache(switch.unit.pool.name, retire(switch.unit, switch.precision, self._broker))
            switch.unit.pool.notify()

    def _take_pages(self, switch: SlotSwitch) -> bool:
        """Fill the precision's buffer with pages: of the KV cache, or as many as it gives up of the reserve."""
        unit, precision, take = switch.unit, switch.precision, partial(self._deferred.take, [switch.unit])
        if switch.shards is not None:
            taken = None
            try:
                taken = claim_parts(unit, switch.shards, self._broker, take)
            finally:
                if taken is None:
                    self._deferred.give_back([unit])
            switch.pages = taken or 0
            return taken is not None
        pages, place = unit.pages_in(precision), unit.pool.name
        from_reserve = self._from_reserve(unit, precision)
        taken = next((n for n in (pages, pages - from_reserve) if take(n)), None)
        if taken is None:
            return False
        reserved = pages - taken
        try:
            with self._broker.reserves[place].opened(reserved) if reserved else nullcontext():
                unit.block_for(precision).allocate(unit.owner)
        except BaseException as error:
            self._deferred.give_back([unit])
            self._broker.give_to_cache(place, taken)
            if not isinstance(error, CapacityError) or unit.pool.free_pages >= pages:
                raise
            return False  # another model has the pages
        switch.pages = pages
        return True

    def _from_reserve(self, unit: WeightUnit, precision: LayerPrecision) -> int:
        """Count the pages of the reserve that a unit may have: no more than its old precision gives back."""
        reserve = self._broker.reserves.get(unit.pool.name)
        return min(reserve.ready, unit.held_pages, unit.pages_in(precision)) if reserve else 0

    def _most_needed(self, units: list[WeightUnit], action: Arrival) -> int:
        """Return the most pages that caches are asked for when these units switch one after another."""
        most = grown = 0
        for unit in units:
            pages, whole = pages_needed(unit, action), shards_after(unit, action) is None
            reserved = self._from_reserve(unit, precision_after(unit, action)) if whole else 0
            most = max(most, grown + pages - reserved)
            grown += pages - pages_left(unit, action)
        return most

    def _refill(self, switch: SlotSwitch, prepared: PreparedSwap) -> None:
        """Have the full weights of a dropped layer, or of some parts of it, and wait for them."""
        unit = switch.unit
        shards = unit.every if switch.shards is None else switch.shards
        prepared.moved_bytes += refill(self._weights, unit, shards, prepared.action, self._copy_rate)
        if shards == unit.every:
            switch.contents = resident_contents(unit, unit.full)
        else:
            switch.contents = absent_contents(unit, Absence.DROPPED, shards)

    def _fill(self, switch: SlotSwitch, prepared: PreparedSwap) -> None:
        """Start to copy the bytes of a switch's precision, and check meanwhile that the host has those that leave."""
        unit, precision = switch.unit, switch.precision
        copier, buffer = self._weights.streamer(unit).copier, unit.blocks[precision.key]
        copy = copier.copy(unit.sources(buffer.show(precision.layout), precision), self._copy_rate)
        try:
            changed = 0 if unit.absent else unit.keep(self._copy_rate)
        except BaseException:
            copy.settle()
            raise
        prepared.copies.append(Copying(switch, copy, changed))

    def _finish_copies(self, prepared: PreparedSwap) -> None:
        """Wait for the copies that were started; copy again what the host had otherwise than the layer."""
        while prepared.copies:
            copying = prepared.copies.pop()
            copying.copy.finish()
            if copying.changed or outdated(copying.switch.precision, copying.switch.unit.host_copies):
                self._fill_anew(copying.switch)
            copying.switch.contents = resident_contents(copying.switch.unit, copying.switch.precision)
            prepared.moved_bytes += copying.switch.precision.nbytes

    def _fill_anew(self, switch: SlotSwitch) -> None:
        """Copy a precision's bytes as the host has them now, and wait for them."""
        unit = switch.unit
        copier, buffer = self._weights.streamer(unit).copier, unit.blocks[switch.precision.key]
        kept, slots = unit.host_copies, unit.slots
        precision = unit.precisions.renewed(
            switch.precision, kept, lambda name: slots[name].in_order(kept[name].tensor)
        )
        copier.copy(unit.sources(buffer.show(precision.layout), precision), self._copy_rate).finish()
        switch.precision = precision

    def _retire_old(self, switches: list[SlotSwitch]) -> tuple[int, int]:
        """Return the pages that the units gave up: those free now, and those that tensors outside still show."""
        freed = retained = 0
        for switch in switches:
            if switch.absent_before:
                self._weights.streamer(switch.unit).forget(switch.unit)
            else:
                pages = retire(switch.unit, switch.precision_before, self._broker)
                freed += pages
                retained += switch.unit.pages_in(switch.precision_before) - pages
        return freed, retained

    def _free_prefetch_buffers(self, returning: list[WeightUnit]) -> int:
        """Give up prefetch buffers that are not needed when these units are back, for their pages; return the bytes."""
        freed = 0
        for place, units in by_place(returning).items():
            count, _ = self._prefetch_buffers_after(place, units, least=1)  # one is used until the layers are back
            pages = self._weights.streamers[place].resize(count)
            self._broker.give_to_cache(place, pages)
            freed += pages * units[0].pool.page_bytes
        return freed


def _require_renewable(unit: WeightUnit, precision: LayerPrecision) -> None:
    """Raise `StateError` for what was read from a checkpoint and stands for a parameter that was written since."""
    for name, packing in precision.packings.items():
        if packing.from_checkpoint:
            parameter, slot = unit.at_place(name), unit.slots[name]
            digest = unit.host_copies[name].digest if parameter is None else slot.digest(parameter)
            if digest != packing.source_digest:
                packing.renewed(slot.parameter, digest)  # refuses, in its words


def _bytes_needed(unit: WeightUnit, action: Arrival) -> int:
    """Return the bytes that an action copies for a unit."""
    after = shards_after(unit, action)
    return precision_after(unit, action).nbytes if after is None else sum(n for _, n in missing_runs(unit, after))
