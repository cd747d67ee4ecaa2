"""The memory of graphs: buffers for what they compute, and views of what was there before.

A result whose last reader is done leaves its place to a later one. Weights are looked at through tensors that can be
taken away from all graphs at once: pages under a tensor that somebody holds cannot be given back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


class GraphMemory:
    """Of graphs of which one is replayed at a time, so that all of them work in the same buffers."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._views: dict[tuple[object, ...], torch.Tensor] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def buffer(self, number: int, nbytes: int) -> torch.UntypedStorage:
        """Return the storage of a buffer, with at least so many bytes; graphs that have a smaller one keep that."""
        while len(self._buffers) <= number:
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        if self._buffers[number].nbytes < nbytes:
            self._buffers[number] = torch.empty(1 << (nbytes - 1).bit_length(), dtype=torch.uint8)
        return self._buffers[number].untyped_storage()

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor over the same memory, of the same shape, until `forget_views`; without strides as it is."""
        if tensor.layout is not torch.strided:
            return tensor
        key = storage_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        if key not in self._views:
            self._views[key] = _over(tensor.untyped_storage(), tensor)
        return self._views[key]

    def cuda_pool(self, device: torch.device) -> tuple[Any, torch.cuda.Stream]:
        """Return the pool that CUDA graphs of a device share, and the stream that they are captured on.

        Nobody else is to wait for that stream, which would end a capture: it is of those with priority, which pages
        are never used on.
        """
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._stream = self._stream or torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        return self._pool, self._stream

    def forget_views(self) -> None:
        """Let go of all memory that graphs only look at; none can be replayed any more. From any thread."""
        self._pool = None  # torch makes no graph in one whose graphs have all gone
        views, self._views = self._views, {}
        for view in views.values():
            view.set_()  # type: ignore[call-overload]


@dataclass
class _Lifetime:
    """Of what is in a storage: the calls that it is first and last needed in."""

    nbytes: int
    first: int
    last: int
    buffer: int = -1


def storage_of(tensor: torch.Tensor) -> int | None:
    """Return where the storage of a tensor of any shape begins, as for all views of it; None: it has none."""
    if tensor.layout is not torch.strided:
        return None
    return tensor.untyped_storage().data_ptr() or None


def assign_buffers(
    calls: Sequence[Sequence[torch.Tensor]],
    kept: Sequence[torch.Tensor],
    created: Sequence[torch.Tensor],
    memory: GraphMemory,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Give each storage of `created` a buffer, from the first of `calls` that has it to the last.

    Those of `kept` are needed after all calls. Returns a function from a tensor to the one in its place, with the same
    shape and strides: in a buffer, or a view of what was there before.
    """
    lifetimes = _lifetimes([*calls, kept], {storage_of(tensor) for tensor in created})
    sizes = _share(list(lifetimes.values()))
    storages = [memory.buffer(number, size) for number, size in enumerate(sizes)]

    def move(tensor: torch.Tensor) -> torch.Tensor:
        lifetime = lifetimes.get(storage_of(tensor))
        return memory.view(tensor) if lifetime is None else _over(storages[lifetime.buffer], tensor)

    return move


def _over(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    return empty.set_(storage, like.storage_offset(), like.shape, like.stride())


def _lifetimes(calls: Sequence[Sequence[torch.Tensor]], created: set[int | None]) -> dict[int | None, _Lifetime]:
    """Return by storage, in the order in which they are first needed, those that were created."""
    lifetimes: dict[int | None, _Lifetime] = {}
    for number, tensors in enumerate(calls):
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage is not None and storage in created:
                lifetime = lifetimes.setdefault(storage, _Lifetime(tensor.untyped_storage().nbytes(), number, number))
                lifetime.last = number
    return lifetimes


def _share(lifetimes: Sequence[_Lifetime]) -> list[int]:
    """Choose a buffer for each; return how many bytes each buffer needs."""
    sizes: list[int] = []
    free: set[int] = set()
    ending: dict[int, list[int]] = {}
    done = 0
    for lifetime in lifetimes:  # by their first call
        for call in range(done, lifetime.first):
            free.update(ending.pop(call, ()))
        done = lifetime.first
        fitting = [number for number in free if sizes[number] >= lifetime.nbytes]
        if fitting:
            lifetime.buffer = min(fitting, key=lambda number: (sizes[number], number))
        elif free:
            lifetime.buffer = max(free, key=lambda number: (sizes[number], number))
            sizes[lifetime.buffer] = lifetime.nbytes
        else:
            lifetime.buffer = len(sizes)
            sizes.append(lifetime.nbytes)
        free.discard(lifetime.buffer)
        ending.setdefault(lifetime.last, []).append(lifetime.buffer)
    return sizes
