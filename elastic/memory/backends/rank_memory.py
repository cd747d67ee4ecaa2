"""The memory of another rank: read from its memory file where that is of this host, else over the network."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from elastic.errors import StateError
from elastic.memory.backends.peers import host_buffer
from elastic.memory.backends.shared_file import OpenFile, SharedFile, host_name
from elastic.types import RankMemory

logger = logging.getLogger(__name__)
Pieces = Sequence[tuple[int, int]]
"""Stretches of a place's memory as (offset, bytes); page i of it lies at i * page_bytes."""
CPU = torch.device("cpu")


class MemoryReader(Protocol):
    """Reads memory that another process goes on with: what is read while it is written may be of both."""

    waits: bool
    """Whether another process has to answer, so that no lock may be held meanwhile."""

    device: torch.device
    """Whose memory it reads into: host memory, or that of a GPU."""

    def read(self, address: int, pieces: Pieces) -> None:
        """Copy pieces side by side to an address in memory of its device, without the interpreter's lock.

        They are there on return, for any stream; what still uses the address is queued on this thread's current one.
        Raises `StateError` for what is not there, `RankLost` where the rank that has it is gone.
        """

    def close(self) -> None:
        """Let go of it. Can be called twice."""


class Peers(Protocol):
    """The other ranks, as one of them knows them."""

    name: str
    """Of this rank."""

    def open_memory(self, memory: RankMemory, device: torch.device, *, coordinated: bool) -> MemoryReader:
        """Read memory that another rank serves, `coordinated`: behind what it computes and sends.

        It is read into memory of `device` where that is a GPU that has a way to the rank's, else into host memory.
        Raises `RankLost` where it cannot be reached.
        """


def open_memory(
    file: SharedFile | None,
    memory: RankMemory | None,
    peers: Peers | None,
    device: torch.device = CPU,
    *,
    coordinated: bool = False,
) -> MemoryReader:
    """Open the memory of another rank: by its file if this host has it, else by the rank, `coordinated` or at once.

    `device` is where it is to go; see `Peers`. Raises `StateError` where there is no way to it, `RankLost` where the
    rank is gone.
    """
    reachable = memory is not None and peers is not None
    if file is not None and (file.host == host_name() or not reachable):
        try:
            return OpenFile(file)
        except StateError as error:
            if not reachable:
                raise
            logger.info("memory is read over the network: %s", error)
    if memory is None or peers is None:
        raise StateError("the memory is in no file, and no rank serves it: only its own process can read it")
    return peers.open_memory(memory, device, coordinated=coordinated)


def staging(reader: MemoryReader, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return memory, [bytes], that a reader reads into and a device is filled from: page-locked, if the host's."""
    if reader.device == device:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:  # a device copies to page-locked memory, too
            logger.info("%s has no room for %s bytes: they come by way of host memory", device, f"{nbytes:,}")
    return host_buffer([nbytes], torch.uint8, device)


def read_into(reader: MemoryReader, target: torch.Tensor, pieces: Pieces) -> None:
    """Read pieces side by side into a tensor, [bytes], of any device."""
    if target.device == reader.device:
        reader.read(target.data_ptr(), pieces)
        return
    staged = staging(reader, target.nbytes, target.device)
    reader.read(staged.data_ptr(), pieces)
    target.copy_(staged)
