"""The rules that contexts, streams, events, page-locked and shared memory and kernels have, each broken on purpose."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from gpu.simulation.operators import BROKEN_RULES
from gpu.simulation.pages import PAGE, Pages, at, descriptors, done, driver
from gpu.simulation.test_rules import N, child, reported, zeros

pytestmark = pytest.mark.cuda
TWO_DEVICES = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="there is one CUDA device")
Run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@pytest.fixture(autouse=True)
def lazy(simulator: ModuleType) -> Iterator[None]:
    for device in range(torch.cuda.device_count()):
        zeros(device)
    simulator.schedule("lazy")
    yield
    torch.cuda.set_device(0)


def test_what_the_driver_did_not_allocate_is_not_freed_by_it(simulator: ModuleType) -> None:
    own = ctypes.create_string_buffer(64)
    assert driver.cuMemFreeHost(ctypes.addressof(own))[0] == driver.CUresult.CUDA_ERROR_INVALID_VALUE
    reported(simulator, "cuMemFreeHost", "did not allocate")


def test_page_locked_memory_is_not_freed_under_a_copy(simulator: ModuleType) -> None:
    target, host = zeros(), done(driver.cuMemHostAlloc(4 * N, 0))
    done(driver.cuMemcpyHtoDAsync(target.data_ptr(), host, 4 * N, torch.cuda.current_stream().cuda_stream))
    done(driver.cuMemFreeHost(host))
    reported(simulator, "cuMemFreeHost", "H2D (read)", "pending")
    with pytest.raises(RuntimeError, match="illegal"):
        torch.cuda.synchronize()
    simulator.clear()


def test_memory_is_unregistered_before_it_goes_back_to_the_system(simulator: ModuleType) -> None:
    host = mmap.mmap(-1, 1 << 20)
    view = ctypes.c_char.from_buffer(host)
    address = ctypes.addressof(view)
    done(driver.cuMemHostRegister(address, 1 << 20, 0))
    del view
    host.close()
    driver.cuMemHostUnregister(address)
    reported(simulator, "cuMemHostUnregister", "after the memory was given back")


def test_freeing_device_memory_waits_for_what_uses_it(simulator: ModuleType) -> None:
    address = int(done(driver.cuMemAlloc(PAGE)))
    done(driver.cuMemsetD8Async(address, 1, PAGE, torch.cuda.current_stream().cuda_stream))
    done(driver.cuMemFree(address))
    assert simulator.violations() == []


@TWO_DEVICES
def test_an_event_is_recorded_on_streams_of_its_own_device(simulator: ModuleType) -> None:
    event, other = done(driver.cuEventCreate(0)), torch.cuda.Stream(1)
    driver.cuEventRecord(event, other.cuda_stream)
    reported(simulator, "event of device 0", "stream of device 1")
    done(driver.cuEventDestroy(event))


@TWO_DEVICES
def test_no_time_passes_between_events_of_two_devices(simulator: ModuleType) -> None:
    events = []
    for device in range(2):
        with torch.cuda.device(device):
            events.append(done(driver.cuEventCreate(0)))
            done(driver.cuEventRecord(events[-1], torch.cuda.current_stream().cuda_stream))
            torch.cuda.synchronize()
    driver.cuEventElapsedTime(*events)
    reported(simulator, "elapsed time between events of devices 0 and 1")


@TWO_DEVICES
def test_a_kernel_runs_on_a_stream_of_its_own_device(simulator: ModuleType) -> None:
    """By the way in that operators have: torch itself gets it right."""
    native, nothing = ctypes.CDLL("libcuda.so.1"), Run(lambda argument: None)
    stream = ctypes.c_void_p(torch.cuda.Stream(1).cuda_stream)
    assert native.sim_launch(0, stream, b"a kernel", nothing, nothing, None, None, 0)
    reported(simulator, "a kernel for device 0 on a stream of device 1")


def test_a_kernel_that_fails_is_reported_by_name(simulator: ModuleType) -> None:
    rows = torch.zeros(9, 4, device="cuda").index_select(0, torch.tensor([99], device="cuda"))
    torch.cuda.synchronize()
    reported(simulator, "KERNEL FAILED", "index_select", "out of range")
    del rows


def test_what_is_not_simulated_says_so(simulator: ModuleType) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(N, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(N, device="cuda")
        with pytest.raises(RuntimeError, match="not supported"):
            graph.replay()  # a graph in a graph
    reported(simulator, "NOT SIMULATED", "cuGraphLaunch")
    driver.cuLaunchKernel(0, 1, 1, 1, 1, 1, 1, 0, 0, None, 0)
    reported(simulator, "NOT SIMULATED", "cuLaunchKernel")


RELEASES = """
    from cuda.bindings import driver
    while driver.cuDevicePrimaryCtxRelease(0)[0] == driver.CUresult.CUDA_SUCCESS:
        pass
    """


@pytest.mark.slow
def test_a_context_is_released_as_often_as_it_was_retained_and_not_under_what_it_holds() -> None:
    ended = child(RELEASES)
    assert ended.returncode == BROKEN_RULES
    assert "reset by its last release, with memory in it" in ended.stderr
    assert "released more often than it was retained" in ended.stderr


# ---- memory that processes share


@pytest.fixture
def pages() -> Iterator[Pages]:
    pages = Pages()
    yield pages
    pages.close()


def test_memory_that_was_not_made_for_it_is_not_exported(simulator: ModuleType, pages: Pages) -> None:
    handles = [pages.create(), pages.create(shareable=True)]
    pages.release(handles[1])
    for handle, words in zip(handles, ("not created for handles of that type", "was released"), strict=True):
        code, _ = driver.cuMemExportToShareableHandle(handle, descriptors(), 0)
        assert code == driver.CUresult.CUDA_ERROR_INVALID_VALUE
        reported(simulator, "cuMemExportToShareableHandle", words)


def test_what_is_no_memory_of_a_device_is_not_imported(pages: Pages) -> None:
    descriptor = os.memfd_create("something else")
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        pages.adopt(descriptor)
    os.close(descriptor)


def test_shared_memory_lives_until_all_have_let_go_of_it(pages: Pages) -> None:
    free = torch.cuda.mem_get_info()[0]
    address, handle = pages.reserve(2), pages.create(shareable=True)
    descriptor = done(driver.cuMemExportToShareableHandle(handle, descriptors(), 0))
    imported = pages.adopt(descriptor)
    os.close(descriptor)
    for i, each in enumerate((handle, imported)):
        pages.map(address + i * PAGE, each)
        pages.grant(address + i * PAGE)
    assert bool(at(address).isnan().all())
    at(address).fill_(3)
    assert bool((at(address + PAGE) == 3).all())
    torch.cuda.synchronize()
    pages.unmap(address)
    pages.release(handle)
    assert bool((at(address + PAGE) == 3).all())
    pages.release(imported)
    assert torch.cuda.mem_get_info()[0] == free - PAGE, "it is mapped"
    pages.unmap(address + PAGE)
    assert torch.cuda.mem_get_info()[0] == free
