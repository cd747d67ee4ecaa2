"""The action that moves a layer's weights out of its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic.actions.deferred import DeferredActions, PreparedAction, SlotSwitch, by_place, resize_stages, retire
from elastic.actions.pages.broker import PageBroker
from elastic.errors import CapacityError, ConfigError, StateError
from elastic.types import Change, PlanStep, Release
from elastic.weights.layer import WeightUnit
from elastic.weights.model import ModelWeights
from elastic.weights.slot_contents import absent_contents
from elastic.weights.streaming import MOST_STAGES, WeightStreamer


@dataclass
class PreparedRelease(PreparedAction):
    """A release that was checked; `claimed` are the pages that a first stage took from the KV cache, by place."""

    claimed: dict[str, int] = field(default_factory=dict)


class ReleaseHandler:
    """`Release`: check, prepare, commit, roll back, finish."""

    def __init__(self, weights: ModelWeights, broker: PageBroker, waiting: DeferredActions) -> None:
        self._weights = weights
        self._broker = broker
        self._waiting = waiting

    def dry_run(self, action: Release) -> PlanStep:
        """What the action would do now. Raises `CapacityError` or `StateError` if it cannot be done."""
        layers = self._check(action)
        pages = sum(layer.held_pages for layer in layers) - self._stage_pages(layers)
        return PlanStep(action, "applied", sum(layer.nbytes for layer in layers), pages, 0, 0.0)

    def prepare(self, action: Release) -> PreparedRelease:
        """Have the weights in the host store."""
        layers = self._check(action)
        prepared = PreparedRelease(action, claimed=self._have_stages(layers))
        try:
            for layer in layers:
                version = layer.version()
                prepared.moved_bytes += layer.keep()
                prepared.flips.append(SlotSwitch(layer, layer.full, absent_contents(layer), version))
        except BaseException:
            self._give_stages_back(layers)
            raise
        return prepared

    def commit(self, prepared: PreparedRelease) -> None:
        """Flip the layers to the host store."""
        prepared.require_unwritten()
        prepared.committed = True
        for flip in prepared.flips:
            flip.layer.hide(flip.contents)

    def rollback(self, prepared: PreparedRelease) -> None:
        """Flip back. The block still has everything."""
        if prepared.committed:
            for flip in prepared.flips:
                flip.undo()
        self._give_stages_back(prepared.layers)
        prepared.let_go()

    def finish(self, prepared: PreparedRelease) -> Change:
        """Retire the blocks: their pages are KV capacity, but for what stages need and what tensors outside show."""
        prepared.let_go()
        released = retained = 0
        for place, layers in by_place(prepared.layers).items():
            flips = [flip for flip in prepared.flips if flip.layer in layers]
            freed = [retire(flip.layer, flip.form_before, self._broker) for flip in flips]
            pages = sum(freed) + resize_stages(self._weights, place)
            self._broker.give_to_cache(place, pages)
            pool = layers[0].pool
            released += (pages - prepared.claimed.get(place, 0)) * pool.page_bytes
            held = sum(flip.layer.pages_in(flip.form_before) for flip in flips)
            retained += (held - sum(freed)) * pool.page_bytes
            pool.notify()
        self._waiting.drop(self._weights.units_of(prepared.action.layers))
        done = tuple(layer.index for layer in prepared.layers)
        return Change("applied", done, (), prepared.moved_bytes, released, retained)

    def deferred(self) -> tuple[Release, ...]:
        """A release is never deferred."""
        return ()

    def _check(self, action: Release) -> list[WeightUnit]:
        layers = self._weights.units_of(action.layers)
        for layer in layers:
            if not layer.slots:
                raise ConfigError(f"{layer.name} has no weights of its own: others use them too")
            if layer.part:
                raise StateError(
                    f"{layer.name}.{layer.part} is at {layer.pool.name}, apart from its layer; migrate the whole layer "
                    "to one place before it is released"
                )
            streamer = self._weights.streamer(layer)
            if not streamer.stages and not self._broker.could_take(layer.pool.name, streamer.stage_pages):
                raise _no_stage(streamer)
            require_no_gradients(layer)
            self._weights.require_alone(layer.index)
        return [layer for layer in layers if not layer.absent]

    def _have_stages(self, layers: list[WeightUnit]) -> dict[str, int]:
        """See to it that there is a stage; the KV cache gives the pages if there was none. Returns these, by place."""
        claimed: dict[str, int] = {}
        for place in by_place(layers):
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
            claimed[place] = streamer.stage_pages
        return claimed

    def _give_stages_back(self, layers: Sequence[WeightUnit]) -> None:
        for place in by_place(layers):
            self._broker.give_to_cache(place, resize_stages(self._weights, place))

    def _stage_pages(self, layers: list[WeightUnit]) -> int:
        """Pages that further stages would take if these layers were absent too."""
        pages = 0
        for place in by_place(layers):
            streamer = self._weights.streamers[place]
            absent = sum(w.absent or w in layers for w in self._weights.layers if w.pool.name == place)
            pages += max(0, min(MOST_STAGES, absent) - streamer.stages) * streamer.stage_pages
        return pages


def _no_stage(streamer: WeightStreamer) -> CapacityError:
    pool = streamer.pool
    return CapacityError(
        f"place {pool.name} has no room for the stage that released layers are called in; give it a larger budget",
        requested_bytes=streamer.stage_bytes,
        free_bytes=pool.free_pages * pool.page_bytes,
        total_bytes=pool.budget_pages * pool.page_bytes,
    )


def require_no_gradients(layer: WeightUnit) -> None:
    """Raises `StateError` if a parameter has a gradient, which a weight without bytes cannot carry."""
    if any(slot.parameter.grad is not None for slot in layer.slots.values()):
        raise StateError(f"{layer.name} has gradients; set them to None before it is released or swapped")
