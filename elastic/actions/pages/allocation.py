"""Pages of the places for units of layers: taken from the KV cache, given back, and left at rest in between."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from elastic.actions.pages.broker import PageBroker
from elastic.errors import CapacityError, ConfigError
from elastic.memory.page_pool import PagePool
from elastic.memory.rate_limit import RateLimiter
from elastic.memory.weight_buffer import WeightBuffer
from elastic.weights.layer import WeightUnit


class WeightPageAllocator:
    """What units have left stays mapped as long as nobody needs the pages: for those that return."""

    def __init__(self, pools: Iterable[PagePool], broker: PageBroker) -> None:
        self._pools = {pool.name: pool for pool in pools}
        self._broker = broker
        self._resting: dict[object, WeightBuffer] = {}

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
        if not self._broker.could_take(place, pages):
            raise self._no_room(place, pages)

    def take(self, unit: WeightUnit, pace: RateLimiter | None = None) -> None:
        """Have the unit's block filled with pages, made at a pace. Raises `CapacityError`; then nothing has changed."""
        place, pages = unit.pool.name, unit.held_pages
        if not self._broker.take_from_cache(place, pages):
            raise self._no_room(place, pages)
        left = self._resting.pop(_key(unit), None)
        if left is not None:
            unit.blocks[unit.precision.key] = left
        try:
            unit.block_for(unit.precision).allocate(unit.owner, pace)
        except BaseException:
            self._broker.give_to_cache(place, pages)
            raise

    def settle(self, place: str, pages: int) -> None:
        """Weights of so many pages have come to stay, or gone for good (below zero)."""
        self._broker.record_resident(place, pages)

    def narrow(self, unit: WeightUnit, rest: WeightUnit) -> int:
        """A unit has become `rest`, in the same block; returns the pages that are free now."""
        settle(unit)
        block = unit.blocks.pop(unit.precision.key)
        _close(unit)
        gone = [lies for name in unit.slots if name not in rest.slots for lies in unit.precision.stored_names(name)]
        return block.shrink(gone, partial(self._broker.give_to_cache, unit.pool.name))

    def give_up(self, unit: WeightUnit) -> int:
        """A unit is no more; returns the pages that are free now."""
        settle(unit)
        block = unit.blocks.pop(unit.precision.key)
        _close(unit)
        if not block.hide():
            return block.orphan(partial(self._broker.give_to_cache, unit.pool.name))
        block.make_reclaimable()
        key = _key(unit)
        earlier, self._resting[key] = self._resting.get(key), block
        if earlier is not None:
            earlier.close()
        return block.pages

    def lend(self, unit: WeightUnit, pages: int) -> None:
        """The KV cache of the unit's place may have these pages."""
        self._broker.give_to_cache(unit.pool.name, pages)
        unit.pool.notify()

    def _no_room(self, place: str, pages: int) -> CapacityError:
        pool = self._pools[place]
        return CapacityError(
            f"place {place} has no room for these weights beside its KV cache; choose fewer, or raise its budget",
            requested_bytes=pages * pool.page_bytes,
            free_bytes=pool.free_pages * pool.page_bytes,
            total_bytes=pool.budget_pages * pool.page_bytes,
        )


def settle(unit: WeightUnit) -> None:
    """Return when nothing on the device reads the unit's pages any more."""
    if unit.pool.backend.device.type == "cuda":
        torch.cuda.synchronize(unit.pool.backend.device)


def _key(unit: WeightUnit) -> object:
    """What a block is good for."""
    return unit.index, unit.pool.name, unit.precision.key, tuple(unit.precision.layout.parameters.items())


def _close(unit: WeightUnit) -> None:
    """Blocks of forms that it had before: at rest."""
    while unit.blocks:
        unit.blocks.popitem()[1].close()
