"""What the KV memory of an engine's place could hold, for a fleet that shares it out among instances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.kvcache.storage.paged import BlockMemory


@dataclass(frozen=True)
class KVHeadroom:
    """Pages and sectors, at the limit that is in force."""

    pages: int
    """For the engine, and for other instances whose layers are computed here."""
    page_bytes: int
    sector_pages: tuple[int, ...]
    """Of each layer, or part of its KV heads, wherever it is, the pages of a sector in it."""
    sectors: int
    """For which there are addresses."""
    committed: int
    """Sectors that live requests have, and are promised."""
    held_bytes: tuple[int, ...]
    """Of each layer, or part of its KV heads, the bytes of blocks that requests have, or that are kept for reuse."""


def kv_room(memory: BlockMemory, held_blocks: Sequence[int]) -> KVHeadroom:
    """Return the room of an engine's memory, of which so many blocks, by group, are held."""
    with memory.lock:
        pages = {layer: group.layer_pages for group in memory.groups for layer in group.group.layers}
        held = {
            layer: count * group.group.block_bytes
            for group, count in zip(memory.groups, held_blocks, strict=True)
            for layer in group.group.layers
        }
        return KVHeadroom(
            pages=memory.kv.limits.open,
            page_bytes=memory.kv.pool.page_bytes,
            sector_pages=tuple(pages[layer] for layer in sorted(pages)),
            sectors=memory.sectors,
            committed=memory.sectors_in_use + memory.promised(),
            held_bytes=tuple(held[layer] for layer in sorted(held)),
        )
