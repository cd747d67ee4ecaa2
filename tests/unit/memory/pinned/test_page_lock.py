"""Page-locking by the CUDA driver, as far as it can be seen without a GPU."""

from __future__ import annotations

import gc
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.memory.pinned.page_lock import allocate, is_locked, page_lock


class Driver(ModuleType):
    """The calls of `cuda.bindings.driver` in order, on a thread that has a context (an int) or none (0)."""

    CU_MEMHOSTREGISTER_PORTABLE = 1
    CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    def __init__(self, context: int, code: int) -> None:
        super().__init__("cuda.bindings.driver")
        self.calls: list[Any] = []
        self._context, self._code = context, code

    def cuCtxGetCurrent(self) -> tuple[int, int]:  # noqa: N802
        return 0, self._context

    def cuDevicePrimaryCtxGetState(self, device: int) -> tuple[int, int, int]:  # noqa: N802
        return 0, 0, int(device == 1)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> tuple[int, int]:
            self.calls.append((name.removeprefix("cu"), *args))
            return self._code if name == "cuMemHostRegister" else 0, 77

        return call


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """driver(context=, code=): the driver of this process, on a machine whose second GPU of two is in use."""

    def make(context: int = 5, code: int = 0) -> Driver:
        driver, bindings = Driver(context, code), ModuleType("cuda.bindings")
        bindings.driver = driver  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        return driver

    return make


def test_memory_is_locked_for_all_devices_until_it_dies(driver: Any) -> None:
    calls, memory = driver().calls, allocate(100, "this test")
    address = memory.data_ptr()
    assert page_lock(memory)
    view = memory[:10]
    del memory
    gc.collect()
    assert calls == [("MemHostRegister", address, 100, 1)]
    del view
    gc.collect()
    assert calls[1:] == [("MemHostUnregister", address)]


def test_a_refusal_is_no_error_and_nothing_is_unlocked(driver: Any) -> None:
    calls, memory = driver(code=2).calls, allocate(0, "this test")
    assert not page_lock(memory)
    del memory
    gc.collect()
    assert [name for name, *_ in calls] == ["MemHostRegister"]


def test_a_thread_without_a_context_borrows_one_of_a_device_in_use(driver: Any) -> None:
    calls, memory = driver(context=0).calls, allocate(8, "this test")
    assert page_lock(memory)
    assert [name for name, *_ in calls] == [
        "DevicePrimaryCtxRetain",
        "CtxPushCurrent",
        "MemHostRegister",
        "CtxPopCurrent",
        "DevicePrimaryCtxRelease",
    ]
    assert calls[0] == ("DevicePrimaryCtxRetain", 1)
    assert calls[1] == ("CtxPushCurrent", 77)
    assert calls[-1] == ("DevicePrimaryCtxRelease", 1)


def test_ordinary_memory_is_not_locked() -> None:
    assert not is_locked(torch.ones(3))
