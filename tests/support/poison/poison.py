"""Memory comes to whoever gets it full of NaN: what reads what nobody wrote shows.

Bytes of 0xFF are NaN in every float dtype, and -1 in every integer one. Pages have them when they are taken from their
pool; a KV store when the next cache adopts it; a block of an engine when the next request gets it. Nothing is promised
about what is in any of these. (Pages that wake with a block at rest keep their bytes.) CPU pages only. `POISON=0`
leaves memory as it is.

`install_override` changes no module that is not imported anyway, so that processes which import little stay quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

POISON = 0xFF


def _pages(pool: Any, pages: Sequence[int]) -> None:
    file, size = getattr(pool.backend, "_file", None), pool.page_bytes
    for page in pages if file is not None else ():
        os.pwrite(file, bytes([POISON]) * size, page * size)


def _after(owner: type, name: str, poison: Callable[..., None]) -> None:
    """Have `poison(self, result, *args)` called after a method."""
    method = getattr(owner, name)

    @wraps(method)
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        poison(self, result, *args)
        return result

    setattr(owner, name, changed)


def _pool(module: ModuleType) -> None:
    _after(module.PagePool, "allocate", lambda pool, taken, *_: _pages(pool, taken))


def _holdings(module: ModuleType) -> None:
    def adopted(_: Any, store: Any, *__: Any) -> None:
        for buffer in store.buffers if store is not None else ():
            _pages(store.pool, list(buffer.range.slots.values()))

    _after(module.PoolUsage, "adopt", adopted)


def _blocks(module: ModuleType) -> None:
    def handed_out(pool: Any, block: int) -> None:
        memory = pool._memory
        if not hasattr(memory, "kv") or memory.kv.device.type != "cpu":  # a simulated one, or a GPU's
            return
        ranges = memory.groups[pool._group]
        size = ranges.group.block_bytes
        for layer in ranges.layers:
            ranges.view(layer, _torch().uint8)[block * size : (block + 1) * size] = POISON

    for name in ("take", "take_new", "take_reusable"):
        _after(module.BlockPool, name, handed_out)


def _torch() -> Any:
    import torch

    return torch


CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "elastic.memory.pages.page_pool": _pool,
    "elastic.kvcache.storage.usage": _holdings,
    "elastic.engines.core.block_pool": _blocks,
}


class _Changing(MetaPathFinder):
    """Changes modules as they are imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        change = CHANGES.get(name)
        spec = PathFinder.find_spec(name, path) if change is not None else None
        if change is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def install() -> None:
    """In this process, before anything of elastic is imported, and in its children."""
    folder = os.path.dirname(__file__)
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if os.environ.get("POISON") == "0":
        return
    if folder not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, known)])
    if not any(type(finder).__name__ == _Changing.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Changing())
