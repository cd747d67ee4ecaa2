"""The actions that have a layer at its place in another form: swapped to a variant, or restored to full precision.

MorphServe, section 3.3. The paper overwrites a layer's memory in place; here each form has pages of its own, which are
filled while the old form serves, and the flip is what the safe point waits for. So a fault before it costs nothing, and
no forward pass reads what is being written.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby

from elastic.actions.deferred import (
    DeferredActions,
    Move,
    PreparedAction,
    SlotSwitch,
    by_place,
    form_after,
    indices,
    of_layers,
    resize_stages,
    retire,
)
from elastic.actions.pages.broker import PageBroker
from elastic.actions.release import require_no_gradients
from elastic.errors import CapacityError
from elastic.memory.rate_limit import RateLimiter
from elastic.types import Change, PlanStep
from elastic.weights.layer import WeightUnit
from elastic.weights.model import ModelWeights
from elastic.weights.precision import LayerPrecision, outdated
from elastic.weights.slot_contents import resident_contents


@dataclass
class PreparedSwap(PreparedAction):
    action: Move


class SwapHandler:
    """`Swap` and `Restore`: check, prepare, commit, roll back, finish."""

    def __init__(self, weights: ModelWeights, broker: PageBroker, waiting: DeferredActions, pace: RateLimiter) -> None:
        self._weights = weights
        self._broker = broker
        self._waiting = waiting
        self._pace = pace

    def dry_run(self, action: Move) -> PlanStep:
        """What the action would do if nothing changed until then."""
        layers = self._check(action)
        forms = {layer: form_after(layer, action) for layer in layers}
        fits = all(
            self._broker.could_take(place, self._most_needed([(layer, forms[layer]) for layer in here]))
            for place, here in by_place(layers).items()
        )
        arriving = sum(layer.pages_in(form) for layer, form in forms.items())
        moved = sum(form.nbytes for form in forms.values())
        gained = sum(layer.held_pages for layer in layers) - arriving
        return PlanStep(action, "applied" if fits else "deferred", moved, gained, arriving, 0.0)

    def prepare(self, action: Move) -> PreparedSwap:
        """For each layer: pages, and the bytes copied into them. Layers without pages wait."""
        prepared = PreparedSwap(action)
        layers = self._check(action)
        try:
            prepared.lent_bytes = self._spare_stages([layer for layer in layers if layer.absent])
            for _, units in groupby(layers, lambda unit: unit.index):
                self._prepare_layer(list(units), prepared)
        except BaseException:
            self.rollback(prepared)
            raise
        return prepared

    def commit(self, prepared: PreparedSwap) -> None:
        """Flip the layers to their new blocks."""
        prepared.require_unwritten()
        prepared.committed = True
        for flip in prepared.flips:
            flip.layer.show(flip.contents, flip.form)

    def rollback(self, prepared: PreparedSwap) -> None:
        """Flip back, and give the pages back."""
        if prepared.committed:
            for flip in prepared.flips:
                flip.undo()
        prepared.let_go()
        self._drop(prepared.flips)
        for place in by_place(self._weights.units_of(prepared.action.layers)):
            self._broker.give_to_cache(place, resize_stages(self._weights, place))
        prepared.flips.clear()

    def finish(self, prepared: PreparedSwap) -> Change:
        """Retire the old blocks, drop what stages have of the layers, and note who waits."""
        prepared.let_go()
        gained, retained = prepared.lent_bytes, 0
        for place, layers in by_place([*prepared.layers, *prepared.deferred]).items():
            size = layers[0].pool.page_bytes
            flips = [flip for flip in prepared.flips if flip.layer in layers]
            freed, kept = self._retire_old(flips)
            freed += resize_stages(self._weights, place)
            self._broker.give_to_cache(place, freed)
            gained += (freed - sum(flip.layer.pages_in(flip.form) for flip in flips)) * size
            retained += kept * size
        self._waiting.drop(self._weights.units_of(prepared.action.layers))
        self._waiting.add(prepared.deferred, of_layers(prepared.action, ()))
        for layers in by_place(prepared.layers).values():
            layers[0].pool.notify()
        done, waiting = (indices(part) for part in (prepared.layers, prepared.deferred))
        return Change("deferred" if waiting else "applied", done, waiting, prepared.moved_bytes, gained, retained)

    def deferred(self) -> tuple[Move, ...]:
        """The moves to be tried again when pages have come free."""
        return tuple(self._waiting.moves())

    def _check(self, action: Move) -> list[WeightUnit]:
        """The layers that are not so yet. Raises `CapacityError` if a place could not hold them even with no cache."""
        layers = []
        for layer in self._weights.units_of(action.layers):
            self._weights.parameters_under(layer.index, action.parts)
            if layer.absent or form_after(layer, action).key != layer.form.key:
                require_no_gradients(layer)
                self._weights.require_alone(layer.index)
                layers.append(layer)
        for place, here in by_place(layers).items():
            self._require_room(place, here, [form_after(layer, action) for layer in here])
        return layers

    def _require_room(self, place: str, layers: list[WeightUnit], forms: list[LayerPrecision]) -> None:
        arriving = [layer.pages_in(form) for layer, form in zip(layers, forms, strict=True)]
        returning = [layer for layer in layers if layer.absent]
        saved = self._stages_after(place, returning, least=self._weights.streamers[place].least)[1]
        growth = sum(arriving) - sum(layer.held_pages for layer in layers) - saved
        room, pool = self._broker.claimable(place), layers[0].pool
        if growth > room:
            raise CapacityError(
                f"place {place} has no room for {len(layers)} more layers beside its KV cache; restore fewer, lower "
                "the KV limit, or give it a larger budget",
                requested_bytes=growth * pool.page_bytes,
                free_bytes=room * pool.page_bytes,
                total_bytes=pool.budget_pages * pool.page_bytes,
            )

    def _stages_after(self, place: str, returning: list[WeightUnit], least: int) -> tuple[int, int]:
        """How many stages the place needs when these layers are back, and how many pages that saves."""
        streamer = self._weights.streamers[place]
        staying = sum(w.absent for w in self._weights.layers if w.pool.name == place) - len(returning)
        count = min(streamer.stages, max(least, staying))
        return count, (streamer.stages - count) * streamer.stage_pages

    def _prepare_layer(self, units: list[WeightUnit], prepared: PreparedSwap) -> None:
        """All units of one layer, or none."""
        first = len(prepared.flips)
        for unit in units:
            form = form_after(unit, prepared.action)
            if prepared.deferred or not self._take_pages(unit, form):
                self._drop(prepared.flips[first:])
                del prepared.flips[first:]
                prepared.deferred += units
                return
            prepared.flips.append(SlotSwitch(unit, form, {}, unit.version()))
        for flip in prepared.flips[first:]:
            self._prepare_flip(flip, prepared)

    def _prepare_flip(self, flip: SlotSwitch, prepared: PreparedSwap) -> None:
        layer, form = flip.layer, flip.form
        form = flip.form = self._fill(layer, form)
        flip.contents = resident_contents(layer, form)
        prepared.moved_bytes += form.nbytes

    def _drop(self, flips: list[SlotSwitch]) -> None:
        """Give the pages of new blocks back."""
        for flip in reversed(flips):
            self._broker.give_to_cache(flip.layer.pool.name, retire(flip.layer, flip.form, self._broker))
            flip.layer.pool.notify()

    def _take_pages(self, layer: WeightUnit, form: LayerPrecision) -> bool:
        """Have the form's block filled with pages: of the KV cache, or as many as it gives up of the reserve."""
        pages, place = layer.pages_in(form), layer.pool.name
        claimed = next(
            (n for n in (pages, pages - self._reserved(layer, form)) if self._broker.take_from_cache(place, n)), None
        )
        if claimed is None:
            return False
        reserved = pages - claimed
        try:
            with self._broker.reserves[place].opened(reserved) if reserved else nullcontext():
                layer.block_for(form).allocate(layer.owner)
        except CapacityError:
            self._broker.give_to_cache(place, claimed)
            if layer.pool.free_pages >= pages:
                raise
            return False  # another model has the pages
        return True

    def _reserved(self, layer: WeightUnit, form: LayerPrecision) -> int:
        """Pages of the reserve that the layer may have: no more than it gives back when its old form is retired."""
        reserve = self._broker.reserves.get(layer.pool.name)
        return min(reserve.ready, layer.held_pages, layer.pages_in(form)) if reserve else 0

    def _most_needed(self, moves: list[tuple[WeightUnit, LayerPrecision]]) -> int:
        """The most pages that caches are asked for when these layers move one after another."""
        most = grown = 0
        for layer, form in moves:
            most = max(most, grown + layer.pages_in(form) - self._reserved(layer, form))
            grown += layer.pages_in(form) - layer.held_pages
        return most

    def _fill(self, layer: WeightUnit, form: LayerPrecision) -> LayerPrecision:
        """Copy the form's bytes, and check meanwhile that the host has those that leave; returns the form as it is."""
        copier, block = self._weights.streamer(layer).copier, layer.blocks[form.key]
        copy = copier.copy(layer.sources(block.show(form.layout), form), self._pace)
        try:
            changed = 0 if layer.absent else layer.keep(self._pace)
        finally:
            copy.finish()
        if changed or outdated(form, layer.host_copies):
            form = layer.precisions.renewed(form, layer.host_copies)
            copier.copy(layer.sources(block.show(form.layout), form), self._pace).finish()
        return form

    def _retire_old(self, flips: list[SlotSwitch]) -> tuple[int, int]:
        """The pages that the layers gave up: those free now, and those that tensors outside still show."""
        freed = retained = 0
        for flip in flips:
            if flip.absent_before:
                self._weights.streamer(flip.layer).forget(flip.layer)
            else:
                pages = retire(flip.layer, flip.form_before, self._broker)
                freed += pages
                retained += flip.layer.pages_in(flip.form_before) - pages
        return freed, retained

    def _spare_stages(self, returning: list[WeightUnit]) -> int:
        """Layers that return need fewer stages, and may need their pages; returns the bytes."""
        lent = 0
        for place, layers in by_place(returning).items():
            count, _ = self._stages_after(place, layers, least=1)  # one is used until the layers are back
            spare = self._weights.streamers[place].resize(count)
            self._broker.give_to_cache(place, spare)
            lent += spare * layers[0].pool.page_bytes
        return lent
