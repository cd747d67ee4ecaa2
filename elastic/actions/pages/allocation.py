"""Pages of the places for weight units: taken from the KV cache, given back, and kept mapped in between."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TypeVar

from elastic.actions.pages.broker import PageBroker
from elastic.errors import CapacityError, ConfigError
from elastic.memory.pages.page_pool import PagePool
from elastic.memory.rate_limit import RateLimiter
from elastic.memory.weight_buffer import WeightBuffer
from elastic.weights.layer import WeightUnit

Pool = TypeVar("Pool")


class WeightPageAllocator:
    """Takes pages of places for weight units; keeps those they leave mapped, for their return, until needed."""

    def __init__(self, pools: Iterable[PagePool], broker: PageBroker) -> None:
        self.pools = {pool.name: pool for pool in pools}
        """By place."""
        self.shares = broker.shares
        self._broker = broker
        self._reclaimable: dict[object, WeightBuffer] = {}

    def close(self) -> None:
        """Give up the buffers that were kept."""
        while self._reclaimable:
            self._reclaimable.popitem()[1].close()

    def require_room(self, place: str, pages: int) -> None:
        """Raise `CapacityError` if the KV cache could not do without these pages."""
        if self.shares[place].shortfall(pages):
            raise self._no_room(place, pages)

    def take(self, unit: WeightUnit, copy_rate: RateLimiter | None = None) -> None:
        """Fill a unit's buffer with pages, made at the copy rate. Raises `CapacityError`; then nothing has changed."""
        place, pages = unit.pool.name, unit.held_pages
        if not self._broker.take_from_cache(place, pages):
            raise self._no_room(place, pages)
        kept = self._reclaimable.pop(_key(unit), None)
        if kept is not None:
            unit.blocks[unit.precision.key] = kept
        try:
            unit.block_for(unit.precision).allocate(unit.owner, copy_rate)
        except BaseException:
            while unit.blocks:
                unit.blocks.popitem()[1].close()
            self._broker.give_to_cache(place, pages)
            raise

    def shrink(self, unit: WeightUnit, rest: WeightUnit) -> int:
        """Leave of a unit's buffer what `rest` has of it; return the pages that are free now."""
        buffer = _detach_buffer(unit)
        gone = [stored for name in unit.slots if name not in rest.slots for stored in unit.precision.stored_names(name)]
        return buffer.shrink(gone, partial(self._broker.give_to_cache, unit.pool.name))

    def give_up(self, unit: WeightUnit) -> int:
        """Give up the buffer of a unit that is no more; return the pages that are free now."""
        buffer = _detach_buffer(unit)
        if not buffer.hide():
            return buffer.orphan(partial(self._broker.give_to_cache, unit.pool.name))
        buffer.make_reclaimable()
        key = _key(unit)
        earlier, self._reclaimable[key] = self._reclaimable.get(key), buffer
        if earlier is not None:
            earlier.close()
        return len(buffer.slots)

    def give_to_cache(self, unit: WeightUnit, pages: int) -> None:
        """Give pages to the KV cache of the unit's place."""
        self._broker.give_to_cache(unit.pool.name, pages)
        unit.pool.notify()

    def _no_room(self, place: str, pages: int) -> CapacityError:
        message = f"place {place} has no room for these weights beside its KV cache; choose fewer, or raise its budget"
        return self.pools[place].shortage(message, pages)


def find_pool(pools: Mapping[str, Pool], place: str) -> Pool:
    """Return the pool of a place among a model's, by name. Raises `ConfigError` for what is no place of the model."""
    if place not in pools:
        raise ConfigError(
            f"place {place!r} is none of this model's, which are {sorted(pools)}; wrap(model, places=…) opens them"
        )
    return pools[place]


def _key(unit: WeightUnit) -> object:
    """Tell buffers apart by what they can be used for again."""
    return unit.index, unit.pool.name, unit.precision.key, tuple(unit.precision.layout.parameters.items())


def _detach_buffer(unit: WeightUnit) -> WeightBuffer:
    """Take a unit's buffer from it; close those of earlier precisions."""
    buffer = unit.blocks.pop(unit.precision.key)
    while unit.blocks:
        unit.blocks.popitem()[1].close()
    return buffer
