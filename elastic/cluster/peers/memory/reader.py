"""The memory of other ranks, read over connections that carry nothing else: nothing waits behind it.

A question is a count, a flag (1: what the other rank computes and sends goes first), then that many pairs (offset,
bytes); the answer a number, then as many raw bytes, or, if it is
negative, the words of an error. One question is under way on a connection at a time, so that the bytes between two
ranks are never more than somebody has asked for at once.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from elastic.cluster.control.connection import hang_up, receive_into
from elastic.errors import RankLost, StateError
from elastic.memory.backends.rank_memory import CPU, Pieces
from elastic.types import RankMemory

HEAD, PAIR, ANSWER = struct.Struct("<I?"), struct.Struct("<qq"), struct.Struct("<q")
MOST_PIECES, MOST_BYTES = 1 << 16, 1 << 30
"""The bounds on one question."""
BUFFER_BYTES = 4 << 20
"""Of a buffer through which bytes go between two ranks."""


class Buffer(Protocol):
    """What bytes go through between two ranks, [BUFFER_BYTES]; each end has one of its own, or a share in one."""

    @property
    def bytes(self) -> torch.Tensor:
        """All of it, [BUFFER_BYTES], where the memory is that is read."""

    def close(self) -> None:
        """Let go of it at one end, which does so once."""


class RankMemoryReader:
    """A `MemoryReader` on a connection. It is one thread's at a time, but for `lost`."""

    waits = True
    device = CPU

    def __init__(
        self,
        memory: RankMemory,
        stream: socket.socket,
        closed: Callable[[RankMemoryReader], None],
        count: Callable[[int], None],
    ) -> None:
        """`closed` takes the reader back when nobody reads by it any more; `count` is told of bytes that came."""
        self.memory = memory
        self._stream, self._on_closed, self._count = stream, closed, count
        self._gone = ""
        self.coordinated = False
        """Whether it is answered behind what the other rank computes and sends."""

    @property
    def usable(self) -> bool:
        """Whether the other end may still answer."""
        if self._gone:
            return False
        try:
            self._stream.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # it has ended, or says what nobody asked it for

    def read(self, address: int, pieces: Pieces) -> None:
        """Copy pieces side by side to an address; see `MemoryReader`."""
        nbytes = sum(count for _, count in pieces)
        if len(pieces) > MOST_PIECES or nbytes > MOST_BYTES:
            raise StateError(f"{nbytes:,} bytes in {len(pieces):,} pieces are too much to ask for at once")
        question = HEAD.pack(len(pieces), self.coordinated) + b"".join(PAIR.pack(*piece) for piece in pieces)
        try:
            self._stream.sendall(question)
            (answer,) = ANSWER.unpack(read_exactly(self._stream, ANSWER.size))
            if answer == nbytes:
                self._take(address, nbytes)
                self._count(nbytes)
                return
            words = read_exactly(self._stream, min(max(0, -answer), 4096))
        except OSError as error:
            self._gone = self._gone or f"rank {self.memory.rank!r} has gone: {error.strerror or error}"
            raise RankLost(self._gone, rank=self.memory.rank) from error
        raise StateError(f"rank {self.memory.rank!r}: {words.decode(errors='replace')}")

    def lost(self, reason: str) -> None:
        """Have whoever reads, now or later, get `RankLost`; from any thread."""
        self._gone = self._gone or reason
        hang_up(self._stream)

    def close(self) -> None:
        """Read no more by it; see `MemoryReader`."""
        self._on_closed(self)

    def end(self) -> None:
        """End the connection."""
        self._stream.close()

    def _take(self, address: int, nbytes: int) -> None:
        """Have what was answered at an address. Raises `OSError`."""
        if nbytes:
            receive_into(self._stream, memoryview((ctypes.c_char * nbytes).from_address(address)))


class BufferReader(RankMemoryReader):
    """A reader whose bytes go through a buffer, which ends with it."""

    _buffer: Buffer

    def read(self, address: int, pieces: Pieces) -> None:
        """Copy pieces side by side to an address; see `MemoryReader`."""
        for part in buffers_full(pieces):
            super().read(address, part)
            address += sum(nbytes for _, nbytes in part)

    def end(self) -> None:
        """End the connection."""
        self._buffer.close()
        super().end()


Connect = Callable[[RankMemory, torch.device, Callable[[RankMemoryReader], None]], RankMemoryReader]


class OtherMemories:
    """The connections on which a rank reads the memory of others: each is kept for the next reader. Thread-safe."""

    def __init__(self, connect: Connect) -> None:
        """`connect` makes a reader, which goes back by the call that it is given; it may wait, and raise `RankLost`."""
        self._connect = connect
        self._lock = threading.Lock()
        self._idle: list[tuple[RankMemoryReader, torch.device]] = []
        self._reading: dict[RankMemoryReader, torch.device] = {}
        self._closed = False

    def open(self, memory: RankMemory, device: torch.device, coordinated: bool) -> RankMemoryReader:
        """Return a reader of a rank's memory, to a device if that is possible. Raises `RankLost`."""
        reader = self._kept(memory, device) or self._connect(memory, device, self._take_back)
        reader.coordinated = coordinated
        with self._lock:
            if not self._closed:
                self._reading[reader] = device
                return reader
        reader.end()
        raise StateError("the connections of this rank were closed")

    def lost(self, rank: str | None, reason: str) -> None:
        """Have whoever reads the memory of a rank (None: any) get `RankLost`."""
        with self._lock:
            for idle in [idle for idle in self._idle if rank in (None, idle[0].memory.rank)]:
                self._idle.remove(idle)
                idle[0].end()
            reading = [reader for reader in self._reading if rank in (None, reader.memory.rank)]
            for reader in reading:  # under the lock: who reads does not close it meanwhile
                reader.lost(reason)

    def close(self) -> None:
        """End all connections. Can be called twice."""
        with self._lock:
            self._closed = True
        self.lost(None, "the connections of this rank were closed")

    def _kept(self, memory: RankMemory, device: torch.device) -> RankMemoryReader | None:
        with self._lock:
            for idle in [idle for idle in self._idle if (idle[0].memory, idle[1]) == (memory, device)]:
                self._idle.remove(idle)
                if idle[0].usable:
                    return idle[0]
                idle[0].end()
        return None

    def _take_back(self, reader: RankMemoryReader) -> None:
        with self._lock:
            device = self._reading.pop(reader, None)
            if device is None:
                return
            if self._closed or not reader.usable:
                reader.end()
            else:
                self._idle.append((reader, device))


def read_exactly(stream: socket.socket, nbytes: int) -> bytes:
    """Return the next bytes of a connection, so many. Raises `OSError` where it ends before."""
    encoded = bytearray(nbytes)
    receive_into(stream, memoryview(encoded))
    return bytes(encoded)


def buffers_full(pieces: Pieces) -> Iterator[list[tuple[int, int]]]:
    """Cut pieces (offset, bytes) into lists of as many bytes as a buffer has."""
    part, left = list[tuple[int, int]](), BUFFER_BYTES
    for offset, nbytes in pieces:
        while nbytes:
            taken = min(nbytes, left)
            part.append((offset, taken))
            offset, nbytes, left = offset + taken, nbytes - taken, left - taken
            if not left:
                yield part
                part, left = [], BUFFER_BYTES
    if part:
        yield part
