"""The action that moves a layer's weights out of its place."""

from __future__ import annotations

from elastic.errors import CapacityError, ConfigError, StateError
from elastic.hooks.actions import Lender, Prepared, Waiting, by_place, resize_stages, retire
from elastic.hooks.layer import LayerWeights
from elastic.hooks.streaming import MOST_STAGES
from elastic.hooks.weights import ModelWeights
from elastic.types import Change, PlanStep, Release


class ReleaseMechanism:
    """`Release`: check, prepare, commit, roll back, finish."""

    def __init__(self, weights: ModelWeights, lender: Lender, waiting: Waiting) -> None:
        self._weights = weights
        self._lender = lender
        self._waiting = waiting

    def foresee(self, action: Release) -> PlanStep:
        """What the action would do now. Raises `CapacityError` or `StateError` if it cannot be done."""
        layers = self._check(action)
        pages = sum(layer.pages for layer in layers) - self._stage_pages(layers)
        return PlanStep(action, "applied", sum(layer.nbytes for layer in layers), pages, 0, 0.0)

    def prepare(self, action: Release) -> Prepared:
        """Have the weights in the host store."""
        prepared = Prepared(action, self._check(action))
        for layer in prepared.layers:
            prepared.versions.append(layer.version())
            prepared.moved_bytes += layer.keep()
            prepared.weights.append(layer.weights())
        return prepared

    def commit(self, prepared: Prepared) -> None:
        """Flip the layers to the host store."""
        prepared.require_unwritten()
        prepared.committed = True
        for layer, weights in zip(prepared.layers, prepared.weights, strict=True):
            layer.hide(weights)

    def rollback(self, prepared: Prepared) -> None:
        """Flip back. The block still has everything."""
        if prepared.committed:
            for layer in prepared.layers:
                if layer.absent and layer.block is not None:
                    layer.show(layer.plain(layer.block.show(layer.layout)))

    def finish(self, prepared: Prepared) -> Change:
        """Retire the blocks: their pages are KV capacity, but for what stages need and what tensors outside show."""
        prepared.weights.clear()  # where torch exchanged them, they have what the layer had
        released = retained = 0
        for place, layers in by_place(prepared.layers).items():
            freed = [retire(layer, self._lender) for layer in layers]
            pages = sum(freed) + resize_stages(self._weights, place)
            self._lender.lend(place, pages)
            size = layers[0].pool.page_bytes
            released += pages * size
            retained += sum(layer.pages - pages for layer, pages in zip(layers, freed, strict=True)) * size
            layers[0].pool.tell()
        self._waiting.drop(self._weights.at(prepared.action.layers))
        done = tuple(layer.index for layer in prepared.layers)
        return Change("applied", done, (), prepared.moved_bytes, released, retained)

    def pending(self) -> None:
        """A release is never deferred."""

    def _check(self, action: Release) -> list[LayerWeights]:
        layers = self._weights.at(action.layers)
        for layer in layers:
            if not layer.slots:
                raise ConfigError(f"{layer.name} has no weights of its own: others use them too")
            if not self._weights.streamer(layer).stages:
                pool = layer.pool
                raise CapacityError(
                    f"place {pool.name} has no room for the stage that released layers are called in; give it a larger "
                    "budget",
                    requested_bytes=self._weights.streamer(layer).stage_bytes,
                    free_bytes=pool.free_pages * pool.page_bytes,
                    total_bytes=pool.budget_pages * pool.page_bytes,
                )
            if any(slot.parameter.grad is not None for slot in layer.slots.values()):
                raise StateError(f"{layer.name} has gradients; set them to None before it is released")
        return [layer for layer in layers if not layer.absent]

    def _stage_pages(self, layers: list[LayerWeights]) -> int:
        """Pages that further stages would take if these layers were absent too."""
        pages = 0
        for place in by_place(layers):
            streamer = self._weights.streamers[place]
            absent = sum(w.absent or w in layers for w in self._weights.layers if w.pool.name == place)
            pages += max(0, min(MOST_STAGES, absent) - streamer.stages) * streamer.stage_pages
        return pages
