"""Layers whose KV comes and goes on a GPU, while kernels that read and write it are queued."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
import torch

from elastic.cluster.peers.hub import PeerHub
from elastic.cluster.peers.memory.server import MappedPlace
from elastic.engines.core.kv_state import KVFormat, KVSource, LayersKV, SectorPages
from elastic.engines.executor.kv_copy import BlockCopier, copy_layers
from elastic.kvcache.storage.guest import GuestMemory
from elastic.kvcache.storage.paged import BlockMemory
from elastic.kvcache.storage.pool import KVPool
from elastic.kvcache.storage.sector_space import BlockGroup, SectorSpace
from elastic.memory.backends.cuda import CudaBackend
from elastic.memory.backends.memfd import MemfdBackend
from elastic.memory.backends.streams import new_stream, on_stream
from elastic.memory.pages.page_pool import PagePool
from elastic.types import RankMemory

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("no_violations")]
TWO_DEVICES = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="there is one CUDA device")
BLOCKS = 4
"""In a sector of a layer, which is a page."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def kv_pool(stack: ExitStack, device: str, pages: int = 48) -> KVPool:
    backend = MemfdBackend(2 << 20) if device == "cpu" else CudaBackend(torch.device(device))
    pool = PagePool(f"{device}#kv", backend, pages * backend.page_bytes, ready_pages=0)
    kv = KVPool(pool, pages * backend.page_bytes, idle_share=1.0, ready_share=0)
    stack.callback(pool.close)
    stack.callback(kv.close)
    return kv


def home_of(stack: ExitStack, kv: KVPool, sectors: int) -> BlockMemory:
    """A memory of three layers with sectors mapped."""
    memory = BlockMemory(kv, [BlockGroup((0, 1, 2), kv.pool.page_bytes // BLOCKS)])
    stack.callback(memory.close)
    for _ in range(sectors):
        memory.allocate(0)
    return memory


def guest_of(stack: ExitStack, kv: KVPool, home: BlockMemory, layers: tuple[int, ...]) -> GuestMemory:
    """The memory of a guest with room for four sectors; those of the home are mapped."""
    guest = GuestMemory(kv, [ranges.group for ranges in home.groups], home.sectors)
    stack.callback(guest.close)
    guest.allot(4)
    guest.map(home.mapped_sectors)
    guest.add_layers(layers)
    return guest


def content(memory: SectorSpace, layer: int, sector: int) -> torch.Tensor:
    """What is in a sector of a layer, [bytes]."""
    nbytes = memory.kv.pool.page_bytes
    return memory.groups[0].view(layer, torch.uint8)[sector * nbytes : (sector + 1) * nbytes]


def block_form(kv: KVPool) -> KVFormat:
    return KVFormat(1, "head_centric", "float32", 1, kv.pool.page_bytes // BLOCKS // 8, (((0, 1, 2), None),))


@contextmanager
def queued(device: torch.device, side: bool) -> Iterator[None]:
    """Queue what is done on a stream that pages are used on: the default one, or one beside it."""
    with on_stream(new_stream(device) if side else None):
        yield


@pytest.mark.parametrize("side", [False, True])
def test_layers_leave_and_come_when_what_uses_them_is_over(stack: ExitStack, side: bool) -> None:
    kv = kv_pool(stack, "cuda:0")
    memory = home_of(stack, kv, 3)
    sectors = [sector for _, sector in memory.mapped_sectors]
    with queued(kv.device, side):
        for layer in (0, 1, 2):
            for sector in sectors:
                content(memory, layer, sector).fill_(layer + 1)
        total = sum(content(memory, 1, sector).sum() for sector in sectors)
        memory.remove_layers((1,))
        other = memory.allocate(0)  # on pages that were the layer's
        content(memory, 0, other).fill_(9)
        memory.add_layers((1,))
        content(memory, 1, other).fill_(7)
        assert int(total) == 2 * 3 * kv.pool.page_bytes
        assert bool((content(memory, 1, other) == 7).all())
        for layer in (0, 2):
            assert all(bool((content(memory, layer, sector) == layer + 1).all()) for sector in sectors)
    memory.check()


@pytest.mark.parametrize("side", [False, True])
def test_a_guests_sectors_go_to_others_when_what_uses_them_is_over(stack: ExitStack, side: bool) -> None:
    kv = kv_pool(stack, "cuda:0")
    home = home_of(stack, kv_pool(stack, "cuda:0"), 3)
    guest = guest_of(stack, kv, home, (1, 2))
    first, *rest = [sector for _, sector in home.mapped_sectors]
    with queued(kv.device, side):
        for layer in (1, 2):
            for sector in (first, *rest):
                content(guest, layer, sector).fill_(layer)
        total = content(guest, 2, first).sum()
        guest.unmap([(0, first)])
        guest.map([(0, first + 3)])
        content(guest, 2, first + 3).fill_(5)
        guest.remove_layers((1,))
        guest.map([(0, first)])
        content(guest, 2, first).fill_(6)
        assert int(total) == 2 * kv.pool.page_bytes
        assert [int(content(guest, 2, sector)[-1]) for sector in (first, *rest, first + 3)] == [6, 2, 2, 5]
    guest.check()


@pytest.mark.parametrize("side", [False, True])
@pytest.mark.parametrize("way", ["trim", "cap", "close", "guest removes", "guest closes"])
def test_sectors_are_given_back_when_what_uses_them_is_over(stack: ExitStack, way: str, side: bool) -> None:
    kv = kv_pool(stack, "cuda:0")
    home = home_of(stack, kv, 2)
    guest = guest_of(stack, kv_pool(stack, "cuda:0"), home, (1, 2))
    memory: SectorSpace = guest if way.startswith("guest") else home
    (_, sector), _ = home.mapped_sectors
    with queued(kv.device, side):
        total = content(memory, 1, sector).fill_(3).sum()
        home.free(0, sector)
        give_back: dict[str, Callable[[], object]] = {
            "trim": lambda: home.trim(1),
            "cap": lambda: home.set_cap(1),
            "close": home.close,
            "guest removes": lambda: guest.remove_layers((1,)),
            "guest closes": guest.close,
        }
        give_back[way]()
    assert (0, sector) not in memory.mapped_sectors or 1 not in memory.layers
    assert int(total) == 3 * kv.pool.page_bytes


@pytest.mark.parametrize("side", [False, True])
@pytest.mark.parametrize("there", ["cuda:0", pytest.param("cuda:1", marks=TWO_DEVICES)])
def test_layers_are_copied_behind_what_writes_them_there_and_reads_them_here(
    stack: ExitStack, there: str, side: bool
) -> None:
    home = home_of(stack, kv_pool(stack, there), 3)
    kv = kv_pool(stack, "cuda:0")
    guest = guest_of(stack, kv, home, (1, 2))
    sectors = [sector for _, sector in home.mapped_sectors]
    hubs = {rank: stack.enter_context(closing(PeerHub(rank, b"key"))) for rank in "ab"}
    hubs["b"].meet({"a": hubs["a"].address})
    hubs["a"].memory.serve([home.kv.pool])
    form = block_form(kv)
    served = RankMemory("a", home.kv.pool.name)
    with queued(kv.device, side):
        before = [content(guest, layer, sector).fill_(3).sum() for layer in (1, 2) for sector in sectors]
    with queued(home.kv.device, side):
        for layer in (1, 2):
            for sector in sectors:
                content(home, layer, sector).fill_(10 * layer + sector)
    source = LayersKV(None, kv.pool.page_bytes, form, home.layer_pages((1, 2)), served)
    blocks: Any = ([sectors[1] * BLOCKS + 1],)
    assert copy_layers(guest, source, (1, 2), blocks, peers=hubs["b"]) == 2 * form.block_bytes
    assert content(guest, 1, sectors[1])[:: form.block_bytes].tolist() == [3, 10 + sectors[1], 3, 3]
    copy_layers(guest, source, (1, 2), peers=hubs["b"])
    with queued(kv.device, side=True):  # it is there on return, for any stream
        for layer in (1, 2):
            for sector in sectors:
                assert bool((content(guest, layer, sector) == 10 * layer + sector).all())
    assert {int(total) for total in before} == {3 * kv.pool.page_bytes}


@pytest.mark.parametrize("side", [False, True])
def test_blocks_are_copied_from_a_cpu_behind_what_reads_them_here(stack: ExitStack, side: bool) -> None:
    """And they are there on return, for whatever is queued next on any stream."""
    home, memory = home_of(stack, kv_pool(stack, "cpu"), 1), home_of(stack, kv_pool(stack, "cuda:0"), 1)
    (sector,), (target,) = ([sector for _, sector in each.mapped_sectors] for each in (home, memory))
    for layer in home.layers:
        content(home, layer, sector).fill_(layer + 1)
    file, pages = home.kv.pool.backend.shared_file(), home.groups[0].pages_of(sector)
    assert file is not None
    source = KVSource(file, home.kv.pool.page_bytes, block_form(home.kv), (SectorPages(0, sector, pages),))
    with queued(memory.kv.device, side):
        before = [content(memory, layer, target).fill_(7).sum() for layer in memory.layers]
    with closing(BlockCopier(memory, source, lambda: True)) as copier:
        copier.copy(0, [(sector * BLOCKS + i, target * BLOCKS + i) for i in range(1, BLOCKS)])
    with queued(memory.kv.device, side=True):
        found = [content(memory, layer, target).view(BLOCKS, -1).amax(1).tolist() for layer in memory.layers]
    assert found == [[7, *[layer + 1] * (BLOCKS - 1)] for layer in memory.layers]
    assert [int(total) for total in before] == [7 * memory.kv.pool.page_bytes] * len(memory.layers)


@pytest.mark.parametrize("side", [False, True])
@pytest.mark.parametrize("how", ["sent", "copied to the host", "copied beside"])
def test_pages_are_given_to_other_ranks_behind_what_writes_them(stack: ExitStack, how: str, side: bool) -> None:
    memory = home_of(stack, kv_pool(stack, "cuda:0"), 1)
    ((_, sector),) = memory.mapped_sectors
    (page,), nbytes = memory.layer_pages((1,))[1][sector], memory.kv.pool.page_bytes
    place, pieces = MappedPlace(memory.kv.pool), [(page * nbytes + start, 100) for start in (0, nbytes // 2)]
    here, there = (stack.enter_context(end) for end in socket.socketpair())
    taken = torch.zeros(200, dtype=torch.uint8, device="cuda:0" if how == "copied beside" else "cpu")
    with queued(memory.kv.device, side):
        content(memory, 1, sector).fill_(9)
    if how == "sent":
        place.send(here, pieces)
        taken.copy_(torch.frombuffer(bytearray(there.recv(200, socket.MSG_WAITALL)), dtype=torch.uint8))
    else:
        place.copy(taken.split(100), pieces)
    with queued(memory.kv.device, side=True):  # it is there on return, for any stream
        assert taken.tolist() == [9] * 200
