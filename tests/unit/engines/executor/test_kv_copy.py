"""Blocks from another memory file: which ones changed, and that each byte comes from where it lies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.engines.core.kv_state import KVFormat, KVSource, LayersKV, SectorPages
from elastic.engines.executor.block_layout import BlockLayout, BlockShape
from elastic.engines.executor.input_batch import BatchBlockTable
from elastic.engines.executor.kv_copy import BlockCopier, changed_blocks, copy_layers
from elastic.engines.executor.layer_groups import LayerGroup
from elastic.engines.executor.paged_cache import PagedCache
from elastic.errors import RankLost, StateError
from elastic.kvcache.storage.guest import GuestMemory
from elastic.kvcache.storage.paged import BlockMemory
from elastic.kvcache.storage.pool import KVPool
from elastic.kvcache.storage.sector_space import BlockGroup, SectorSpace
from elastic.memory.backends.memfd import MemfdBackend
from elastic.memory.backends.rank_memory import Pieces
from elastic.memory.backends.shared_file import OpenFile
from elastic.memory.pages.page_pool import PagePool
from elastic.memory.rate_limit import YieldingPace
from elastic.types import RankMemory


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
@pytest.mark.parametrize(("block_tokens", "paced"), [(8, False), (24, False), (48, False), (8, True), (48, True)])
def test_blocks_are_copied_between_memories_of_other_pages(
    pages: tuple[int, int], block_tokens: int, paced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setattr(YieldingPace, "LEAST", 2 * form.block_bytes)  # two blocks at once
    pace = YieldingPace(lambda timeout_s: True, lambda: 0.0) if paced else None
    with closing(BlockCopier(here, source, lambda: True, pace=pace)) as copier:
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
    nothing = BlockCopier(here, replace(source, sectors=()), lambda: True)
    with closing(nothing), pytest.raises(StateError, match=r"of 1 of 1 layers.* were at a rank that is lost"):
        nothing.copy(1, [(0, 0)])
    with closing(BlockCopier(here, source, lambda: False)) as unwanted, pytest.raises(StateError, match="given up"):
        unwanted.copy(0, [(blocks_of(there, 0)[0], blocks_of(here, 0)[0])])
    for memory in (there, here):
        memory.close()


def blocks_of(memory: BlockMemory, group: int) -> list[int]:
    size: Any = memory.blocks_per_sector(group)
    return [sector * size + i for sector in sorted(memory.groups[group].mapped) for i in range(size)]


FORM = KVFormat(8, "head_centric", "float32", 2, 8, (((0, 2), None), ((1,), None)))  # a block is 1 KiB


def filled(memory: SectorSpace, seed: int) -> dict[tuple[int, int], torch.Tensor]:
    """Fill all mapped sectors; return what is in them, by layer and sector."""
    fill, bytes_of = torch.Generator().manual_seed(seed), {}
    for layer in memory.layers:
        for group, sector in memory.mapped_sectors:
            if group == memory.group_of(layer):
                part = sector_of(memory, layer, sector)
                part[:] = torch.randint(256, part.shape, generator=fill, dtype=torch.uint8)
                bytes_of[layer, sector] = part.clone()
    return bytes_of


def sector_of(memory: SectorSpace, layer: int, sector: int) -> torch.Tensor:
    ranges = memory.groups[memory.group_of(layer)]
    nbytes = ranges.layer_pages * memory.kv.pool.page_bytes
    return ranges.view(layer, torch.uint8)[sector * nbytes : (sector + 1) * nbytes]


def layers_kv(memory: SectorSpace, *layers: int) -> LayersKV:
    pool = memory.kv.pool
    shared = pool.backend.shared_file()
    assert shared is not None
    return LayersKV(shared, pool.page_bytes, FORM, memory.layer_pages(layers))


def home_and_guest() -> tuple[BlockMemory, GuestMemory]:
    """A home with two sectors of each group, and a guest with all but one of them in its layers 1 and 2."""
    (home, _), (other, _) = memory_of(4096, FORM.block_bytes), memory_of(4096, FORM.block_bytes)
    for group in (0, 1, 0, 1):
        home.allocate(group)
    guest = GuestMemory(other.kv, [ranges.group for ranges in home.groups], home.sectors)
    guest.allot(4)
    guest.map(ref for ref in home.mapped_sectors if ref != (1, 3))
    guest.add_layers((1, 2))
    return home, guest


def test_layers_are_copied_whole_into_the_sectors_of_their_numbers() -> None:
    home, guest = home_and_guest()
    there, before = filled(home, 0), filled(guest, 1)
    copied = copy_layers(guest, layers_kv(home, 1, 2), (2,))
    assert copied == 2 * home.groups[0].layer_pages * 4096
    for (layer, sector), content in before.items():
        assert torch.equal(sector_of(guest, layer, sector), there[layer, sector] if layer == 2 else content)
    assert copy_layers(guest, layers_kv(home, 1, 2), (1, 2)) == copied + home.groups[1].layer_pages * 4096
    assert all(torch.equal(sector_of(guest, *key), there[key]) for key in before)


def test_only_the_blocks_that_are_named_are_copied_and_back() -> None:
    home, guest = home_and_guest()
    there, before = filled(home, 0), filled(guest, 1)
    size, nbytes = guest.blocks_per_sector(0), FORM.block_bytes
    sectors = sorted(home.groups[0].mapped)
    chosen = [sectors[0] * size + 1, sectors[0] * size + 2, sectors[1] * size]
    gone = home.sectors * size - 1  # a block of a sector that was given back
    copied = copy_layers(guest, layers_kv(home, 2), (2,), blocks=([*chosen, gone, chosen[0]], [0]))
    assert copied == 3 * nbytes
    for i, sector in enumerate(sectors):
        for block in range(size):
            here = sector_of(guest, 2, sector)[block * nbytes : (block + 1) * nbytes]
            source = there if sector * size + block in chosen else before
            assert torch.equal(here, source[2, sector][block * nbytes : (block + 1) * nbytes]), (i, block)
    home.remove_layers((2,))
    home.add_layers((2,))
    copy_layers(home, layers_kv(guest, 2), (2,))
    assert all(torch.equal(sector_of(home, 2, sector), sector_of(guest, 2, sector)) for sector in sectors)


def test_a_sector_is_not_unmapped_while_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    home, guest = home_and_guest()
    there = filled(home, 0)
    sectors = list(home.groups[0].mapped)
    read_into, threads = OpenFile.read_into, []

    def read_while_it_is_unmapped(file: OpenFile, address: int, offset: int, nbytes: int) -> None:
        threads.append(threading.Thread(target=guest.unmap, args=([(0, sectors[0])],)))
        threads[-1].start()
        threads[-1].join(0.05)
        assert threads[-1].is_alive()
        read_into(file, address, offset, nbytes)

    monkeypatch.setattr(OpenFile, "read_into", read_while_it_is_unmapped)
    copied = copy_layers(guest, layers_kv(home, 2), (2,))
    for thread in threads:
        thread.join()
    nbytes = home.groups[0].layer_pages * 4096
    assert copied == 2 * nbytes
    assert torch.equal(sector_of(guest, 2, sectors[1]), there[2, sectors[1]])
    assert (0, sectors[0]) not in guest.mapped_sectors


def test_a_copy_that_cannot_be_right_is_refused() -> None:
    home, guest = home_and_guest()
    source = layers_kv(home, 1, 2)
    block = sorted(home.groups[1].mapped)[1] * home.blocks_per_sector(1)
    assert (1, 3) not in guest.mapped_sectors
    with pytest.raises(StateError, match="sector 3 of group 1 is not mapped here"):
        copy_layers(guest, source, (1,), blocks=((), (block,)))
    with pytest.raises(StateError, match="layer 0 is not at its source"):
        copy_layers(guest, source, (0,))
    with pytest.raises(StateError, match="layer 0 is not here"):
        copy_layers(guest, layers_kv(home, 0), (0,))
    with pytest.raises(StateError, match="given up"):
        copy_layers(guest, source, (2,), wanted=lambda: False)
    with pytest.raises(StateError, match="blocks there have 2048 bytes"):
        copy_layers(guest, replace(source, format=replace(FORM, block_tokens=16)), (2,))
    with pytest.raises(StateError, match="both sides need one page_bytes"):
        copy_layers(guest, replace(source, page_bytes=8192), (2,))
    assert copy_layers(guest, source, ()) == 0


def test_a_copy_into_a_memory_that_is_closed_meanwhile_fails_in_words() -> None:
    """As where a rank ends in the middle of a copy."""
    home, guest = home_and_guest()

    def wanted() -> bool:
        guest.close()
        return True

    with pytest.raises(StateError, match="KV cache of layer 2 is not here"):
        copy_layers(guest, layers_kv(home, 1, 2), (2,), wanted=wanted)
    home.close()
    with pytest.raises(StateError, match="KV cache of layer 2 is not here"):
        home.groups[0].view(2, torch.uint8)


def test_a_cache_shows_the_layers_that_are_here() -> None:
    home, guest = home_and_guest()
    groups = [LayerGroup((0, 2), None), LayerGroup((1,), None)]
    layout = BlockLayout(BlockShape(8, 2, 8), "head_centric")
    tables = [BatchBlockTable(8, None) for _ in groups]
    cache = PagedCache(guest, tables, layout, torch.float32)
    assert sorted(cache.layers) == [1, 2]
    filled(guest, 0)
    sector = sorted(guest.groups[0].mapped)[0]
    cache.clear(0, np.array([sector * guest.blocks_per_sector(0)]))
    content = sector_of(guest, 2, sector)
    assert not content[: FORM.block_bytes].any()
    assert content[FORM.block_bytes :].any()
    guest.remove_layers((2,))
    cache.refresh()
    assert sorted(cache.layers) == [1]
    cache.clear(0, np.array([0]))
    guest.add_layers((0,))
    cache.refresh()
    assert {layer: cached.group for layer, cached in cache.layers.items()} == {0: 0, 1: 1}
    assert cache.layers[0].elements.shape == (home.sectors * home.blocks_per_sector(0) * layout.block_elements,)
    cache.close()
    for memory in (home, guest):
        memory.close()


# -- from a rank that no memory file leads to


class OtherRank:
    """`Peers` with one rank, which answers from its own memory file."""

    name = "here"

    def __init__(self, memory: SectorSpace) -> None:
        shared = memory.kv.pool.backend.shared_file()
        assert shared is not None
        self.file = shared
        self.asked: list[int] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def open_memory(self, memory: RankMemory, device: torch.device, *, coordinated: bool) -> AnsweringRank:
        self.coordinated = coordinated
        assert memory == RankMemory("there", "cpu#test")
        return AnsweringRank(self)


class AnsweringRank:
    waits, device = True, torch.device("cpu")

    def __init__(self, rank: OtherRank) -> None:
        self._rank = rank

    def read(self, address: int, pieces: Pieces) -> None:
        self._rank.asked.append(sum(count for _, count in pieces))
        self._rank.meanwhile()
        with closing(OpenFile(self._rank.file)) as file:
            file.read(address, pieces)

    def close(self) -> None:
        pass


def elsewhere(source: LayersKV) -> LayersKV:
    """The same memory as of another host."""
    assert source.file is not None
    return replace(source, file=replace(source.file, host="another"), memory=RankMemory("there", "cpu#test"))


def test_a_rank_of_another_host_is_asked_for_the_same() -> None:
    home, guest = home_and_guest()
    there, rank = filled(home, 0), OtherRank(home)
    for source in (elsewhere(layers_kv(home, 1, 2)), replace(elsewhere(layers_kv(home, 1, 2)), file=None)):
        filled(guest, 1)
        copied = copy_layers(guest, source, (1, 2), peers=rank)
        assert copied == sum(rank.asked) == (2 * home.groups[0].layer_pages + home.groups[1].layer_pages) * 4096
        assert len(rank.asked) == 2  # once for each layer
        assert all(torch.equal(sector_of(guest, *key), there[key]) for key in filled_keys(guest))
        rank.asked.clear()
    with pytest.raises(StateError, match="another"):
        copy_layers(guest, elsewhere(layers_kv(home, 2)), (2,))


def filled_keys(memory: SectorSpace) -> list[tuple[int, int]]:
    return [(layer, s) for layer in memory.layers for g, s in memory.mapped_sectors if g == memory.group_of(layer)]


def test_no_lock_is_held_while_another_rank_answers_and_sectors_that_went_are_passed_over() -> None:
    home, guest = home_and_guest()
    there, rank = filled(home, 0), OtherRank(home)
    first, second = sorted(home.groups[0].mapped)

    def unmap() -> None:
        thread = threading.Thread(target=guest.unmap, args=([(0, first)],))
        thread.start()
        thread.join(10)
        assert not thread.is_alive()

    rank.meanwhile = unmap
    nbytes = home.groups[0].layer_pages * 4096
    assert copy_layers(guest, elsewhere(layers_kv(home, 2)), (2,), peers=rank) == nbytes
    assert torch.equal(sector_of(guest, 2, second), there[2, second])
    rank.asked.clear()
    assert copy_layers(guest, elsewhere(layers_kv(home, 2)), (2,), peers=rank) == nbytes
    assert rank.asked == [nbytes]  # what is not here is not asked for
    block = first * home.blocks_per_sector(0)
    with pytest.raises(StateError, match="is not mapped here"):
        copy_layers(guest, elsewhere(layers_kv(home, 2)), (2,), ((block,), ()), peers=rank)


def test_a_rank_that_is_lost_ends_the_copy() -> None:
    home, guest = home_and_guest()
    rank = OtherRank(home)

    def die() -> None:
        raise RankLost("rank 'there' has gone", rank="there")

    rank.meanwhile = die
    with pytest.raises(RankLost):
        copy_layers(guest, elsewhere(layers_kv(home, 2)), (2,), peers=rank)


@pytest.mark.parametrize("network", [False, True])
def test_a_copy_with_a_pace_asks_ahead_of_each_chunk(network: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(YieldingPace, "LEAST", 2048)
    monkeypatch.setattr(YieldingPace, "MOST", 2048)
    home, guest = home_and_guest()
    there, rank, waited = filled(home, 0), OtherRank(home), []

    def idle(seconds: float) -> bool:
        waited.append(seconds)
        return True

    pace = YieldingPace(idle, lambda: 60.0)
    source = elsewhere(layers_kv(home, 2)) if network else layers_kv(home, 2)
    nbytes = copy_layers(guest, source, (2,), peers=rank, pace=pace)
    assert len(waited) == nbytes // 2048
    assert all(torch.equal(sector_of(guest, 2, s), there[2, s]) for s in home.groups[0].mapped)
    if network:
        assert rank.coordinated
        copy_layers(guest, source, (2,), peers=rank)
        assert not rank.coordinated


def test_scattered_blocks_of_a_file_have_one_turn_as_far_as_a_chunk_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    for bound in ("LEAST", "MOST"):
        monkeypatch.setattr(YieldingPace, bound, 2 * FORM.block_bytes)
    home, guest = home_and_guest()
    there, waited = filled(home, 0), []

    def idle(seconds: float) -> bool:
        waited.append(seconds)
        return True

    blocks = blocks_of(home, 0)[::2]
    pace = YieldingPace(idle, lambda: 60.0)
    nbytes = copy_layers(guest, layers_kv(home, 2), (2,), (blocks, ()), pace=pace)
    assert nbytes == len(blocks) * FORM.block_bytes
    assert len(waited) == -(-len(blocks) // 2)
    size = home.blocks_per_sector(0)
    for block in blocks:
        sector, place = divmod(block, size)
        own, theirs = sector_of(guest, 2, sector), there[2, sector]
        part = slice(place * FORM.block_bytes, (place + 1) * FORM.block_bytes)
        assert torch.equal(own[part], theirs[part])


@pytest.mark.parametrize("chunk_blocks", [None, 2, 100])
def test_blocks_that_another_rank_has_are_asked_for_together(
    chunk_blocks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as a chunk has, wherever they lie there and go here."""
    home, _ = home_and_guest()
    there, rank = filled(home, 0), OtherRank(home)
    here, _ = memory_of(8192, FORM.block_bytes)
    for group in (1, 0, 0):
        here.allocate(group)
    monkeypatch.setattr(YieldingPace, "LEAST", (chunk_blocks or 1) * FORM.block_bytes)
    pace = None if chunk_blocks is None else YieldingPace(lambda timeout_s: True, lambda: 0.0)
    sectors = tuple(SectorPages(i, s, g.pages_of(s)) for i, g in enumerate(home.groups) for s in g.mapped)
    source = KVSource(None, 4096, FORM, sectors, memory=RankMemory("there", "cpu#test"))
    pairs = list(zip(blocks_of(home, 0)[::2], reversed(blocks_of(here, 0)), strict=False))
    with closing(BlockCopier(here, source, lambda: True, peers=rank, pace=pace)) as copier:
        assert copier.copy(0, pairs) == sum(rank.asked) == 2 * len(pairs) * FORM.block_bytes
    assert rank.coordinated is (pace is not None)
    assert len(rank.asked) == 2 * -(-len(pairs) // min(chunk_blocks or len(pairs), len(pairs)))
    size = home.blocks_per_sector(0)
    for layer in (0, 2):
        local = here.groups[0].view(layer, torch.uint8)
        for block, target in pairs:
            content = there[layer, block // size][block % size * FORM.block_bytes :][: FORM.block_bytes]
            assert torch.equal(local[target * FORM.block_bytes :][: FORM.block_bytes], content)
    with pytest.raises(StateError, match="no rank serves it"):
        BlockCopier(here, source, lambda: True)
