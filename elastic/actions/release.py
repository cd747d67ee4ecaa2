"""The action that moves a layer's weights out of its place."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.actions.base import ActionHandler
from elastic.actions.deferred import (
    DeferredActions,
    PreparedAction,
    SlotSwitch,
    by_place,
    refit_stages,
    require_no_gradients,
    resize_stages,
    retire,
)
from elastic.actions.pages.broker import PageBroker
from elastic.errors import CapacityError, ConfigError, StateError
from elastic.types import Change, PlanStep, Release
from elastic.weights.layer import Absence, WeightUnit
from elastic.weights.model import ModelWeights
from elastic.weights.proxy.dropped_source import dropped_error
from elastic.weights.slot_contents import absent_contents
from elastic.weights.streaming import MOST_STAGES, WeightStreamer


@dataclass
class PreparedRelease(PreparedAction):
    """A release in preparation."""

    stage_pages: dict[str, int] = field(default_factory=dict)
    """Pages that a first stage took from the KV cache, by place."""


class ReleaseHandler(ActionHandler):
    """`Release`: check, prepare, commit, roll back, finish."""

    def __init__(self, weights: ModelWeights, broker: PageBroker, deferred: DeferredActions) -> None:
        self._weights = weights
        self._broker = broker
        self._deferred = deferred

    def dry_run(self, action: Release) -> PlanStep:
        """Return what the action would do now. Raises `CapacityError` or `StateError` if it cannot be done."""
        units = self._check(action)
        pages = sum(unit.held_pages for unit in units) - self._more_stage_pages(units)
        return PlanStep(action, "applied", sum(unit.nbytes for unit in units), pages, 0, 0.0)

    def prepare(self, action: Release) -> PreparedRelease:
        """Have the weights in the host store."""
        units = self._check(action)
        prepared = PreparedRelease(action, stage_pages=self._make_first_stages(units))
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
            refit_stages(self._weights, units, self._broker)
            raise
        return prepared

    def commit(self, prepared: PreparedRelease) -> None:
        """Switch the slots to the host store."""
        prepared.begin_commit()
        for switch in prepared.switches:
            switch.unit.hide(switch.contents)

    def rollback(self, prepared: PreparedRelease) -> None:
        """Switch the slots back: the buffers still have everything."""
        prepared.undo()
        self._await(prepared.units, -1)
        refit_stages(self._weights, prepared.units, self._broker)

    def finish(self, prepared: PreparedRelease) -> Change:
        """Retire the buffers: their pages are KV capacity, but for what stages need and what tensors outside show."""
        prepared.drop_contents()
        self._await(prepared.units, -1)
        released = retained = 0
        for place, units in by_place(prepared.units).items():
            switches = [switch for switch in prepared.switches if switch.unit in units]
            freed = [retire(switch.unit, switch.precision_before, self._broker) for switch in switches]
            pages = sum(freed) + resize_stages(self._weights, place)
            self._broker.give_to_cache(place, pages)
            pool = units[0].pool
            released += (pages - prepared.stage_pages.get(place, 0)) * pool.page_bytes
            held = sum(switch.unit.pages_in(switch.precision_before) for switch in switches)
            retained += (held - sum(freed)) * pool.page_bytes
            pool.notify()
            self._weights.streamers[place].fill()
        self._deferred.forget(self._weights.units_of(prepared.action.layers))
        done = tuple(unit.index for unit in prepared.units)
        return Change("applied", done, (), prepared.moved_bytes, released, retained)

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
            streamer = self._weights.streamer(unit)
            if not streamer.stages and self._broker.shares[unit.pool.name].shortfall(streamer.stage_pages):
                raise _no_stage(streamer)
            require_no_gradients(unit)
            self._weights.require_alone(unit.index)
        return [unit for unit in units if not unit.absent]

    def _make_first_stages(self, units: list[WeightUnit]) -> dict[str, int]:
        """Make a stage at each place that has none, of pages of the KV cache; return these, by place."""
        taken: dict[str, int] = {}
        for place in by_place(units):
            streamer = self._weights.streamers[place]
            if streamer.stages:
                continue
            if not self._broker.take_from_cache(place, streamer.stage_pages):
                raise _no_stage(streamer)
            try:
                streamer.resize(1)
            except BaseException:
                self._broker.give_to_cache(place, streamer.stage_pages)
                raise
            taken[place] = streamer.stage_pages
        return taken

    def _await(self, units: list[WeightUnit], more: int) -> None:
        """Have the stages of the units' places kept, while these are prepared to be absent."""
        for place in by_place(units):
            self._weights.streamers[place].awaited += more

    def _more_stage_pages(self, units: list[WeightUnit]) -> int:
        """Count the pages that further stages would take if these units were absent too."""
        pages = 0
        for place in by_place(units):
            streamer = self._weights.streamers[place]
            streamed = self._weights.streamed(place) + sum(unit.pool.name == place for unit in units)
            pages += max(0, min(MOST_STAGES, streamed) - streamer.stages) * streamer.stage_pages
        return pages


def _no_stage(streamer: WeightStreamer) -> CapacityError:
    pool = streamer.pool
    message = f"place {pool.name} has no room for the stage that released layers are called in; give it a larger budget"
    return pool.shortage(message, streamer.stage_pages)
