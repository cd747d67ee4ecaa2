"""The host store: full-precision weights in host memory, each held once, whoever needs it."""

from __future__ import annotations

import logging
import threading
import weakref
from dataclasses import dataclass

import torch

from elastic.memory.checksum import digest
from elastic.memory.copy_engine import copy, pieces
from elastic.memory.pinned.page_lock import allocate, is_locked, page_lock
from elastic.memory.pinned.staging_ring import staging_bytes
from elastic.types import HostStatus

logger = logging.getLogger(__name__)
_COMPARED_BYTES = 4 << 20
"""Brought to a device at once to be compared there."""
_PURPOSE = (
    "weights that leave their place; free some, or give wrap() the checkpoint that the model was loaded from "
    "(checkpoint=PATH)"
)


@dataclass(frozen=True, eq=False)
class HostTensor:
    """One parameter in host memory. Never written: a change makes another one."""

    tensor: torch.Tensor
    """In the checkpoint's shape and dtype; its elements lie in the order that they have in pages."""
    digest: int
    """Of the parameter in the checkpoint's order."""
    from_file: bool


class HostStore:
    """All host tensors of this process. Thread-safe; a tensor lives as long as somebody holds its `HostTensor`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._tensors: weakref.WeakValueDictionary[tuple[object, ...], HostTensor] = weakref.WeakValueDictionary()
        self._warned = False

    def keep(
        self, source: torch.Tensor, fingerprint: int, *, file: torch.Tensor | None = None, lock: bool = False
    ) -> HostTensor:
        """Hold the bytes of `source` (any shape), whose digest is `fingerprint`: those of `file` if equal, else a copy.

        What is already held, by any model of this process, is not held twice. With `lock` a copy is page-locked; where
        the system refuses that, copies to a device are slower. Raises `CapacityError` if host memory is short.
        """
        key = tuple(source.shape), source.dtype, fingerprint
        if (same := self._find(key, source)) is not None:
            return same
        if file is not None and (tuple(file.shape), file.dtype, digest(file)) == key:
            kept = HostTensor(file, fingerprint, from_file=True)
        else:
            kept = HostTensor(self._copy(source, lock), fingerprint, from_file=False)
        with self._lock:
            if (same := self._find(key, kept.tensor)) is not None:
                return same  # by another thread, meanwhile
            self._tensors[key] = kept
        return kept

    def status(self) -> HostStatus:
        """Return a snapshot."""
        with self._lock:
            held = list(self._tensors.values())
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # else nothing can be page-locked
        return HostStatus(
            memory_bytes=sum(h.tensor.nbytes for h in held if not h.from_file),
            locked_bytes=sum(h.tensor.nbytes for h in held if on_gpu and is_locked(h.tensor)),
            file_bytes=sum(h.tensor.nbytes for h in held if h.from_file),
            staging_bytes=staging_bytes(),
        )

    def _find(self, key: tuple[object, ...], source: torch.Tensor) -> HostTensor | None:
        """Return what is held under a key, if its bytes are those of `source`."""
        with self._lock:
            same = self._tensors.get(key)
        if same is None:
            return None
        pairs = ((own, piece.to(own.device)) for own, piece in pieces(source.detach(), same.tensor, _COMPARED_BYTES))
        equal = all(torch.equal(*(part.reshape(-1).view(torch.uint8) for part in pair)) for pair in pairs)
        return same if equal else None

    def _copy(self, source: torch.Tensor, lock: bool) -> torch.Tensor:
        with torch.inference_mode(False):
            target = allocate(source.nbytes, _PURPOSE).view(source.dtype).view(source.shape)
            if lock and not page_lock(target) and not self._warned:
                self._warned = True
                logger.warning(
                    "the system refuses to page-lock host memory for weights: copies to the device are slower"
                )
            copy(target, source.detach())
            if source.device.type == "cuda":
                torch.cuda.current_stream(source.device).synchronize()
            return target


host = HostStore()
