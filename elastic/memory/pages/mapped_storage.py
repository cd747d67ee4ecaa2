"""Mapped memory as a torch storage, with a callback when its last view is gone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from elastic.memory.pages.finalizers import call_at_death

_NOTHING = nullcontext()


def outside_inference_mode() -> AbstractContextManager[object]:
    """Have tensors that are made in the context be ordinary ones; to enter it costs little where they are anyway."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING


class _CudaStorage:
    """Memory on a GPU, offered to torch by the CUDA array interface (version 3)."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


class MappedStorage:
    """`nbytes` of mapped memory from `address` on, as one torch storage of exactly that size.

    The storage owns nothing: whoever mapped the memory must keep it mapped until `alive` is false, that is, until the
    last tensor over it is gone, inside Elastic or out. `on_dead` is called then, from any thread and in the middle of
    anything: it may only leave a note.
    """

    def __init__(self, address: int, nbytes: int, device: torch.device, on_dead: Callable[[], Any]) -> None:
        with outside_inference_mode():
            memory: Any
            if device.type == "cuda":
                memory = _CudaStorage(address, nbytes)
                self._bytes: torch.Tensor | None = torch.as_tensor(memory, device=device)
            else:
                memory = (ctypes.c_ubyte * nbytes).from_address(address)
                self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.nbytes = nbytes
        self._alive = call_at_death(memory, on_dead)

    @property
    def alive(self) -> bool:
        """True while any tensor shows this memory."""
        return self._alive() is not None

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Return all of it as [nbytes // itemsize] elements of `dtype`."""
        assert self._bytes is not None, "the storage was dropped"
        with outside_inference_mode():
            return self._bytes.view(dtype)

    def drop(self) -> None:
        """Drop the memory; it lives on only while tensors outside show it."""
        self._bytes = None
