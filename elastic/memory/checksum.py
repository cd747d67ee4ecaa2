"""Checksums of tensors: whether two have the same bytes, on whatever device and in whatever order."""

from __future__ import annotations

import ctypes
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch

_DIGEST_WORDS = 128
_GROUP_BYTES = 8 * _DIGEST_WORDS
_CACHED_GROUPS = 512
"""Summed both ways before the next ones on a CPU: they are read from memory once."""
_SMALL_BYTES = 1 << 20
"""Fewer bytes in host memory are summed by numpy, at the same rate: torch gives the interpreter's lock up for each of a
dozen operators, and a forward pass on another thread waits for it each time that they take it back."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def digest(tensor: torch.Tensor) -> int:
    """Compute a checksum of the bytes of a tensor of any shape and dtype, on any device, in any layout.

    Equal tensors have equal ones. Words of 64 bits are summed in groups of 128 neighbours, and those at the same place
    of all groups; of the sums BLAKE2b is computed. So each change of one word shows, and what changes places within a
    group shows too, as heads within a row do. It tells changed weights from unchanged ones, and damage; it is no
    defence against an adversary.
    """
    running = RunningDigest()
    running.update(tensor)
    return running.value


class RunningDigest:
    """The checksum of bytes that come one run after another: that of all of them side by side."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=8)
        self._columns = np.zeros(_DIGEST_WORDS, np.int64)
        self._count = 0
        self._rest: torch.Tensor | None = None

    def update(self, tensor: torch.Tensor) -> None:
        """Add the bytes of a tensor, any shape and dtype, on the device of those before."""
        if self._rest is None and _is_small(tensor):
            memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
            self._add_small(np.ctypeslib.as_array(memory))  # without an operator of torch's
            return
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if flat.storage_offset() % 8:  # where no word begins
            flat = flat.clone()
        self._count += flat.numel()
        if self._rest is not None:
            flat = torch.cat((self._rest, flat))
        whole = flat.numel() // _GROUP_BYTES * _GROUP_BYTES
        groups = flat[:whole].view(torch.int64).view(-1, _DIGEST_WORDS)
        pieces = torch.split(groups, _CACHED_GROUPS) if groups.device.type == "cpu" else (groups,)
        sums = [(piece.sum(dim=1), piece.sum(dim=0)) for piece in pieces]
        rows, columns = (torch.cat(each) for each in zip(*sums, strict=True))
        self._hash.update(rows.cpu().numpy().data)
        self._columns += columns.view(-1, _DIGEST_WORDS).sum(dim=0).cpu().numpy()
        rest = flat.numel() - whole
        self._rest = flat[whole:].clone() if rest else None  # the tensor may be written, and its memory given back

    def _add_small(self, flat: npt.NDArray[np.uint8]) -> None:
        self._count += flat.size
        whole = flat.size // _GROUP_BYTES * _GROUP_BYTES
        groups = flat[:whole].view(np.int64).reshape(-1, _DIGEST_WORDS)
        self._hash.update(groups.sum(axis=1).data)
        self._columns += groups.sum(axis=0)
        if flat.size > whole:
            self._rest = torch.from_numpy(flat[whole:].copy())

    @property
    def value(self) -> int:
        """The checksum of all bytes so far, as a number of 64 bits with its sign."""
        whole = self._hash.copy()
        whole.update(self._columns.data)
        if self._rest is not None:
            whole.update(self._rest.cpu().numpy().data)
        whole.update(self._count.to_bytes(8, "little"))
        return int.from_bytes(whole.digest(), "little", signed=True)


def _is_small(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in _PLAIN
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and 0 < tensor.nbytes < _SMALL_BYTES
    )
