"""Pages of a GPU: calls that the driver refuses half way, the caller's device, what others hold back."""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from elastic.errors import BackendUnavailable, CapacityError, StateError
from elastic.memory.backends.cuda import CudaBackend
from elastic.memory.pages.mapped_storage import MappedStorage
from support.child_process import in_child

pytestmark = pytest.mark.cuda
INVALID_VALUE = 1
TWO_DEVICES = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="there is one CUDA device")


@pytest.fixture
def backend() -> Iterator[CudaBackend]:
    backend = CudaBackend(torch.device("cuda:0"))
    yield backend
    backend.close()


def shown(backend: CudaBackend, address: int, pages: int) -> torch.Tensor:
    storage = MappedStorage(address, pages * backend.page_bytes, backend.device, lambda: None)
    return storage.tensor(torch.uint8)


def test_what_the_driver_refuses_to_unmap_half_way_is_all_mapped_as_before(
    backend: CudaBackend, simulator: ModuleType
) -> None:
    address = backend.reserve(4 * backend.page_bytes)
    backend.create(range(4))
    backend.map(address, [2, 0, 3, 1])
    shown(backend, address, 4).view(4, -1).copy_(torch.arange(4).view(4, 1))
    torch.cuda.synchronize()
    simulator.fail("cuMemUnmap", nth=3, code=INVALID_VALUE)
    with pytest.raises(StateError, match="refused cuMemUnmap"):
        backend.unmap(address, 4)
    assert backend.mappings == 4
    assert shown(backend, address, 4).view(4, -1)[:, -1].tolist() == [0, 1, 2, 3]
    backend.unmap(address, 4)
    assert backend.mappings == 0
    backend.unreserve(address, 4 * backend.page_bytes)


def test_what_the_driver_refuses_to_map_half_way_is_not_mapped(backend: CudaBackend, simulator: ModuleType) -> None:
    address = backend.reserve(3 * backend.page_bytes)
    backend.create(range(3))
    for call, nth in (("cuMemMap", 3), ("cuMemSetAccess", 1)):
        simulator.fail(call, nth)
        with pytest.raises(CapacityError) as error:
            backend.map(address, range(3))
        assert backend.mappings == 0
    assert error.value.requested_bytes == 3 * backend.page_bytes
    backend.map(address, range(3))
    backend.unmap(address, 3)
    backend.unreserve(address, 3 * backend.page_bytes)


def test_what_the_driver_refuses_to_release_half_way_exists_as_before(
    backend: CudaBackend, simulator: ModuleType
) -> None:
    free = torch.cuda.mem_get_info()[0]
    backend.create(range(4))
    simulator.fail("cuMemRelease", nth=3, code=INVALID_VALUE)
    with pytest.raises(StateError, match="refused cuMemRelease"):
        backend.destroy(range(4))
    assert backend.created == 4
    assert torch.cuda.mem_get_info()[0] == free - 4 * backend.page_bytes
    backend.destroy(range(4))
    assert torch.cuda.mem_get_info()[0] == free


def test_memory_that_torch_has_freed_and_keeps_is_there_for_pages(backend: CudaBackend, simulator: ModuleType) -> None:
    kept = torch.empty(32 << 20, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    del kept
    reserved = torch.cuda.memory_reserved(0)
    simulator.fail("cuMemCreate", nth=3)
    backend.create(range(4))
    assert backend.created == 4
    assert torch.cuda.memory_reserved(0) <= reserved - (32 << 20)


def test_an_error_says_how_much_was_asked_for(
    backend: CudaBackend, simulator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: simulator.fail("cuMemCreate", nth=2))
    simulator.fail("cuMemCreate", nth=3)
    with pytest.raises(CapacityError, match="out of memory in cuMemCreate") as error:
        backend.create(range(4))
    assert error.value.requested_bytes == 4 * backend.page_bytes
    assert backend.created == 0
    simulator.fail("cuMemAddressReserve")
    with pytest.raises(CapacityError) as error:
        backend.reserve(1 << 40)
    assert error.value.requested_bytes == 1 << 40


def test_closing_gives_back_what_is_still_mapped_once_queued_work_is_over() -> None:
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    backend = CudaBackend(torch.device("cuda:0"))
    address = backend.reserve(2 * backend.page_bytes)
    backend.create([0])
    backend.map(address, [0])
    shown(backend, address, 1).fill_(1)
    backend.close()
    backend.close()
    assert (backend.mappings, backend.created) == (0, 0)
    assert torch.cuda.mem_get_info()[0] == free
    backend.unreserve(address, 2 * backend.page_bytes)


def test_torch_keeps_its_context_when_a_backend_is_closed(simulator: ModuleType) -> None:
    released = simulator.count("cuDevicePrimaryCtxRelease")
    CudaBackend(torch.device("cuda:0")).close()
    assert simulator.count("cuDevicePrimaryCtxRelease") == released


def test_a_gpu_without_virtual_memory_management_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver

    monkeypatch.setattr(driver, "cuDeviceGetAttribute", lambda *asked: (driver.CUresult.CUDA_SUCCESS, 0))
    with pytest.raises(BackendUnavailable, match="has no virtual memory management; use another one, or a 'cpu' place"):
        CudaBackend(torch.device("cuda:0"))


def test_a_forked_process_is_told_to_be_spawned_where_cuda_was_in_use() -> None:
    code = """
    import os, torch
    from elastic.errors import BackendUnavailable
    from elastic.memory.backends.cuda import CudaBackend
    torch.zeros(1, device="cuda:0")
    if os.fork():
        raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
    try:
        CudaBackend(torch.device("cuda:0"))
    except BackendUnavailable as error:
        os._exit("spawn it instead" not in str(error))
    finally:
        os._exit(2)
    """
    in_child(textwrap.dedent(code))


def test_pages_are_refused_to_a_thread_that_captures_a_graph(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.zeros(1, device="cuda:0")
    address = backend.reserve(backend.page_bytes)
    backend.create([0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for call in (
        lambda: backend.create([1]),
        lambda: backend.map(address, [0]),
        lambda: backend.destroy([0]),
        lambda: backend.reserve(backend.page_bytes),
    ):
        with pytest.raises(StateError, match="captures a CUDA graph; do it before the capture or after it"):
            call()
    monkeypatch.undo()
    assert (backend.created, backend.mappings) == (1, 0)
    backend.unreserve(address, backend.page_bytes)


@TWO_DEVICES
@pytest.mark.parametrize("fresh", [False, True])
def test_the_callers_device_stays_the_present_one(fresh: bool) -> None:
    devices: list[int] = []

    def use() -> None:
        backend = CudaBackend(torch.device("cuda:1"))
        devices.append(torch.cuda.current_device())
        address = backend.reserve(backend.page_bytes)
        backend.create([0])
        backend.map(address, [0])
        devices.append(torch.cuda.current_device())
        backend.close()
        backend.unreserve(address, backend.page_bytes)
        devices.append(torch.ones(1, device="cuda").device.index)

    if fresh:
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    else:
        torch.cuda.set_device(0)
        use()
    assert devices == [0, 0, 0]


@TWO_DEVICES
def test_the_other_device_copies_into_pages_and_out_of_them(backend: CudaBackend) -> None:
    if not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("the devices have no access to each other")
    address = backend.reserve(backend.page_bytes)
    backend.create([0])
    backend.map(address, [0])
    page = shown(backend, address, 1)
    page.copy_(torch.full((backend.page_bytes,), 7, dtype=torch.uint8, device="cuda:1"))
    assert int(page.to("cuda:1").sum()) == 7 * backend.page_bytes
    del page
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    backend.unmap(address, 1)
    backend.unreserve(address, backend.page_bytes)
