"""Where layers begin when a model is wrapped: a place for each, and which are absent."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.errors import CapacityError
from elastic.memory.page_pool import PagePool
from elastic.weights.layer import WeightUnit

KV_SHARE = 0.1
"""The share of a budget too small for all weights that is left to the KV cache."""


def spread(sizes: Sequence[int], pools: Sequence[PagePool]) -> list[PagePool]:
    """A place for each layer, by its bytes: in the order of the places, as many layers as leave room for a KV cache.

    Layers that fit nowhere go to the first place, which streams them.
    """
    room = [int((1 - KV_SHARE) * pool.free_pages) for pool in pools]
    chosen, at = [], 0
    for size in sizes:
        while at < len(pools) and pools[at].pages_for(size) > room[at]:
            at += 1
        if at < len(pools):
            room[at] -= pools[at].pages_for(size)
        chosen.append(pools[at] if at < len(pools) else pools[0])
    return chosen


def choose_absent(
    layers: Sequence[WeightUnit], free_pages: int, stage_pages: int, *, least_stages: int = 1
) -> tuple[int, list[WeightUnit]]:
    """The stages for a place with `free_pages`, and the layers that find no room there, evenly spread.

    `least_stages`: where all layers find room.

    Raises `CapacityError` if not even one layer at a time fits.
    """
    needed = sum(layer.pages for layer in layers)
    if needed + stage_pages <= free_pages:
        return min(least_stages, len(layers)), []
    if needed <= free_pages:
        return 0, []
    for count in range(1, len(layers) + 1):
        absent = [layers[i * len(layers) // count] for i in range(count)]
        stages = min(2, count)
        left = free_pages - stages * stage_pages - needed + sum(layer.pages for layer in absent)
        if left >= KV_SHARE * free_pages:
            return stages, absent
    pool = layers[0].pool
    raise CapacityError(
        f"place {pool.name} is too small for this model, even with its layers in host memory: give it a larger budget",
        requested_bytes=(min(2, len(layers)) * stage_pages + int(KV_SHARE * free_pages)) * pool.page_bytes,
        free_bytes=free_pages * pool.page_bytes,
        total_bytes=pool.budget_pages * pool.page_bytes,
    )
