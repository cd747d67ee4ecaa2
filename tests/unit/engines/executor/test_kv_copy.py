"""Blocks from another memory file: which ones changed, and that each byte comes from where it lies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.engines.core.kv_state import KVFormat, KVSource, SectorPages
from elastic.engines.executor.kv_copy import BlockCopier, changed_blocks
from elastic.errors import StateError
from elastic.kvcache.storage.paged import BlockGroup, BlockMemory
from elastic.kvcache.storage.pool import KVPool
from elastic.memory.backends.memfd import MemfdBackend
from elastic.memory.backends.shared_file import open_shared
from elastic.memory.page_pool import PagePool


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 9), st.one_of(st.none(), st.integers(1, 20)))
def test_the_blocks_of_new_tokens_are_those_that_changed(start: int, more: int, size: int, window: int | None) -> None:
    positions = range(start, start + more)
    expected = sorted({(p if window is None else p % window) // size for p in positions})
    assert changed_blocks(start, start + more, size, window) == expected


def memory_of(page_bytes: int, block_bytes: int) -> tuple[BlockMemory, PagePool]:
    pool = PagePool("cpu#test", MemfdBackend(page_bytes), 96 * page_bytes, ready_pages=0)
    kv = KVPool(pool, 96 * page_bytes, idle_share=1.0, ready_share=0)
    return BlockMemory(kv, [BlockGroup((0, 2), block_bytes), BlockGroup((1,), block_bytes)]), pool


@pytest.mark.parametrize("pages", [(4096, 4096), (4096, 8192), (12288, 4096)])
@pytest.mark.parametrize("block_tokens", [8, 24, 48])
def test_blocks_are_copied_between_memories_of_other_pages(pages: tuple[int, int], block_tokens: int) -> None:
    """48 tokens are 6 KiB: they lie across pages, which lie anywhere in the file."""
    form = KVFormat(block_tokens, "head_centric", "float32", 2, 8, (((0, 2), None), ((1,), None)))
    (there, pool), (here, _) = (memory_of(page_bytes, form.block_bytes) for page_bytes in pages)
    held = pool.allocate("other", 5)
    for memory in (there, here):
        for group in (0, 1, 0, 1):
            memory.allocate(group)
        pool.free(held if memory is there else [])
        for group in (1, 0):
            memory.allocate(group)
    fill = torch.Generator().manual_seed(0)
    for index, group in enumerate(there.groups):
        nbytes = there.blocks_per_sector(index) * form.block_bytes
        for layer in group.group.layers:
            for sector in group.mapped:
                part = group.view(layer, torch.uint8)[sector * nbytes : (sector + 1) * nbytes]
                part[:] = torch.randint(256, (nbytes,), generator=fill, dtype=torch.uint8)
    sectors = tuple(SectorPages(i, s, g.pages_of(s)) for i, g in enumerate(there.groups) for s in g.mapped)
    shared = pool.backend.shared_file()
    assert shared is not None
    source = KVSource(shared, pool.page_bytes, form, sectors)
    with open_shared(shared) as file:
        copier = BlockCopier(here, source, file, lambda: True)
        for index, group in enumerate(there.groups):
            pairs = list(zip(blocks_of(there, index), reversed(blocks_of(here, index)), strict=False))
            pairs += list(zip(blocks_of(there, index), blocks_of(here, index), strict=False))
            copied: dict[int, int] = {target: block for block, target in pairs}
            assert copier.copy(index, pairs) == len(pairs) * len(group.group.layers) * form.block_bytes
            for layer in group.group.layers:
                views = [m.groups[index].view(layer, torch.uint8) for m in (there, here)]
                for target, block in copied.items():
                    a, b = (
                        view[i * form.block_bytes : (i + 1) * form.block_bytes]
                        for view, i in zip(views, (block, target), strict=True)
                    )
                    assert torch.equal(a, b)
            assert copier.copy(index, []) == 0
        with pytest.raises(StateError, match="sector 90 of group 0 was not told"):
            copier.copy(0, [(90 * there.blocks_per_sector(0), 0)])
        nothing = BlockCopier(here, replace(source, sectors=()), file, lambda: True)
        with pytest.raises(StateError, match="the sectors of group 1 were not told"):
            nothing.copy(1, [(0, 0)])
        with pytest.raises(StateError, match="given up"):
            BlockCopier(here, source, file, lambda: False).copy(0, [(blocks_of(there, 0)[0], blocks_of(here, 0)[0])])
    for memory in (there, here):
        memory.close()


def blocks_of(memory: BlockMemory, group: int) -> list[int]:
    size: Any = memory.blocks_per_sector(group)
    return [sector * size + i for sector in sorted(memory.groups[group].mapped) for i in range(size)]
