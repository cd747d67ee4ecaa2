"""The actions that move a layer's weights out of its place and back: prepare beside forwards, flip, retire."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from elastic.errors import CapacityError, ConfigError, StateError
from elastic.hooks.layer import LayerWeights
from elastic.hooks.streaming import MOST_STAGES
from elastic.hooks.weights import ModelWeights
from elastic.types import Change, PlanStep, Release, Restore

logger = logging.getLogger(__name__)


class Lender(Protocol):
    """The other tenant of the pages: the KV cache."""

    def lend(self, place: str, pages: int) -> None: ...

    def claim(self, place: str, pages: int) -> bool: ...

    def reserve(self, place: str, pages: int) -> None: ...

    def could_claim(self, place: str, pages: int) -> bool: ...


@dataclass
class Prepared:
    """What an action will flip, and what it holds until then."""

    action: Release | Restore
    layers: list[LayerWeights] = field(default_factory=list)
    tensors: list[Mapping[str, torch.Tensor]] = field(default_factory=list)
    """Restore: what each layer will show."""
    versions: list[int] = field(default_factory=list)
    """Release: how often each layer's parameters had been written when the host store got them."""
    deferred: list[LayerWeights] = field(default_factory=list)
    moved_bytes: int = 0
    lent_bytes: int = 0
    """Restore: stages that the layers will not need."""
    committed: bool = False


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
        return prepared

    def commit(self, prepared: Prepared) -> None:
        """Flip the layers to the host store."""
        for layer, version in zip(prepared.layers, prepared.versions, strict=True):
            if layer.version() != version:
                raise StateError(f"the weights of {layer.name} were written while it was being released; try again")
        prepared.committed = True
        for layer in prepared.layers:
            layer.hide()

    def rollback(self, prepared: Prepared) -> None:
        """Flip back. The block still has everything."""
        if prepared.committed:
            for layer in prepared.layers:
                if layer.absent and layer.block is not None:
                    layer.show_block()

    def finish(self, prepared: Prepared) -> Change:
        """Retire the blocks: their pages are KV capacity, but for what stages need and what tensors outside show."""
        released = retained = 0
        for place, layers in _by_place(prepared.layers).items():
            freed = [_retire(layer, self._lender) for layer in layers]
            pages = sum(freed) + _resize_stages(self._weights, place)
            self._lender.lend(place, pages)
            size = layers[0].pool.page_bytes
            released += pages * size
            retained += sum(layer.pages - pages for layer, pages in zip(layers, freed, strict=True)) * size
            layers[0].pool.tell()
        self._waiting.drop(self._weights.layers[i] for i in prepared.action.layers)
        done = tuple(layer.index for layer in prepared.layers)
        return Change("applied", done, (), prepared.moved_bytes, released, retained)

    def pending(self) -> None:
        """A release is never deferred."""

    def _check(self, action: Release) -> list[LayerWeights]:
        layers = [self._weights.layers[i] for i in action.layers]
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
        for place in _by_place(layers):
            streamer = self._weights.streamers[place]
            absent = sum(w.absent or w in layers for w in self._weights.layers if w.pool.name == place)
            pages += max(0, min(MOST_STAGES, absent) - streamer.stages) * streamer.stage_pages
        return pages


class RestoreMechanism:
    """`Restore`: check, prepare, commit, roll back, finish."""

    def __init__(self, weights: ModelWeights, lender: Lender, waiting: Waiting) -> None:
        self._weights = weights
        self._lender = lender
        self._waiting = waiting

    def foresee(self, action: Restore) -> PlanStep:
        """What the action would do if nothing changed until then."""
        layers = self._absent(action)
        pages = sum(layer.pages for layer in layers)
        fits = all(
            self._lender.could_claim(place, sum(layer.pages for layer in here))
            for place, here in _by_place(layers).items()
        )
        moved = sum(layer.nbytes for layer in layers)
        return PlanStep(action, "applied" if fits else "deferred", moved, -pages, pages, 0.0)

    def prepare(self, action: Restore) -> Prepared:
        """For each layer: pages from the KV cache, and the bytes copied into them. Layers without pages wait."""
        prepared = Prepared(action)
        try:
            prepared.lent_bytes = self._spare_stages(action)
            for layer in self._absent(action):
                self._prepare_one(layer, prepared)
        except BaseException:
            self.rollback(prepared)
            raise
        return prepared

    def commit(self, prepared: Prepared) -> None:
        """Flip the layers to their blocks."""
        prepared.committed = True
        for layer, tensors in zip(prepared.layers, prepared.tensors, strict=True):
            layer.show(tensors)
        prepared.tensors.clear()

    def rollback(self, prepared: Prepared) -> None:
        """Give the pages back."""
        for layer in prepared.layers:
            if prepared.committed and not layer.absent:
                layer.hide()
        prepared.tensors.clear()
        for layer in reversed(prepared.layers):
            self._lender.lend(layer.pool.name, _retire(layer, self._lender))
            layer.pool.tell()
        for place in _by_place(prepared.layers):
            self._lender.lend(place, _resize_stages(self._weights, place))
        prepared.layers.clear()

    def finish(self, prepared: Prepared) -> Change:
        """Drop what stages have of the layers, and the stages that are one too many; note who waits."""
        gained = prepared.lent_bytes
        for place, layers in _by_place([*prepared.layers, *prepared.deferred]).items():
            for layer in prepared.layers:
                self._weights.streamer(layer).forget(layer)
            spare = _resize_stages(self._weights, place)
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

    def _absent(self, action: Restore) -> list[LayerWeights]:
        return [layer for layer in (self._weights.layers[i] for i in action.layers) if layer.absent]

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
        prepared.tensors.append(block.show(layer.layout))
        self._weights.streamer(layer).copier.start(layer.sources(prepared.tensors[-1])).finish()
        prepared.moved_bytes += layer.nbytes

    def _spare_stages(self, action: Restore) -> int:
        """Layers that return need fewer stages, and may need their pages; returns the bytes."""
        lent = 0
        returning = self._absent(action)
        for place, layers in _by_place(returning).items():
            staying = sum(w.absent for w in self._weights.layers if w.pool.name == place) - len(layers)
            streamer = self._weights.streamers[place]
            spare = streamer.resize(min(streamer.stages, max(1, staying)))
            self._lender.lend(place, spare)
            lent += spare * streamer.pool.page_bytes
        return lent


class Waiting:
    """The layers whose restore is deferred. The KV cache keeps their pages from new caches."""

    def __init__(self, lender: Lender) -> None:
        self._lender = lender
        self.layers: tuple[LayerWeights, ...] = ()

    def add(self, layers: list[LayerWeights]) -> None:
        self._set((*self.layers, *(layer for layer in layers if layer not in self.layers)))

    def drop(self, layers: Iterable[LayerWeights]) -> None:
        gone = set(layers)
        self._set(tuple(layer for layer in self.layers if layer not in gone))

    def _set(self, layers: tuple[LayerWeights, ...]) -> None:
        places = {layer.pool.name for layer in (*self.layers, *layers)}
        self.layers = layers
        for place in places:
            self._lender.reserve(place, sum(layer.pages for layer in layers if layer.pool.name == place))


def _by_place(layers: Iterable[LayerWeights]) -> dict[str, list[LayerWeights]]:
    places: dict[str, list[LayerWeights]] = {}
    for layer in layers:
        places.setdefault(layer.pool.name, []).append(layer)
    return places


def _retire(layer: LayerWeights, lender: Lender) -> int:
    """The layer's block is not read any more; returns the pages that are free now."""
    block, place = layer.block, layer.pool.name
    assert block is not None
    if layer.pool.backend.device.type == "cuda":
        torch.cuda.synchronize(layer.pool.backend.device)
    if block.hide():
        block.rest()
        return layer.pages
    layer.block = None
    return block.abandon(lambda pages: lender.lend(place, pages))


def _resize_stages(weights: ModelWeights, place: str) -> int:
    """As many stages as the absent layers of a place need; returns the pages that others may have more or fewer."""
    streamer = weights.streamers[place]
    absent = sum(layer.absent for layer in weights.layers if layer.pool.name == place)
    wanted = max(1, min(MOST_STAGES, absent))
    try:
        return streamer.resize(wanted)
    except CapacityError as error:  # one stage will do, only nothing is fetched ahead
        logger.info("place %s has no room for another stage: %s", place, str(error))
        return 0
