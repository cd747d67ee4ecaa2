"""Pages of the places for units of layers: taken from the KV cache, given back, and left at rest in between."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from elastic.errors import CapacityError, ConfigError
from elastic.hooks.actions import Lender
from elastic.hooks.layer import LayerWeights
from elastic.memory.block import Block
from elastic.memory.copying import Pace
from elastic.memory.pool import PagePool


class Tenancy:
    """What units have left stays mapped as long as nobody needs the pages: for those that return."""

    def __init__(self, pools: Iterable[PagePool], lender: Lender) -> None:
        self._pools = {pool.name: pool for pool in pools}
        self._lender = lender
        self._resting: dict[object, Block] = {}

    def close(self) -> None:
        """Give up what rests."""
        while self._resting:
            self._resting.popitem()[1].close()

    def pool(self, place: str) -> PagePool:
        """Raises `ConfigError` for what is no place of the model."""
        if place not in self._pools:
            raise ConfigError(
                f"place {place!r} is none of this model's, which are {sorted(self._pools)}; "
                "wrap(model, places=…) opens them"
            )
        return self._pools[place]

    def require_room(self, place: str, pages: int) -> None:
        """Raises `CapacityError` if the KV cache could not do without these pages."""
        if not self._lender.could_claim(place, pages):
            raise self._no_room(place, pages)

    def take(self, unit: LayerWeights, pace: Pace | None = None) -> None:
        """Have the unit's block filled with pages, made at a pace. Raises `CapacityError`; then nothing has changed."""
        place, pages = unit.pool.name, unit.held_pages
        if not self._lender.claim(place, pages):
            raise self._no_room(place, pages)
        left = self._resting.pop(_key(unit), None)
        if left is not None:
            unit.blocks[unit.form.key] = left
        try:
            unit.block_for(unit.form).fill(unit.owner, pace)
        except BaseException:
            self._lender.lend(place, pages)
            raise

    def settle(self, place: str, pages: int) -> None:
        """Weights of so many pages have come to stay, or gone for good (below zero)."""
        self._lender.settle(place, pages)

    def narrow(self, unit: LayerWeights, rest: LayerWeights) -> int:
        """A unit has become `rest`, in the same block; returns the pages that are free now."""
        settle(unit)
        block = unit.blocks.pop(unit.form.key)
        _close(unit)
        gone = [lies for name in unit.slots if name not in rest.slots for lies in unit.form.entries_of(name)]
        return block.narrow(gone, partial(self._lender.lend, unit.pool.name))

    def give_up(self, unit: LayerWeights) -> int:
        """A unit is no more; returns the pages that are free now."""
        settle(unit)
        block = unit.blocks.pop(unit.form.key)
        _close(unit)
        if not block.hide():
            return block.abandon(partial(self._lender.lend, unit.pool.name))
        block.rest()
        key = _key(unit)
        earlier, self._resting[key] = self._resting.get(key), block
        if earlier is not None:
            earlier.close()
        return block.pages

    def lend(self, unit: LayerWeights, pages: int) -> None:
        """The KV cache of the unit's place may have these pages."""
        self._lender.lend(unit.pool.name, pages)
        unit.pool.tell()

    def _no_room(self, place: str, pages: int) -> CapacityError:
        pool = self._pools[place]
        return CapacityError(
            f"place {place} has no room for these weights beside its KV cache; choose fewer, or raise its budget",
            requested_bytes=pages * pool.page_bytes,
            free_bytes=pool.free_pages * pool.page_bytes,
            total_bytes=pool.budget_pages * pool.page_bytes,
        )


def settle(unit: LayerWeights) -> None:
    """Return when nothing on the device reads the unit's pages any more."""
    if unit.pool.backend.device.type == "cuda":
        torch.cuda.synchronize(unit.pool.backend.device)


def _key(unit: LayerWeights) -> object:
    """What a block is good for."""
    return unit.index, unit.pool.name, unit.form.key, tuple(unit.form.layout.parameters.items())


def _close(unit: LayerWeights) -> None:
    """Blocks of forms that it had before: at rest."""
    while unit.blocks:
        unit.blocks.popitem()[1].close()
