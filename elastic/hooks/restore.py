"""The action that brings a layer's weights back to its place."""

from __future__ import annotations

from elastic.errors import CapacityError
from elastic.hooks.actions import Lender, Prepared, Waiting, by_place, resize_stages, retire
from elastic.hooks.layer import LayerWeights
from elastic.hooks.weights import ModelWeights
from elastic.types import Change, PlanStep, Restore


class RestoreMechanism:
    """`Restore`: check, prepare, commit, roll back, finish."""

    def __init__(self, weights: ModelWeights, lender: Lender, waiting: Waiting) -> None:
        self._weights = weights
        self._lender = lender
        self._waiting = waiting

    def foresee(self, action: Restore) -> PlanStep:
        """What the action would do if nothing changed until then."""
        layers = self._check(action)
        pages = sum(layer.pages for layer in layers)
        fits = all(
            self._lender.could_claim(place, sum(layer.pages for layer in here))
            for place, here in by_place(layers).items()
        )
        moved = sum(layer.nbytes for layer in layers)
        return PlanStep(action, "applied" if fits else "deferred", moved, -pages, pages, 0.0)

    def prepare(self, action: Restore) -> Prepared:
        """For each layer: pages from the KV cache, and the bytes copied into them. Layers without pages wait."""
        prepared = Prepared(action)
        layers = self._check(action)
        try:
            prepared.lent_bytes = self._spare_stages(layers)
            for layer in layers:
                self._prepare_one(layer, prepared)
        except BaseException:
            self.rollback(prepared)
            raise
        return prepared

    def commit(self, prepared: Prepared) -> None:
        """Flip the layers to their blocks."""
        prepared.require_unwritten()
        prepared.committed = True
        for layer, plain in zip(prepared.layers, prepared.plain, strict=True):
            layer.show(plain)
        prepared.plain.clear()

    def rollback(self, prepared: Prepared) -> None:
        """Give the pages back."""
        for layer in prepared.layers:
            if prepared.committed and not layer.absent:
                layer.hide(layer.weights())
        prepared.plain.clear()
        for layer in reversed(prepared.layers):
            self._lender.lend(layer.pool.name, retire(layer, self._lender))
            layer.pool.tell()
        for place in by_place(self._weights.at(prepared.action.layers)):
            self._lender.lend(place, resize_stages(self._weights, place))
        prepared.layers.clear()

    def finish(self, prepared: Prepared) -> Change:
        """Drop what stages have of the layers, and the stages that are one too many; note who waits."""
        gained = prepared.lent_bytes
        for layer in prepared.layers:
            self._weights.streamer(layer).forget(layer)
        for place, layers in by_place([*prepared.layers, *prepared.deferred]).items():
            spare = resize_stages(self._weights, place)
            self._lender.lend(place, spare)
            restored = sum(layer.pages for layer in layers if layer in prepared.layers)
            gained += (spare - restored) * layers[0].pool.page_bytes
            layers[0].pool.tell()
        self._waiting.drop(prepared.layers)
        self._waiting.add(prepared.deferred)
        done, waiting = (tuple(w.index for w in part) for part in (prepared.layers, prepared.deferred))
        return Change("deferred" if waiting else "applied", done, waiting, prepared.moved_bytes, gained)

    def pending(self) -> Restore | None:
        """The restore to be tried again when pages have come free."""
        indices = tuple(layer.index for layer in self._waiting.layers)
        return Restore(indices) if indices else None

    def _check(self, action: Restore) -> list[LayerWeights]:
        """The layers to restore. Raises `CapacityError` if the place could not hold them even without any cache."""
        layers = [layer for layer in self._weights.at(action.layers) if layer.absent]
        for place, here in by_place(layers).items():
            pages = sum(layer.pages for layer in here) - self._stages_after(place, here)[1]
            room, pool = self._lender.room(place), here[0].pool
            if pages > room:
                raise CapacityError(
                    f"place {place} has no room for {len(here)} more layers beside its KV cache; restore fewer, lower "
                    "the KV limit, or give it a larger budget",
                    requested_bytes=pages * pool.page_bytes,
                    free_bytes=room * pool.page_bytes,
                    total_bytes=pool.budget_pages * pool.page_bytes,
                )
        return layers

    def _stages_after(self, place: str, returning: list[LayerWeights]) -> tuple[int, int]:
        """How many stages the place needs when these layers are back, and how many pages that saves."""
        streamer = self._weights.streamers[place]
        staying = sum(w.absent for w in self._weights.layers if w.pool.name == place) - len(returning)
        count = min(streamer.stages, max(1, staying))
        return count, (streamer.stages - count) * streamer.stage_pages

    def _prepare_one(self, layer: LayerWeights, prepared: Prepared) -> None:
        if prepared.deferred or not self._lender.claim(layer.pool.name, layer.pages):
            prepared.deferred.append(layer)
            return
        try:
            block = layer.new_block()
            block.fill(layer.owner)
        except CapacityError:
            self._lender.lend(layer.pool.name, layer.pages)
            if layer.pool.free_pages >= layer.pages:
                raise
            prepared.deferred.append(layer)  # another model has the pages
            return
        prepared.layers.append(layer)
        prepared.versions.append(layer.version())
        prepared.plain.append(layer.plain(block.show(layer.layout)))
        self._weights.streamer(layer).copier.start(layer.sources(prepared.plain[-1])).finish()
        prepared.moved_bytes += layer.nbytes

    def _spare_stages(self, returning: list[LayerWeights]) -> int:
        """Layers that return need fewer stages, and may need their pages; returns the bytes."""
        lent = 0
        for place, layers in by_place(returning).items():
            spare = self._weights.streamers[place].resize(self._stages_after(place, layers)[0])
            self._lender.lend(place, spare)
            lent += spare * layers[0].pool.page_bytes
        return lent
