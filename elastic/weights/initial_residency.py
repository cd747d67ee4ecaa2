"""The residency of layers when a model is wrapped: a place for each, and those that are absent."""

from __future__ import annotations

import math
from collections.abc import Sequence

from elastic.errors import CapacityError
from elastic.memory.pages.page_pool import PagePool
from elastic.weights.layer import WeightUnit

KV_SHARE = 0.1
"""The share of a budget too small for all weights that is left to the KV cache."""


def spread(sizes: Sequence[int], pools: Sequence[PagePool]) -> list[PagePool]:
    """Choose a place for each layer, by its bytes: in their order, as many layers as leave room for a KV cache.

    Layers that fit nowhere belong to the first place, which streams them.
    """
    room = [int((1 - KV_SHARE) * pool.free_pages) for pool in pools]
    chosen, place = [], 0
    for size in sizes:
        while place < len(pools) and pools[place].pages_for(size) > room[place]:
            place += 1
        if place < len(pools):
            room[place] -= pools[place].pages_for(size)
        chosen.append(pools[place] if place < len(pools) else pools[0])
    return chosen


def choose_absent(
    layers: Sequence[WeightUnit], free_pages: int, buffer_pages: int, *, least_buffers: int = 1
) -> tuple[int, list[WeightUnit]]:
    """Choose the prefetch buffers of a place with `free_pages`, and the layers without room there, evenly spread.

    `buffer_pages` are those of one buffer; `least_buffers` is their number where all layers find room. Raises
    `CapacityError` if not even one layer at a time fits.
    """
    needed = sum(layer.pages for layer in layers)
    if needed + buffer_pages <= free_pages:
        return min(least_buffers, len(layers)), []
    if needed <= free_pages:
        return 0, []
    for count in range(1, len(layers) + 1):
        absent = [layers[i * len(layers) // count] for i in range(count)]
        buffers = min(2, count)
        kv_pages = free_pages - buffers * buffer_pages - needed + sum(layer.pages for layer in absent)
        if kv_pages >= KV_SHARE * free_pages:
            return buffers, absent
    raise too_small(layers[0].pool, least_pages(needed, len(layers), buffer_pages), free_pages)


def least_pages(needed: int, layers: int, buffer_pages: int) -> int:
    """Return the pages that a place must have for so many layers: for all that they need, or to stream them."""
    return min(needed, math.ceil(min(2, layers) * buffer_pages / (1 - KV_SHARE)))


def too_small(pool: PagePool, least: int, free_pages: int) -> CapacityError:
    """Return the error of a place that has fewer free pages than the least that its model needs."""
    budget = (pool.budget_pages - free_pages + least) * pool.page_bytes
    return pool.shortage(
        f"place {pool.name} is too small for this model, even with its layers in host memory: give it a larger budget, "
        f"at least {budget:,} bytes in pages of {pool.page_bytes:,}, and what its KV cache is to have",
        least,
        free_pages,
    )
