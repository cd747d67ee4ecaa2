"""Actions on weights in preparation, and those that are deferred until pages come free."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from elastic.actions.pages.broker import PageBroker
from elastic.errors import CapacityError, StateError
from elastic.types import Drop, Fetch, Release, Restore, Swap
from elastic.weights.layer import Absence, WeightUnit
from elastic.weights.model import ModelWeights
from elastic.weights.parameter_slot import Content
from elastic.weights.precision import LayerPrecision
from elastic.weights.slot_contents import reinstate
from elastic.weights.streaming import MOST_BUFFERS

logger = logging.getLogger(__name__)
Arrival = Swap | Restore | Fetch
"""The actions after which layers are at their place."""
Deferrable = Arrival | Release
"""The actions that may wait for pages."""


@dataclass
class SlotSwitch:
    """A pending switch of a unit's slots to other contents."""

    unit: WeightUnit
    precision: LayerPrecision
    contents: dict[str, Content]
    version: int
    """Number of writes to its parameters when their bytes were copied."""
    shards: frozenset[int] | None = None
    """The parts that it has then, of a layer that comes and goes part by part; None: all that it has in that form."""
    pages: int = 0
    """Pages that were taken for it."""
    precision_before: LayerPrecision = field(init=False)
    absent_before: Absence | None = field(init=False)
    shards_before: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        unit = self.unit
        self.precision_before, self.absent_before, self.shards_before = unit.precision, unit.absent, unit.shards_here


@dataclass
class PreparedAction:
    """The switches that an action will commit, and what it holds until then."""

    action: Release | Drop | Arrival
    switches: list[SlotSwitch] = field(default_factory=list)
    deferred: list[WeightUnit] = field(default_factory=list)
    moved_bytes: int = 0
    prefetch_bytes: int = 0
    """Bytes of prefetch buffers that the layers will not need."""
    committed: bool = False

    @property
    def units(self) -> list[WeightUnit]:
        """The units whose slots will switch."""
        return [switch.unit for switch in self.switches]

    def begin_commit(self) -> None:
        """Be committed from now on. Raises `StateError` if a layer was written since its bytes were copied."""
        for switch in self.switches:
            require_unwritten([switch.unit], switch.version)
        self.committed = True

    def undo(self) -> None:
        """Switch the slots back if they were switched: the old bytes are still there."""
        if self.committed:
            for switch in self.switches:
                reinstate(switch.unit, switch.precision_before, switch.absent_before, switch.shards_before)
        self.drop_contents()

    def drop_contents(self) -> None:
        """Hold the contents no longer: where torch exchanged parameters, they have what the layers had."""
        for switch in self.switches:
            switch.contents.clear()


class DeferredActions:
    """Units whose swap, restore or release waits for pages, which the KV cache keeps from new caches meanwhile."""

    def __init__(self, weights: ModelWeights, broker: PageBroker) -> None:
        self._weights = weights
        self._broker = broker
        self._waiting: dict[WeightUnit, Deferrable] = {}
        self._supplied: set[WeightUnit] = set()
        """Those for which pages were taken: nothing is held back for them."""

    def take(self, units: Sequence[WeightUnit], pages: int) -> bool:
        """Take pages of caches for units of one place, for which nothing is held back then; return whether it can be.

        At once: between the two, caches would have either more than they may, or less.
        """
        place, before = units[0].pool.name, self._supplied
        self._supplied, taken = before | {*units}, False
        try:
            taken = self._broker.take_from_cache(place, pages, self._pages(place))
        finally:
            if not taken:
                self._supplied = before
        return taken

    def give_back(self, units: Iterable[WeightUnit]) -> None:
        """Hold back again what units wait for, since what was taken for them is about to be given back."""
        self._supplied = self._supplied - {*units}
        self._set(self._waiting)

    def forget(self, units: Iterable[WeightUnit]) -> None:
        """Have these units wait no more."""
        gone = set(units)
        self._supplied = self._supplied - gone
        self._set({unit: action for unit, action in self._waiting.items() if unit not in gone})

    def replace(self, units: Iterable[WeightUnit], waiting: Iterable[WeightUnit], action: Deferrable) -> None:
        """Have, of these units, only some wait, for an action.

        At once: who sees what is held back in between would take it for theirs, and not be told afterwards.
        """
        gone = set(units)
        self._supplied = self._supplied - gone
        others = {unit: action for unit, action in self._waiting.items() if unit not in gone}
        self._set({**others, **dict.fromkeys(waiting, action)})

    def _set(self, waiting: dict[WeightUnit, Deferrable]) -> None:
        places = {unit.pool.name for unit in (*self._waiting, *waiting)}
        self._waiting = waiting
        for place in places:
            self._broker.shares[place].hold_back(self._pages(place))

    def _pages(self, place: str) -> int:
        """Count the pages that units of a place wait for; releases wait for one prefetch buffer together."""
        waiting = [item for item in self._waiting.items() if item[0] not in self._supplied]
        actions = [(unit, action) for unit, action in waiting if unit.pool.name == place]
        leaving = any(isinstance(action, Release) for _, action in actions)
        buffer = self._weights.streamers[place].buffer_pages if leaving else 0
        return buffer + sum(pages_needed(unit, action) for unit, action in actions if not isinstance(action, Release))

    def actions(self) -> tuple[Deferrable, ...]:
        """Return the deferred actions, each with the layers that still wait."""
        layers: dict[Deferrable, list[int]] = {}
        for unit, action in self._waiting.items():
            layers.setdefault(replace(action, layers=()), []).append(unit.index)
        return tuple(replace(action, layers=tuple(dict.fromkeys(indices))) for action, indices in layers.items())

    def require_settled(self, units: Iterable[WeightUnit], action: str) -> None:
        """Raise `StateError` if an action on a unit is deferred; `action` is what must wait for it."""
        for unit in units:
            if unit in self._waiting:
                raise StateError(
                    f"{unit.name} waits for pages to be swapped, restored or released; {action} it when that is done"
                )


def precision_after(unit: WeightUnit, arrival: Arrival) -> LayerPrecision:
    """Return the precision that an action gives a unit. Raises `ConfigError` for a variant that it does not have."""
    return unit.with_variant(arrival.variant if isinstance(arrival, Swap) else None, parts_of(arrival))


def shards_after(unit: WeightUnit, arrival: Arrival) -> frozenset[int] | None:
    """Return the parts that a dropped layer has after an action; None: it comes as a whole, as all others do."""
    if unit.cut is None or unit.absent is not Absence.DROPPED or isinstance(arrival, Swap):
        return None
    return unit.shards_here | unit.layer.parts_in(arrival.shards)


def pages_needed(unit: WeightUnit, arrival: Arrival) -> int:
    """Return the pages that an action takes for a unit, before it gives any up."""
    after = shards_after(unit, arrival)
    if after is None:
        return unit.pages_in(precision_after(unit, arrival))
    return unit.shard_pages.pages(after) - unit.held_pages


def pages_left(unit: WeightUnit, arrival: Arrival) -> int:
    """Return the pages that a unit gives up after an action: those of the form that it had."""
    return unit.held_pages if shards_after(unit, arrival) is None else 0


def parts_of(arrival: Arrival) -> tuple[str, ...]:
    """Return the names inside the layers that an action is about; none: whole layers."""
    return () if isinstance(arrival, Fetch) else arrival.parts


def require_unwritten(units: Sequence[WeightUnit], version: int) -> None:
    """Raise `StateError` if units of a layer were written since their bytes were copied, when they had this version."""
    if sum(unit.version() for unit in units) != version:
        raise StateError(f"the weights of {units[0].name} were written while they were on their way; try again")


def require_no_gradients(unit: WeightUnit) -> None:
    """Raise `StateError` if a parameter has a gradient, which a weight without bytes cannot carry."""
    if any(slot.parameter.grad is not None for slot in unit.slots.values()):
        raise StateError(
            f"{unit.name} has gradients; set them to None before it is released, restored, dropped or swapped"
        )


def by_place(units: Iterable[WeightUnit]) -> dict[str, list[WeightUnit]]:
    """Group units by the name of their place, in their order."""
    places: dict[str, list[WeightUnit]] = {}
    for unit in units:
        places.setdefault(unit.pool.name, []).append(unit)
    return places


def retire(unit: WeightUnit, precision: LayerPrecision, broker: PageBroker) -> int:
    """Let go of a unit's buffer that no forward pass reads any more; return the pages that are free now."""
    buffer, place = unit.blocks[precision.key], unit.pool.name
    if buffer.hide():
        buffer.make_reclaimable()
        return len(buffer.slots)
    del unit.blocks[precision.key]
    return buffer.orphan(lambda pages: broker.give_to_cache(place, pages))


def refit_prefetch_buffers(weights: ModelWeights, units: Iterable[WeightUnit], broker: PageBroker) -> None:
    """Have as many prefetch buffers as the places of units need; the KV caches there gain the difference or lose it."""
    for place in by_place(units):
        broker.give_to_cache(place, resize_prefetch_buffers(weights, place))


def spare_prefetch_buffers(weights: ModelWeights) -> None:
    """Keep no prefetch buffer while no layer is released: the first release takes one from the KV cache."""
    for place, streamer in weights.streamers.items():
        streamer.least = 0
        streamer.on_spare(resize_prefetch_buffers(weights, place))


def resize_prefetch_buffers(weights: ModelWeights, place: str) -> int:
    """Have as many prefetch buffers as a place's released layers need; return the pages that others gain, or lose."""
    streamer = weights.streamers[place]
    wanted = max(streamer.fewest, min(MOST_BUFFERS, weights.streamed(place)))
    try:
        return streamer.resize(wanted)
    except CapacityError as error:  # one will do, only nothing is fetched ahead
        logger.info("place %s has no room for another prefetch buffer: %s", place, str(error))
        return 0
