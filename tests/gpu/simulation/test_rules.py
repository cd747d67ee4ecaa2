"""The simulated driver reports each broken rule of CUDA, and nothing of a program that keeps them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from gpu.simulation.operators import BROKEN_RULES
from gpu.simulation.pages import PAGE, Pages, at, done, driver

pytestmark = pytest.mark.cuda
N = 1000


@pytest.fixture(autouse=True)
def lazy(simulator: ModuleType) -> None:
    """What waits are missing shows best when nothing runs before a wait."""
    torch.cuda.synchronize()
    simulator.schedule("lazy")


@pytest.fixture
def pages(lazy: None) -> Iterator[Pages]:
    pages = Pages()
    yield pages
    pages.close()


def reported(simulator: ModuleType, *words: str) -> None:
    """Assert that one violation was reported, with these words, and forget it."""
    broken = simulator.violations()
    simulator.clear()
    assert len(broken) == 1, broken
    assert all(word in broken[0] for word in words), broken[0]


def zeros(device: int = 0) -> torch.Tensor:
    tensor = torch.zeros(N, device=f"cuda:{device}")
    torch.cuda.synchronize(device)
    return tensor


# ---- virtual memory


def refusals(pages: Pages) -> dict[str, Callable[[], Any]]:
    """Words of the report -> the call that is refused."""
    address = pages.reserve(4)
    first, second = pages.create(), pages.create()
    pages.map(address, first)
    pages.map(address + PAGE, second)
    gone = pages.create()
    pages.release(gone)
    return {
        "outside of a reservation": lambda: driver.cuMemMap(address + 4 * PAGE, PAGE, 0, first, 0),
        "mapped there already": lambda: driver.cuMemMap(address, PAGE, 0, second, 0),
        "multiples of the granularity": lambda: driver.cuMemMap(address + 2 * PAGE, PAGE // 2, 0, first, 0),
        "cuMemMap handle": lambda: driver.cuMemMap(address + 2 * PAGE, PAGE, 0, gone, 0),
        "cuMemRelease handle": lambda: driver.cuMemRelease(gone),
        "cuMemUnmap whole mappings": lambda: driver.cuMemUnmap(address, PAGE // 2),
        "cuMemUnmap range": lambda: driver.cuMemUnmap(address + 2 * PAGE, PAGE),
        "cuMemSetAccess whole mappings": lambda: driver.cuMemSetAccess(address, 3 * PAGE, [], 0),
        "cuMemAddressFree mapped": lambda: driver.cuMemAddressFree(address, 4 * PAGE),
        "no such reservation": lambda: driver.cuMemAddressFree(address, PAGE),
        "no such allocation": lambda: driver.cuMemFree(address),
    }


def test_calls_that_virtual_memory_refuses_are_reported(simulator: ModuleType, pages: Pages) -> None:
    for words, call in refusals(pages).items():
        assert call()[0] != driver.CUresult.CUDA_SUCCESS, words
        reported(simulator, *words.split())


def test_memory_lives_while_it_is_mapped(pages: Pages) -> None:
    address, handle = pages.reserve(1), pages.create()
    pages.map(address, handle)
    pages.grant(address)
    free = torch.cuda.mem_get_info()[0]
    pages.release(handle)
    assert torch.cuda.mem_get_info()[0] == free
    assert at(address).fill_(2).sum().item() == PAGE / 2
    torch.cuda.synchronize()
    pages.unmap(address)
    assert torch.cuda.mem_get_info()[0] == free + PAGE


@pytest.mark.parametrize("reader", [None, 1])
def test_memory_that_a_device_may_not_touch_is_an_illegal_address(
    reader: int | None, simulator: ModuleType, pages: Pages
) -> None:
    if reader == 1 and torch.cuda.device_count() < 2:
        pytest.skip("one device")
    tensor = pages.tensor(reader=reader)
    with pytest.raises(RuntimeError, match="illegal"):
        tensor.add(1).cpu()
    with pytest.raises(RuntimeError, match="illegal"):  # and then nothing works any more
        torch.ones(1, device="cuda")
    reported(simulator, "ILLEGAL ADDRESS", "no access")


def test_new_memory_is_full_of_nan(pages: Pages) -> None:
    assert pages.tensor().isnan().all().item()


@pytest.mark.parametrize("schedule", ["lazy", "eager"])
def test_unmapping_what_nobody_waited_for_is_reported(schedule: str, simulator: ModuleType, pages: Pages) -> None:
    simulator.schedule(schedule)
    tensor = pages.tensor()
    tensor.add(1)
    pages.unmap(tensor.data_ptr())
    reported(simulator, "cuMemUnmap", "add", "pending" if schedule == "lazy" else "never waited")
    with pytest.raises(RuntimeError, match="illegal") if schedule == "lazy" else torch.no_grad():
        torch.cuda.synchronize()
    simulator.clear()


def test_unmapping_after_a_wait_is_right(pages: Pages) -> None:
    tensor = pages.tensor()
    tensor.add(1)
    torch.cuda.synchronize()
    pages.unmap(tensor.data_ptr())


# ---- streams, events, races


def test_nothing_runs_before_somebody_waits(simulator: ModuleType) -> None:
    source, pinned = zeros(), torch.ones(N).pin_memory()
    pinned.copy_(source, non_blocking=True)
    assert pinned.sum() == N
    torch.cuda.synchronize()
    assert pinned.sum() == 0
    simulator.schedule("eager")
    pinned.copy_(source + 1, non_blocking=True)
    assert pinned.sum() == N


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random:3"])
@pytest.mark.parametrize("ordered", [False, True])
def test_streams_that_no_event_orders_race(schedule: str, ordered: bool, simulator: ModuleType) -> None:
    simulator.schedule(schedule)
    tensor, side = zeros(), torch.cuda.Stream()
    tensor.add_(1)
    if ordered:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        result = tensor * 2
    side.synchronize()
    if ordered:
        assert result.sum().item() == 2 * N
    else:
        reported(simulator, "RACE", "add_.Tensor (write) then", "mul", "(read)")


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random:3"])
@pytest.mark.parametrize("ordered", [False, True])
def test_memory_that_is_mapped_twice_is_the_same_memory(
    schedule: str, ordered: bool, simulator: ModuleType, pages: Pages
) -> None:
    simulator.schedule(schedule)
    handle, start, side = pages.create(), pages.reserve(2), torch.cuda.Stream()
    for address in (start, start + PAGE):
        pages.map(address, handle)
        pages.grant(address)
    one, other = at(start), at(start + PAGE)
    one[:N].fill_(1)
    if ordered:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        other[N:].fill_(5)
        total = other[:N].sum()
    side.synchronize()
    if ordered:
        assert total.item() == N
    else:
        reported(simulator, "RACE", "fill_.Scalar (write) then", "sum", "(read)")


def test_writing_what_another_stream_reads_is_a_race(simulator: ModuleType) -> None:
    tensor, side = zeros(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        result = tensor + 1
    tensor.fill_(3)
    reported(simulator, "RACE", "(read) then", "fill_", "(write)")
    del result


def test_a_wait_of_the_host_orders_streams() -> None:
    tensor, side = zeros(), torch.cuda.Stream()
    event = torch.cuda.Event()
    tensor.add_(1)
    event.record()
    event.synchronize()
    with torch.cuda.stream(side):
        tensor.add_(1)
    side.synchronize()
    assert tensor.sum().item() == 2 * N


def test_columns_of_one_matrix_do_not_race() -> None:
    matrix, side = torch.zeros(8, 8, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    matrix[:, :4].fill_(1)
    with torch.cuda.stream(side):
        matrix[:, 4:].fill_(2)
    torch.cuda.synchronize()
    assert matrix.sum().item() == 96


def test_page_locked_memory_races_too(simulator: ModuleType) -> None:
    one, two, pinned = zeros(), zeros(), torch.empty(N).pin_memory()
    side = torch.cuda.Stream()
    pinned.copy_(one, non_blocking=True)
    with torch.cuda.stream(side):
        pinned.copy_(two, non_blocking=True)
    reported(simulator, "RACE on host memory", "D2H (write)")


def test_memory_freed_under_another_stream_is_a_race_unless_recorded(simulator: ModuleType) -> None:
    for recorded in (True, False):
        tensor, side = zeros(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            result = tensor + 1
        if recorded:
            tensor.record_stream(side)
        del tensor
        torch.full((N,), 3.0, device="cuda")  # where the tensor was, if the allocator may
        if not recorded:
            reported(simulator, "RACE", "add", "(read) then", "fill_")
        del result
        torch.cuda.synchronize()


def test_destroyed_streams_and_events_are_not_used(simulator: ModuleType) -> None:
    zeros()
    stream, event = done(driver.cuStreamCreate(1)), done(driver.cuEventCreate(0))
    done(driver.cuStreamDestroy(stream))
    done(driver.cuEventDestroy(event))
    driver.cuStreamSynchronize(stream)
    reported(simulator, "stream", "destroyed")
    driver.cuEventSynchronize(event)
    reported(simulator, "event", "destroyed")


def test_blocking_streams_and_the_legacy_stream_wait_for_each_other() -> None:
    tensor = zeros()
    blocking = torch.cuda.ExternalStream(int(done(driver.cuStreamCreate(0))))
    tensor.add_(1)
    with torch.cuda.stream(blocking):
        tensor.mul_(2)
    tensor.add_(1)
    assert tensor.sum().item() == 3 * N


def test_polling_comes_to_an_end() -> None:
    tensor = zeros()
    event = torch.cuda.Event()
    tensor.add_(1)
    event.record()
    assert not event.query()
    while not event.query():
        pass


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random:1", "random:2", "random:3"])
def test_a_right_program_breaks_no_rule(schedule: str, simulator: ModuleType, pages: Pages) -> None:
    simulator.schedule(schedule)
    copies, computes = torch.cuda.Stream(), torch.cuda.Stream()
    host = torch.arange(float(N)).pin_memory()
    ready, used = torch.cuda.Event(), torch.cuda.Event()
    buffer, total = pages.tensor()[:N], torch.zeros(N, device="cuda")
    computes.wait_stream(torch.cuda.current_stream())
    for _ in range(4):
        with torch.cuda.stream(copies):
            copies.wait_event(used)
            buffer.copy_(host, non_blocking=True)
            ready.record()
        with torch.cuda.stream(computes):
            computes.wait_event(ready)
            total += buffer.sort(descending=True).values
            used.record()
    torch.cuda.current_stream().wait_stream(computes)
    expected = 4 * host.flip(0)
    assert torch.equal(total.cpu(), expected)
    if torch.cuda.device_count() > 1:
        assert torch.equal(total.to("cuda:1").cpu(), expected)


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random:1"])
def test_random_numbers_follow_the_seed_under_any_schedule(schedule: str, simulator: ModuleType) -> None:
    simulator.schedule("eager")
    torch.cuda.manual_seed(5)
    expected = [torch.rand(3, device="cuda"), torch.randn(3, device="cuda")]
    simulator.schedule(schedule)
    torch.cuda.manual_seed(5)
    drawn = [torch.rand(3, device="cuda"), torch.randn(3, device="cuda")]
    assert all(torch.equal(a, b) for a, b in zip(drawn, expected, strict=True))


def test_what_was_queued_in_inference_mode_is_computed_by_whoever_waits() -> None:
    tensor = zeros()
    with torch.inference_mode():
        result = tensor.add(1).mul(2)
    torch.cuda.synchronize()
    assert result.sum().item() == 2 * N


@pytest.mark.parametrize(("values", "bounds"), [([0, 2, 1, 2], (0, 2)), ([3, 3], (0, 0)), ([0, 0, 0], (0, 0))])
def test_values_are_counted_in_bins_as_on_a_cpu(values: list[int], bounds: tuple[int, int]) -> None:
    given = torch.tensor(values, dtype=torch.int32, device="cuda")
    for bins in (1, 3):
        expected = torch.histc(given.cpu().float(), bins, *bounds)
        assert torch.histc(given, bins, *bounds).tolist() == expected.tolist()


# ---- the host


def test_pageable_memory_is_staged_and_page_locked_memory_is_not(simulator: ModuleType) -> None:
    zeros()
    for pinned, found in ((False, 1), (True, 2)):
        staged, host = simulator.count("pageable_h2d"), torch.ones(N)
        host = host.pin_memory() if pinned else host
        tensor = host.to("cuda", non_blocking=True)
        host.fill_(2)  # right for pageable memory only
        assert tensor[0].item() == found
        assert simulator.count("pageable_h2d") - staged == (not pinned)


def test_memory_is_not_unregistered_under_a_copy(simulator: ModuleType) -> None:
    """The copy is an error of the device, and no end of the process, which may have nothing there any more."""
    tensor, host = zeros(), torch.ones(1 << 20)
    address = host.data_ptr()
    done(driver.cuMemHostRegister(address, host.nbytes, 0))
    torch.empty_like(tensor).copy_(host[:N], non_blocking=True)
    done(driver.cuMemHostUnregister(address))
    reported(simulator, "cuMemHostUnregister", "H2D (read)", "pending")
    driver.cuMemHostUnregister(address)
    reported(simulator, "not registered")
    del host  # as large as it is, it goes back to the system
    with pytest.raises(RuntimeError, match="illegal"):
        torch.cuda.synchronize()
    reported(simulator, "ILLEGAL ADDRESS", "H2D reads", "not page-locked any more")


def test_memory_that_is_unregistered_after_a_wait_is_what_was_copied() -> None:
    tensor, host = zeros(), torch.ones(1 << 20)
    done(driver.cuMemHostRegister(host.data_ptr(), host.nbytes, 0))
    tensor.copy_(host[:N], non_blocking=True)
    torch.cuda.current_stream().synchronize()
    done(driver.cuMemHostUnregister(host.data_ptr()))
    del host
    assert tensor.sum().item() == N


@pytest.mark.parametrize("portable", [False, True])
def test_registered_memory_is_page_locked_for_other_devices_if_it_is_portable(
    portable: bool, simulator: ModuleType
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one device")
    host, targets = torch.ones(1 << 16), (zeros(1), zeros(0))  # the last one's device is current
    done(driver.cuMemHostRegister(host.data_ptr(), host.nbytes, int(portable)))
    staged = simulator.count("pageable_h2d")
    for target in targets:
        target.copy_(host[:N], non_blocking=True)
    assert simulator.count("pageable_h2d") - staged == (not portable)
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    done(driver.cuMemHostUnregister(host.data_ptr()))


def test_contexts_are_a_stack(simulator: ModuleType) -> None:
    zeros()
    home = done(driver.cuCtxGetCurrent())
    other = done(driver.cuDevicePrimaryCtxRetain(torch.cuda.device_count() - 1))
    done(driver.cuCtxPushCurrent(other))
    assert torch.cuda.current_device() == torch.cuda.device_count() - 1
    assert int(done(driver.cuCtxPopCurrent())) == int(other)
    assert int(done(driver.cuCtxGetCurrent())) == int(home)
    done(driver.cuDevicePrimaryCtxRelease(torch.cuda.device_count() - 1))


def test_a_call_fails_when_it_is_told_to(simulator: ModuleType, pages: Pages) -> None:
    simulator.fail("cuMemCreate", 2)
    pages.create()
    with pytest.raises(RuntimeError, match="OUT_OF_MEMORY"):
        pages.create()
    pages.create()


def test_synchronisations_are_counted(simulator: ModuleType) -> None:
    tensor = zeros()
    before = {name: simulator.count(name) for name in ("device_sync", "event_sync")}
    tensor.add_(1)
    assert {name: simulator.count(name) - count for name, count in before.items()} == {
        "device_sync": 0,
        "event_sync": 0,
    }
    torch.cuda.synchronize()
    torch.cuda.Event().synchronize()
    assert {name: simulator.count(name) - count for name, count in before.items()} == {
        "device_sync": 1,
        "event_sync": 0,
    }


def test_names_that_are_not_counted_are_refused(simulator: ModuleType) -> None:
    with pytest.raises(AssertionError, match="cuMemMop"):
        simulator.count("cuMemMop")
    with pytest.raises(AssertionError, match="cuMemMop"):
        simulator.fail("cuMemMop")


# ---- stream capture


def captured(forbidden: Callable[[], Any]) -> None:
    """Capture a multiplication, and try a call meanwhile."""
    tensor, graph = zeros(), torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        graph.capture_begin()
        try:
            tensor.mul_(2)
            assert torch.cuda.is_current_stream_capturing()
            forbidden()
        finally:
            graph.capture_end()
    assert not torch.cuda.is_current_stream_capturing()


def test_a_captured_kernel_does_not_run() -> None:
    tensor, graph = zeros(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
    assert tensor.sum().item() == 0


def test_each_replay_computes_again_with_what_is_there_by_then() -> None:
    given, graph = zeros(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = (given + 1).mul_(2)
        given.add_(doubled)
    for value in (0, 3):
        given.fill_(value)
        for _ in range(2):
            before = given.cpu()
            graph.replay()
            assert torch.equal(doubled.cpu(), (before + 1) * 2)
            assert torch.equal(given.cpu(), before + (before + 1) * 2)


def test_a_replay_is_ordered_by_its_own_stream_and_not_by_that_of_the_capture(simulator: ModuleType) -> None:
    tensor, graph, side = zeros(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=side):
        tensor.add_(1)
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        tensor.mul_(2)
    graph.replay()
    reported(simulator, "RACE", "mul_", "add_")


@pytest.mark.parametrize("call", ["synchronize", "item", "create"])
def test_what_a_capture_forbids_fails_and_ends_it(call: str, pages: Pages) -> None:
    tensor = zeros()
    calls = {"synchronize": torch.cuda.synchronize, "item": tensor.sum().item, "create": pages.create}
    with pytest.raises(RuntimeError, match=r"captur|CAPTURE"):
        captured(calls[call])
    assert zeros().sum().item() == 0


def test_another_thread_may_not_map_pages_under_a_global_capture(pages: Pages) -> None:
    refused: list[BaseException] = []

    def create() -> None:
        torch.cuda.set_device(0)
        try:
            pages.create()
        except RuntimeError as error:
            refused.append(error)

    def in_thread() -> None:
        thread = threading.Thread(target=create)
        thread.start()
        thread.join()

    with pytest.raises(RuntimeError, match="previous error during capture"):
        captured(in_thread)
    assert "CAPTURE_UNSUPPORTED" in str(refused[0])


# ---- processes


def child(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "import ctypes, os, torch\nx = torch.zeros(9, device='cuda')\n" + textwrap.dedent(code)
    command, environment = [sys.executable, "-c", code], {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)


RACE = """
side = torch.cuda.Stream()
x.add_(1)
with torch.cuda.stream(side):
    x.add_(1)
"""


@pytest.mark.slow
def test_the_host_cannot_touch_device_memory() -> None:
    ended = child("ctypes.memset(x.data_ptr(), 0, 1)")
    assert ended.returncode == 128 + 11
    assert "the host touches device memory" in ended.stderr


@pytest.mark.slow
def test_a_process_that_broke_a_rule_ends_with_an_error() -> None:
    ended = child(RACE)
    assert ended.returncode == BROKEN_RULES
    assert "RACE" in ended.stderr


@pytest.mark.slow
def test_a_process_that_ends_at_once_leaves_the_rules_that_it_broke_in_a_file(tmp_path: Path) -> None:
    log = tmp_path / "violations"
    assert child(RACE + "os._exit(0)", SIMCUDA_LOG=str(log)).returncode == 0
    assert "RACE" in log.read_text()
