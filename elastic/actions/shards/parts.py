"""Parts of a layer on their way: their pages come and go under the block that the layer's other parts lie in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from elastic.actions.pages.broker import PageBroker
from elastic.errors import CapacityError
from elastic.memory.weight_buffer import WeightBuffer
from elastic.weights.layer import WeightUnit


def release_parts(unit: WeightUnit, broker: PageBroker) -> int:
    """Let go of what a unit's block has besides the parts that are here; return the pages that are free now."""
    assert unit.cut is not None, "a layer of one part is retired"
    block, common = unit.blocks[unit.full.key], unit.cut.common(unit.layout).parameters
    left = [name for name in list(block.shown) if name not in common]
    kept_pages, to_cache = unit.shard_pages.numbers(unit.shards_here), partial(broker.give_to_cache, unit.pool.name)
    return block.shrink(left, to_cache, keep=kept_pages)


def claim_parts(
    unit: WeightUnit, shards: frozenset[int], broker: PageBroker, take: Callable[[int], bool]
) -> int | None:
    """Have pages in a unit's block for the parts that it will have; return how many were taken; None: too few are free.

    What they share with parts that are here has pages already, and so has what tensors outside still show. `take` takes
    pages of the KV cache, and returns whether it can do without.
    """
    pages = unit.shard_pages
    new = pages.numbers(shards) - pages.numbers(unit.shards_here)
    block = _block_of_parts(unit)
    taken = len(new) - block.adopt(new, unit.owner)
    if not take(taken):
        _give_back(unit, broker)
        return None
    try:
        block.extend(unit.owner)
    except BaseException as error:
        unmapped = block.unmapped_pages
        _give_back(unit, broker)
        broker.give_to_cache(unit.pool.name, unmapped)
        if not isinstance(error, CapacityError) or unit.pool.free_pages >= taken:
            raise
        return None  # another model has the pages
    return taken


def give_back_parts(unit: WeightUnit, coming: frozenset[int], broker: PageBroker) -> None:
    """Give the pages of parts back that do not come after all; those of the parts that are here stay."""
    pieces = [piece.key for part in coming - unit.shards_here for piece in unit.pieces(part)]
    _give_back(unit, broker, pieces)


def _give_back(unit: WeightUnit, broker: PageBroker, pieces: Sequence[str] = ()) -> None:
    block, kept_shards = unit.blocks[unit.full.key], unit.shards_here
    shown = [name for name in list(block.shown) if name in pieces or not kept_shards]
    give_to_cache = partial(broker.give_to_cache, unit.pool.name)
    give_to_cache(block.shrink(shown, give_to_cache, keep=unit.shard_pages.numbers(kept_shards)))
    if not kept_shards:
        unit.blocks.pop(unit.full.key).close()


def _block_of_parts(unit: WeightUnit) -> WeightBuffer:
    """Return the block that a unit's parts lie in; an empty one for a layer of which there are none."""
    key = unit.full.key
    if not unit.shards_here:
        if key in unit.blocks:
            unit.blocks.pop(key).close()
        unit.blocks[key] = WeightBuffer(unit.pool, unit.nbytes, slots=())
    return unit.blocks[key]
