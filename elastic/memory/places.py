"""The places of this process: opened once per name, shared by every wrapped model, closed by the last one."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import torch

from elastic.config import Place
from elastic.errors import ConfigError
from elastic.memory.backends.base import PageBackend
from elastic.memory.backends.cgroup import memory_left, memory_limit
from elastic.memory.backends.cuda import CudaBackend, require_cuda
from elastic.memory.backends.libc import libc
from elastic.memory.backends.memfd import MemfdBackend
from elastic.memory.backends.streams import give_back_cached, synchronize
from elastic.memory.pages.background import janitor
from elastic.memory.pages.page_pool import PagePool

_lock = threading.Lock()
_open: dict[str, tuple[PagePool, int]] = {}  # name -> pool, users
_SHARE_OF_FREE_MEMORY = {"cpu": 0.5, "cuda": 0.9}


def open_place(place: Place, *, resident_bytes: int = 0, sharers: int = 1) -> PagePool:
    """Return the pool of a place, made at first use.

    Without a budget it gets `resident_bytes` (what the caller already holds there) and its part of most of what is free
    now: of 90 % on CUDA, of half on a CPU. `sharers`: how many such places there are to be on the device. A second
    budget for an open place is a `ConfigError`.
    """
    with _lock:
        if place.name in _open:
            pool, users = _open[place.name]
            _require_same(place, pool)
        else:
            backend = make_backend(place)
            budget = place.budget_bytes
            if budget is None:
                most = _SHARE_OF_FREE_MEMORY[place.device.type] * free_bytes(place.device)
                budget = resident_bytes + int(most / sharers)
            pool, users = PagePool(place.name, backend, budget), 0
            janitor.start()
        _open[place.name] = (pool, users + 1)
        return pool


def close_place(pool: PagePool) -> None:
    """End one use of a pool; the last one closes it."""
    with _lock:
        if _open.get(pool.name, (None, 0))[0] is not pool:
            return
        users = _open[pool.name][1] - 1
        if users:
            _open[pool.name] = (pool, users)
            return
        del _open[pool.name]
    pool.close()


def make_backend(place: Place) -> PageBackend:
    """Make the page backend for a place's device."""
    if place.device.type == "cuda":
        return CudaBackend(place.device, place.page_bytes)
    return MemfdBackend(place.page_bytes, name=place.name)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that are free on a device now; of a CPU, those that this process may have."""
    if device.type == "cuda":
        require_cuda(device)
        return int(torch.cuda.mem_get_info(device)[0])
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
    available, left = int(fields["MemAvailable"].split()[0]) * 1024, memory_left()
    return available if left is None else min(available, left)


def total_bytes(device: torch.device) -> int:
    """Return the bytes that a device has at all; of a CPU, as many as this process may have."""
    if device.type == "cuda":
        require_cuda(device)
        return int(torch.cuda.mem_get_info(device)[1])
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit()
    return physical if limit is None else min(physical, limit)


def require_memory(places: Sequence[Place]) -> None:
    """Raise `ConfigError` where the budgets of places on one device are more together than it has."""
    budgets: dict[torch.device, int] = {}
    for place in places:
        budgets[place.device] = budgets.get(place.device, 0) + (place.budget_bytes or 0)
    for device, budget in budgets.items():
        total = total_bytes(device)
        if budget > total:
            raise ConfigError(
                f"places={[place.name for place in places if place.device == device]} have budgets of {budget:,} bytes "
                f"together; {device} has {total:,}: give them less, or none to have it chosen"
            )


def give_back_freed(device: torch.device) -> None:
    """Give freed memory that an allocator keeps for reuse back to the system: pages need it now."""
    if device.type == "cuda":
        synchronize(device)
        give_back_cached()
    elif hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)


def _require_same(place: Place, pool: PagePool) -> None:
    budget = pool.budget_pages * pool.page_bytes
    if place.budget_bytes is not None and place.budget_bytes // pool.page_bytes != pool.budget_pages:
        raise ConfigError(
            f"place {place.name} is open with a budget of {budget:,} bytes; {place.budget_bytes:,} cannot replace it "
            "(unwrap the models that use it first, or name another place, such as "
            f"'{place.device}#other')"
        )
    if place.page_bytes not in (None, pool.page_bytes):
        raise ConfigError(f"place {place.name} is open with page_bytes={pool.page_bytes}, not {place.page_bytes}")


# a forked child shares the parent's pages: it must not own, and so never release, any of them
os.register_at_fork(after_in_child=_open.clear)
