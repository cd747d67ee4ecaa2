"""The action that moves a layer's weights out of its place."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.actions.base import ActionHandler, Layers
from elastic.actions.deferred import (
    DeferredActions,
    PreparedAction,
    SlotSwitch,
    by_place,
    refit_prefetch_buffers,
    require_no_gradients,
    resize_prefetch_buffers,
    retire,
)
from elastic.actions.pages.broker import PageBroker
from elastic.errors import CapacityError, ConfigError, StateError
from elastic.types import Change, PlanStep, Release, ResizeStatus
from elastic.weights.layer import Absence, WeightUnit
from elastic.weights.model import ModelWeights
from elastic.weights.proxy.dropped_source import dropped_error
from elastic.weights.slot_contents import absent_contents
from elastic.weights.streaming import MOST_BUFFERS, WeightStreamer


@dataclass
class PreparedRelease(PreparedAction):
    """A release in preparation."""

    action: Release
    prefetch_pages: dict[str, int] = field(default_factory=dict)
    """Pages that a first prefetch buffer took from the KV cache, by place."""


class ReleaseHandler(ActionHandler):
    """`Release`: check, prepare, commit, roll back, finish.

    `waits`: a first one that finds no room for its prefetch buffer is deferred, since caches give pages up for it.
    """

    def __init__(
        self, weights: ModelWeights, broker: PageBroker, deferred: DeferredActions, *, waits: bool = False
    ) -> None:
        self._weights = weights
        self._broker = broker
        self._deferred = deferred
        self._waits = waits

    def dry_run(self, action: Release) -> PlanStep:
        """Return what the action would do now. Raises `CapacityError` or `StateError` if it cannot be done."""
        units = self._check(action)
        pages = sum(unit.held_pages for unit in units) - self._more_buffer_pages(units)
        copied = sum(s.parameter.nbytes for u in units for name, s in u.slots.items() if name not in u.host_copies)
        status: ResizeStatus = "deferred" if any(map(self._lacks_buffer, units)) else "applied"
        return PlanStep(action, status, copied, pages, 0, 0.0)

    def prepare(self, action: Release) -> PreparedRelease:
        """Have the weights in the host store."""
        units = self._check(action)
        prepared = PreparedRelease(action)
        try:
            prepared.prefetch_pages = self._make_first_buffers(units)
        except CapacityError:
            if not self._waits:
                raise
            prepared.deferred = units
            return prepared
        self._await(units, 1)
        try:
            for unit in units:
                version = unit.version()
                prepared.moved_bytes += unit.keep()
                prepared.switches.append(SlotSwitch(unit, unit.full, absent_contents(unit), version))
            for place, leaving in by_place(units).items():
                self._weights.streamers[place].make_ready(self._weights.streamed(place) + len(leaving))
        except BaseException:
            self._await(units, -1)
            self._deferred.give_back(units)
            refit_prefetch_buffers(self._weights, units, self._broker)
            raise
        return prepared

    def layers(self, prepared: PreparedRelease) -> Layers:
        """Return the layers that will leave: none where there is no prefetch buffer yet."""
        return tuple(unit.index for unit in prepared.units)

    def shorten(self, prepared: PreparedRelease, layers: Layers) -> None:
        """Defer all if another rank has no prefetch buffer yet."""
        if layers != self.layers(prepared):
            prepared.deferred = prepared.units
            self.rollback(prepared)
            prepared.switches.clear()

    def commit(self, prepared: PreparedRelease) -> None:
        """Switch the slots to the host store."""
        prepared.begin_commit()
        for switch in prepared.switches:
            switch.unit.hide(switch.contents)

    def rollback(self, prepared: PreparedRelease) -> None:
        """Switch the slots back: the buffers still have everything."""
        prepared.undo()
        self._await(prepared.units, -1)
        self._deferred.give_back(prepared.units)
        refit_prefetch_buffers(self._weights, prepared.units, self._broker)

    def finish(self, prepared: PreparedRelease) -> Change:
        """Retire the buffers: their pages are KV capacity, less those of prefetch buffers and of tensors outside."""
        prepared.drop_contents()
        self._await(prepared.units, -1)
        released = retained = 0
        for place, units in by_place(prepared.units).items():
            switches = [switch for switch in prepared.switches if switch.unit in units]
            freed = [retire(switch.unit, switch.precision_before, self._broker) for switch in switches]
            pages = sum(freed) + resize_prefetch_buffers(self._weights, place)
            self._broker.give_to_cache(place, pages)
            pool = units[0].pool
            released += (pages - prepared.prefetch_pages.get(place, 0)) * pool.page_bytes
            held = sum(switch.unit.pages_in(switch.precision_before) for switch in switches)
            retained += (held - sum(freed)) * pool.page_bytes
            pool.notify()
        self._deferred.replace(self._weights.units_of(prepared.action.layers), prepared.deferred, prepared.action)
        for place in by_place(prepared.units):  # last: all is given up by then, whatever a driver says
            self._weights.streamers[place].fill()
        waiting = tuple(unit.index for unit in prepared.deferred)
        return Change(
            "deferred" if waiting else "applied",
            self.layers(prepared),
            waiting,
            prepared.moved_bytes,
            released,
            retained,
        )

    def _check(self, action: Release) -> list[WeightUnit]:
        """Return the units to be released."""
        units = self._weights.units_of(action.layers)
        for unit in units:
            if unit.absent is Absence.DROPPED:
                raise dropped_error(unit.name, unit.index)
            if not unit.slots:
                raise ConfigError(f"{unit.name} has no weights of its own: others use them too")
            if unit.part:
                raise StateError(
                    f"{unit.name}.{unit.part} is at {unit.pool.name}, apart from its layer; migrate the whole layer "
                    "to one place before it is released"
                )
            require_no_gradients(unit)
            self._weights.require_alone(unit.index)
            self._weights.require_not_in_parts(unit.index)
        leaving = [unit for unit in units if not unit.absent]
        self._require_buffers(leaving)
        return leaving

    def _require_buffers(self, units: list[WeightUnit]) -> None:
        """Raise `CapacityError` where there is no room for a first prefetch buffer, and will be none."""
        for place, leaving in by_place(units).items():
            streamer = self._weights.streamers[place]
            room = self._broker.shares[place].claimable() + sum(unit.held_pages for unit in leaving)
            if self._lacks_buffer(leaving[0]) and not (self._waits and streamer.buffer_pages <= room):
                raise _no_prefetch_buffer(streamer)

    def _lacks_buffer(self, unit: WeightUnit) -> bool:
        """Whether a unit's place has no prefetch buffer, and caches have the pages for one."""
        streamer = self._weights.streamer(unit)
        return not streamer.buffers and self._broker.shares[unit.pool.name].shortfall(streamer.buffer_pages) > 0

    def _make_first_buffers(self, units: list[WeightUnit]) -> dict[str, int]:
        """Make a prefetch buffer at each place that has none, of pages of the KV cache; return these, by place."""
        taken: dict[str, int] = {}
        try:
            for place, leaving in by_place(units).items():
                streamer = self._weights.streamers[place]
                if streamer.buffers:
                    continue
                if not self._deferred.take(leaving, streamer.buffer_pages):
                    raise _no_prefetch_buffer(streamer)
                taken[place] = streamer.buffer_pages
                streamer.resize(1)
        except BaseException:
            self._deferred.give_back(units)
            for place, pages in taken.items():
                self._weights.streamers[place].resize(0)
                self._broker.give_to_cache(place, pages)
            raise
        return taken

    def _await(self, units: list[WeightUnit], more: int) -> None:
        """Have the prefetch buffers of the units' places kept, while these are prepared to be absent."""
        for place in by_place(units):
            self._weights.streamers[place].awaited += more

    def _more_buffer_pages(self, units: list[WeightUnit]) -> int:
        """Count the pages that further prefetch buffers would take if these units were absent too."""
        pages = 0
        for place in by_place(units):
            streamer = self._weights.streamers[place]
            streamed = self._weights.streamed(place) + sum(unit.pool.name == place for unit in units)
            pages += max(0, min(MOST_BUFFERS, streamed) - len(streamer.buffers)) * streamer.buffer_pages
        return pages


def _no_prefetch_buffer(streamer: WeightStreamer) -> CapacityError:
    pool = streamer.pool
    message = f"place {pool.name} has no room for the prefetch buffer that released layers are called in"
    return pool.shortage(f"{message}; lower the KV limit, or give it a larger budget", streamer.buffer_pages)
