"""Blocks in the way of a shrink are moved below the limit; the copies run at the beginning of the step.

Requests go on where they are: nothing is computed again (law 2). What other engines cannot do, they wait for requests
to end, or recompute them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from elastic.engines.vllm.kv.capacity import BlockCapacity

BlockTables = Sequence[Mapping[str, list[Any]]]
"""Of each group of layers: request -> its blocks, in order."""


@dataclass
class BlockMoves:
    """What was moved in one step."""

    copies: list[tuple[int, int]] = field(default_factory=list)
    """(from, to) block ids."""
    requests: set[str] = field(default_factory=set)
    """Those whose block tables have changed."""


def move_blocks(
    capacity: BlockCapacity, tables: BlockTables, scheduled: Set[str], fixed: Set[int] = frozenset()
) -> BlockMoves:
    """Move the blocks from the limit on, as far as free ones below it go, and withhold them.

    A block moves if each request that has it is in `scheduled`: the workers learn its new table in this step. `fixed`
    are block ids that this step copies or clears already. Of cached prefixes those stay that were used last.
    """
    moves = BlockMoves()
    if not capacity.leaving:
        return moves
    holders: dict[int, list[tuple[str, list[Any], int]]] = defaultdict(list)
    for table in tables:
        for request, blocks in table.items():
            for index, block in enumerate(blocks):
                if block.block_id in capacity.leaving:
                    holders[block.block_id].append((request, blocks, index))
    for block in [capacity.pool.blocks[number] for number in sorted(capacity.leaving - fixed)]:
        held = holders[block.block_id]
        if block.ref_cnt and block.ref_cnt == len(held) and all(request in scheduled for request, _, _ in held):
            _move_held(capacity, block, held, moves)
    _move_cached(capacity, fixed, moves)
    return moves


def _move_held(
    capacity: BlockCapacity, block: Any, held: Sequence[tuple[str, list[Any], int]], moves: BlockMoves
) -> None:
    """Have requests hold another block with the same contents."""
    new = capacity.take()
    if new is None:
        return
    capacity.pool.move_block_hashes(block, new)
    new.ref_cnt = block.ref_cnt
    for request, blocks, index in held:
        blocks[index] = new
        moves.requests.add(request)
    moves.copies.append((block.block_id, new.block_id))
    capacity.withhold_unused(block)


def _move_cached(capacity: BlockCapacity, fixed: Set[int], moves: BlockMoves) -> None:
    """Have the free blocks that stay hold what was used last, in its order, and withhold the others."""
    capacity.withdraw_freed(evict=False)
    pool, queue = capacity.pool, capacity.pool.free_block_queue
    free = [block for block in queue.get_all_free_blocks() if block.block_id not in fixed]  # in order of their use
    lost = sum(block.block_id in capacity.leaving for block in free)
    if not lost:
        return
    emptied = iter([block for block in free[:lost] if block.block_id < capacity.limit])
    for block in free[lost:]:
        queue.remove(block)
        if block.block_id in capacity.leaving:
            source, block = block, next(emptied)
            queue.remove(block)
            pool._maybe_evict_cached_block(block)
            pool.move_block_hashes(source, block)
            moves.copies.append((source.block_id, block.block_id))
            capacity.withhold_unused(source)
        queue.append(block)
    for block in free[:lost]:
        if block.block_id in capacity.leaving:
            capacity.withhold_free(block)
