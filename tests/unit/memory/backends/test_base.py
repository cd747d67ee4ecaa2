"""Both real backends keep one contract."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from elastic import CapacityError, ConfigError, StateError
from elastic.config import Place
from elastic.memory.backends import page_table_cache
from elastic.memory.backends.base import PageBackend, runs
from elastic.memory.backends.libc import libc
from elastic.memory.backends.memfd import MemfdBackend, huge_page_bytes
from elastic.memory.pages.mapped_storage import MappedStorage
from elastic.memory.places import make_backend
from support.child_process import end_of_fork
from support.faulty_backend import CALLS, FaultyBackend


@pytest.fixture(params=["", "/4MiB"], ids=["usual pages", "4 MiB"])
def backend(request: pytest.FixtureRequest, device: str) -> Iterator[PageBackend]:
    made = make_backend(Place.parse(device + request.param))
    yield made
    made.close()


def show(backend: PageBackend, address: int, pages: int) -> torch.Tensor:
    span = MappedStorage(address, pages * backend.page_bytes, backend.device, lambda: None)
    return span.tensor(torch.int64)


def test_a_mapped_page_keeps_its_bytes_wherever_it_is_shown(backend: PageBackend) -> None:
    size = 4 * backend.page_bytes
    first, second = backend.reserve(size), backend.reserve(size)
    backend.create([0, 1, 2])
    backend.map(first, [0, 1])
    show(backend, first, 2).fill_(7)
    backend.map(second, [1, 0])
    show(backend, second, 1).fill_(9)  # page 1, shown at two addresses
    assert show(backend, first, 2).unique().tolist() == [7, 9]
    backend.unmap(first, 2)
    backend.map(first, [2])
    assert show(backend, second, 2).unique().tolist() == [7, 9]
    backend.unmap(first, 1)
    backend.unmap(second, 2)
    backend.destroy([0, 1, 2])
    backend.unreserve(first, size)
    backend.unreserve(second, size)
    assert (backend.created, backend.mappings) == (0, 0)


def test_part_of_a_mapping_can_be_unmapped(backend: PageBackend) -> None:
    address = backend.reserve(8 * backend.page_bytes)
    backend.create(range(8))
    backend.map(address, range(8))
    show(backend, address, 8).copy_(torch.arange(backend.page_bytes))
    backend.unmap(address + 2 * backend.page_bytes, 3)
    backend.map(address + 3 * backend.page_bytes, [3])
    words = backend.page_bytes // 8
    assert torch.equal(show(backend, address, 2).cpu(), torch.arange(2 * words))
    assert show(backend, address + 3 * backend.page_bytes, 1)[0] == 3 * words
    assert show(backend, address + 5 * backend.page_bytes, 3)[0] == 5 * words
    for slot, count in [(5, 3), (3, 1), (0, 2)]:
        backend.unmap(address + slot * backend.page_bytes, count)
    assert backend.mappings == 0


@pytest.mark.parametrize("size", [4095, 5000])
def test_page_sizes_must_fit_the_system(size: int, device: str) -> None:
    with pytest.raises(ConfigError, match=str(size)):
        make_backend(Place(device, torch.device(device), page_bytes=size))


def test_runs_of_pages() -> None:
    assert runs([]) == []
    assert runs([4, 5, 6, 9, 8]) == [(4, 3), (9, 1), (8, 1)]


def test_a_bound_on_the_size_of_files_is_a_shortage_in_words() -> None:
    backend = MemfdBackend(4096)
    bound, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * 4096, most))
    try:
        with pytest.raises(CapacityError, match="refused to create pages: File too large"):
            backend.create(range(8))
        assert backend.created == 0
        backend.create(range(4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (bound, most))
    assert backend.created == 4
    backend.close()


def test_destroying_a_page_releases_its_memory() -> None:
    backend = MemfdBackend()
    backend.create(range(64))
    blocks = os.fstat(backend._file).st_blocks
    backend.destroy(range(10, 64))
    assert (blocks - os.fstat(backend._file).st_blocks) * 512 == 54 * backend.page_bytes
    backend.close()


@pytest.mark.parametrize("page_bytes", [64 << 10, 2 << 20])
def test_a_destroyed_page_comes_back_as_zeros(page_bytes: int) -> None:
    backend = MemfdBackend(page_bytes)
    address = backend.reserve(backend.page_bytes)
    for _ in range(2):
        backend.create([0])
        backend.map(address, [0])
        assert not show(backend, address, 1).any()
        show(backend, address, 1).fill_(-1)
        backend.unmap(address, 1)
        backend.destroy([0])
    backend.close()


def test_pages_are_found_again_where_they_are_parked() -> None:
    """Page tables move between ranges and back, in stretches and one by one; so does nothing else."""
    backend = MemfdBackend()
    first, second = backend.reserve(8 * backend.page_bytes), backend.reserve(8 * backend.page_bytes)
    backend.create(range(8))
    backend.map(first, range(8))
    show(backend, first, 8).copy_(torch.arange(backend.page_bytes))
    backend.unmap(first + 3 * backend.page_bytes, 2)
    backend.unmap(first, 3)
    assert backend._page_tables._filled[:8] == bytes([1, 1, 1, 1, 1, 0, 0, 0])
    backend.map(second, [4, 0, 1, 2, 3])
    backend.destroy([])
    words = backend.page_bytes // 8
    assert show(backend, second, 5)[::words].tolist() == [4 * words, 0, words, 2 * words, 3 * words]
    assert show(backend, first + 5 * backend.page_bytes, 3)[0] == 5 * words
    backend.unmap(second, 5)
    backend.destroy([0, 1, 2, 3, 4])
    backend.create([2])
    backend.map(second, [2])
    assert not show(backend, second, 1).any()
    backend.close()


def test_without_a_parking_place_pages_are_mapped_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = MemfdBackend()
    address = backend.reserve(4 * backend.page_bytes)
    backend.create(range(4))
    monkeypatch.setattr("elastic.memory.backends.page_table_cache._MOVE", 1 << 10)  # flags that no kernel knows
    backend.map(address, range(4))
    show(backend, address, 4).fill_(5)
    backend.unmap(address, 4)
    monkeypatch.undo()
    backend.map(address, [3, 2])
    assert show(backend, address, 2).unique().tolist() == [5]
    backend.close()


def test_pages_that_can_be_huge_pages_lie_where_the_system_shows_such_at_once() -> None:
    huge = huge_page_bytes(32 << 20) or mmap.PAGESIZE  # none: a system without
    backend = MemfdBackend(32 << 20)
    addresses = [backend.reserve(pages * backend.page_bytes) for pages in (1, 3, 2)]
    assert not [address for address in addresses if address % huge]
    for address, pages in zip(addresses, (1, 3, 2), strict=True):
        backend.unreserve(address, pages * backend.page_bytes)  # and nothing around it
    backend.close()
    assert huge_page_bytes(12 << 10) == 0
    assert MemfdBackend(12 << 10).pages_per_huge_page == 1


def test_small_pages_that_are_created_together_are_shown_moved_and_destroyed_one_by_one() -> None:
    backend = MemfdBackend()
    together, words = max(16, backend.pages_per_huge_page), backend.page_bytes // 8
    assert together in (16, (huge_page_bytes(backend.page_bytes) or mmap.PAGESIZE) // backend.page_bytes)
    address = backend.reserve(4 * together * backend.page_bytes)
    backend.create(range(3, 3 + 3 * together))  # two blocks are whole in it
    backend.map(address, range(together, 3 * together))
    show(backend, address, 2 * together).copy_(torch.arange(2 * together * words))
    before = os.fstat(backend._file).st_blocks
    backend.unmap(address + 5 * backend.page_bytes, 3)
    backend.destroy([together + 5, together + 7])
    assert before - os.fstat(backend._file).st_blocks == 2 * backend.page_bytes // 512
    backend.map(address + 5 * backend.page_bytes, [together + 6, 4])
    backend.create([together + 7])
    backend.map(address + 7 * backend.page_bytes, [together + 7])
    shown = show(backend, address, 2 * together).view(-1, words)[:, 0].tolist()
    assert shown == [words * n for n in (*range(5), 6)] + [0, 0] + [words * n for n in range(8, 2 * together)]
    backend.close()


def test_huge_pages_are_asked_for_where_whole_ones_lie_in_what_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorder:
        def __getattr__(self, name: str) -> object:
            return getattr(libc, name)

        def madvise(self, address: int, nbytes: int, advice: int) -> int:
            if advice == page_table_cache._COLLAPSE:
                asked.append(((address - backend._page_tables._address) >> 21, nbytes >> 21))
            return 0

    asked: list[tuple[int, int]] = []
    monkeypatch.setattr("elastic.memory.backends.memfd.huge_page_bytes", lambda page_bytes: 2 << 20)
    monkeypatch.setattr(page_table_cache, "libc", Recorder())
    backend = MemfdBackend()
    assert backend.pages_per_huge_page == 32
    backend.create([*range(1, 32), *range(63, 130)])
    assert asked == [(2, 1), (3, 1)]
    backend.create([0])
    assert len(asked) == 2
    backend.close()


def test_a_system_that_makes_no_huge_pages_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.memory.backends.memfd.huge_page_bytes", lambda page_bytes: 2 << 20)
    monkeypatch.setattr("elastic.memory.backends.page_table_cache._COLLAPSE", 1 << 10)  # advice that no kernel knows
    backend = MemfdBackend(2 << 20)
    address = backend.reserve(2 * backend.page_bytes)
    backend.create([0])
    monkeypatch.setattr("elastic.memory.backends.page_table_cache._COLLAPSE", -1)
    backend.create([1])
    backend.map(address, [1, 0])
    show(backend, address, 2).fill_(3)
    assert backend._page_tables._huge_bytes == 0
    assert os.fstat(backend._file).st_blocks * 512 == 2 * backend.page_bytes
    backend.close()


def test_pages_that_were_made_huge_before_the_system_refused_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = MemfdBackend(2 << 20)
    backend.create([0])
    refuses = backend._refuses
    monkeypatch.setattr(
        backend, "_refuses", lambda mode, first, count: (first == 7 and not mode) or refuses(mode, first, count)
    )
    with pytest.raises((CapacityError, StateError), match="create pages"):
        backend.create([2, 3, 7, 8])
    assert (backend.created, os.fstat(backend._file).st_blocks * 512) == (1, backend.page_bytes)
    backend.close()


@pytest.mark.parametrize("readable_gaps", [False, True])
@pytest.mark.slow
def test_unmapped_addresses_fault_or_read_as_zero(readable_gaps: bool) -> None:
    code = f"""
        import ctypes
        from elastic.memory.backends.memfd import MemfdBackend, huge_page_bytes
        backend = MemfdBackend()
        address = backend.reserve(4 * backend.page_bytes, readable_gaps={readable_gaps})
        backend.create([0, 1])
        backend.map(address, [0, 1], readable_gaps={readable_gaps})
        ctypes.memset(address, 1, 2 * backend.page_bytes)
        backend.unmap(address + backend.page_bytes, 1, readable_gaps={readable_gaps})
        print(ctypes.c_ubyte.from_address(address).value, flush=True)
        print(ctypes.c_ubyte.from_address(address + backend.page_bytes).value, flush=True)
    """
    status, said, _ = end_of_fork(code)
    assert said.split()[0] == "1"
    if readable_gaps:
        assert (status, said.split()) == (0, ["1", "0"])
    else:
        assert status == -11


def test_what_fails_half_way_leaves_everything_as_it_was() -> None:
    backend = FaultyBackend(MemfdBackend(4096))
    address = backend.reserve(8 * 4096)
    backend.create(range(4))
    backend.map(address, [3, 1, 0])
    shown = torch.frombuffer((ctypes.c_ubyte * (3 * 4096)).from_address(address), dtype=torch.uint8)
    shown.view(3, -1).copy_(torch.arange(3).view(3, 1))
    calls: list[tuple[str, Callable[[], object]]] = [
        ("create", lambda: backend.create(range(4, 8))),
        ("map", lambda: backend.map(address + 3 * 4096, [4, 6])),
        ("unmap", lambda: backend.unmap(address + 3 * 4096, 2)),
        ("destroy", lambda: backend.destroy([4, 6])),
    ]
    for name, call in calls:
        backend.fail(name, half_way=True)
        before = backend.created, backend.mappings
        with pytest.raises(CapacityError, match="injected"):
            call()
        assert (backend.created, backend.mappings) == before
        call()
    assert (backend.created, backend.mappings) == (6, 3)
    assert shown.view(3, -1)[:, -1].tolist() == [0, 1, 2]
    backend.close()


def test_the_faulty_backend_fails_the_chosen_call_and_no_other() -> None:
    backend = FaultyBackend(MemfdBackend())
    backend.fail("create", nth=2)
    backend.create([0])
    with pytest.raises(CapacityError, match="injected failure in create"):
        backend.create([1])
    assert backend.created == 1
    backend.create([1])
    with pytest.raises(ValueError, match="counted from 1"):
        backend.fail("map", 0)
    assert set(CALLS) == {"reserve", "unreserve", "create", "destroy", "map", "unmap"}
    backend.close()


def test_pages_made_by_several_threads_at_once_are_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may lengthen the memory file; none may shorten it again."""
    backend = MemfdBackend(4096)
    lengthened, truncate = threading.Event(), os.ftruncate

    def slow_for_the_first(file: int, size: int) -> None:
        if size == 4096:
            lengthened.wait(0.2)
        truncate(file, size)

    monkeypatch.setattr(os, "ftruncate", slow_for_the_first)
    first = threading.Thread(target=backend.create, args=([0],))
    first.start()
    backend.create([7])
    lengthened.set()
    first.join()
    assert os.fstat(backend._file).st_size == 8 * 4096
    assert backend.created == 2
    backend.close()
