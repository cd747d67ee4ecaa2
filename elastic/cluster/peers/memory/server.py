"""A rank's memory, as it is served to others: raw bytes of its places, as they lie in their pages."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from typing import Protocol

import torch

from elastic.cluster.control.connection import hang_up
from elastic.cluster.peers.memory.reader import (
    ANSWER,
    BUFFER_BYTES,
    HEAD,
    MOST_BYTES,
    MOST_PIECES,
    PAIR,
    Buffer,
    read_exactly,
)
from elastic.errors import BackendUnavailable, ElasticError, StateError
from elastic.memory.backends.peers import host_buffer
from elastic.memory.backends.rank_memory import Pieces
from elastic.memory.backends.streams import finish_current_stream, finish_queued_work
from elastic.memory.pages.mapped_storage import MappedStorage
from elastic.memory.pages.page_pool import PagePool

logger = logging.getLogger(__name__)
Copying = Callable[[int], AbstractContextManager[None]]
"""What the sending of so many bytes is done in."""
Offer = Callable[[PagePool | None, socket.socket], Buffer | None]
"""Makes a buffer for what is read of a place, if there is that place, and tells the other end of a connection of it.

None: there is none. Raises `OSError` where the other end goes away, `BackendUnavailable` without what it needs here.
"""


def at_once(nbytes: int) -> AbstractContextManager[None]:
    """Send without waiting for anything."""
    return nullcontext()


class ServedPlace(Protocol):
    """The memory of a place."""

    def require(self, pieces: Pieces) -> None:
        """Raise `StateError` for pieces that are not there."""

    def send(self, stream: socket.socket, pieces: Pieces) -> None:
        """Send pieces. Raises `OSError`, also where they are there no more: nothing may follow then."""

    def copy(self, target: torch.Tensor, pieces: Pieces) -> None:
        """Copy pieces side by side into host memory, or that of the place's device, [bytes]. Raises as `send`."""

    def close(self) -> None:
        """Let go of it."""


class FilePlace:
    """A place whose memory is a file: the system sends from it, and no byte passes through here."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.dup(descriptor)

    def require(self, pieces: Pieces) -> None:
        """Raise `StateError` beyond the end of the file."""
        nbytes = os.fstat(self._file).st_size
        for offset, count in pieces:
            if offset < 0 or count < 0 or offset + count > nbytes:
                raise StateError(f"its memory has {nbytes:,} bytes; {offset:,} to {offset + count:,} are not there")

    def send(self, stream: socket.socket, pieces: Pieces) -> None:
        """Send pieces of the file."""
        for offset, count in pieces:
            stop = offset + count
            while offset < stop:
                sent = os.sendfile(stream.fileno(), self._file, offset, stop - offset)
                if not sent:
                    raise BrokenPipeError("the memory file was cut")
                offset += sent

    def copy(self, target: torch.Tensor, pieces: Pieces) -> None:
        """Copy pieces of the file into host memory, [bytes]."""
        for part, (offset, count) in zip(_parts(target, pieces), pieces, strict=True):
            if os.preadv(self._file, [memoryview(part.numpy())], offset) < count:  # type: ignore[arg-type]
                raise BrokenPipeError("the memory file was cut")

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)


class MappedPlace:
    """A place whose pages are in no file, as those of a GPU: they are shown here, and copied to host memory."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool

    def require(self, pieces: Pieces) -> None:
        """Raise `StateError` for pages that nobody has."""
        page_bytes = self._pool.page_bytes
        for offset, count in pieces:
            pages = range(offset // page_bytes, -(-(offset + count) // page_bytes))
            with self._pool.mapping_lock:
                if offset < 0 or count < 0 or len(self._pool.owned_of(pages)) < len(pages):
                    raise StateError(f"the pages of bytes {offset:,} to {offset + count:,} are not in use any more")

    def send(self, stream: socket.socket, pieces: Pieces) -> None:
        """Send what is in pages; they stay as they are while it is copied."""
        finish_queued_work(self._pool.device)  # it may still be written, on other streams than this one
        for piece in pieces:
            stream.sendall(memoryview(self._content(*piece).numpy()))  # type: ignore[arg-type]

    def copy(self, target: torch.Tensor, pieces: Pieces) -> None:
        """Copy what is in pages into memory of their device, or by way of page-locked memory, [bytes]."""
        finish_queued_work(self._pool.device)
        for part, piece in zip(_parts(target, pieces), pieces, strict=True):
            if part.device == self._pool.device:
                self._copy(part, piece[0])
            else:
                part.copy_(self._content(*piece))

    def close(self) -> None:
        """Nothing is held between two questions."""

    def _content(self, offset: int, count: int) -> torch.Tensor:
        """Return bytes of pages, which stay as they are while they are copied. Raises `OSError`."""
        content = host_buffer([count], torch.uint8, self._pool.device)
        self._copy(content, offset)
        return content

    def _copy(self, target: torch.Tensor, offset: int) -> None:
        """Copy bytes of pages, which stay as they are while they are copied. Raises `OSError`."""
        count, (first, skip) = len(target), divmod(offset, self._pool.page_bytes)
        try:
            with self._pool.mapping_lock, self._window(first, -(-(skip + count) // self._pool.page_bytes)) as pages:
                target.copy_(pages[skip : skip + count])
                finish_current_stream(self._pool.device)  # what comes next is on other streams, and unmaps
                del pages
        except ElasticError as error:
            raise BrokenPipeError(str(error)) from error

    @contextmanager
    def _window(self, first: int, count: int) -> Iterator[torch.Tensor]:
        """Show pages at an address of their own, [bytes]; nothing is queued on it when it is left."""
        backend, nbytes = self._pool.backend, count * self._pool.page_bytes
        address = backend.reserve(nbytes)
        try:
            backend.map(address, range(first, first + count))
            try:
                storage = MappedStorage(address, nbytes, self._pool.device, lambda: None)
                yield storage.tensor(torch.uint8)
                storage.drop()
            finally:
                backend.unmap(address, count)
        finally:
            backend.unreserve(address, nbytes)


class MemoryServer:
    """Answers questions about a rank's memory, on a thread for each connection. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[str, PagePool] = {}
        self._copying: Copying = at_once
        self._streams: dict[socket.socket, threading.Thread] = {}
        self._closed = False

    def serve(self, pools: Iterable[PagePool], copying: Copying) -> None:
        """Serve the memory of places from now on. What is asked to be coordinated is sent in `copying`; it may wait."""
        with self._lock:
            self._pools, self._copying = {pool.name: pool for pool in pools}, copying

    def attach(self, place: str, stream: socket.socket, offer: Offer | None = None) -> None:
        """Answer what is asked about a place on a connection, until it ends; by the buffer that `offer` makes."""
        with self._lock:
            if self._closed:
                stream.close()
                return
            thread = threading.Thread(target=self._run, args=(place, stream, offer), name="elastic-memory", daemon=True)
            self._streams[stream] = thread
            thread.start()

    def close(self) -> None:
        """End all connections. Can be called twice."""
        with self._lock:
            self._closed = True
            threads = list(self._streams.values())
            for stream in self._streams:
                hang_up(stream)
        for thread in threads:
            thread.join()

    def _run(self, place: str, stream: socket.socket, offer: Offer | None) -> None:
        with suppress(OSError), ExitStack() as stack:  # the other end has gone
            stack.callback(self._end, stream)
            try:
                buffer = None if offer is None else offer(self._pool(place), stream)
            except BackendUnavailable as error:
                logger.warning("another rank cannot read this one's memory: %s", error)
                return
            if buffer is not None:
                stack.enter_context(closing(buffer))
            question = read_question(stream)
            try:
                served = stack.enter_context(closing(self._open(place)))
            except StateError as error:
                _refuse(stream, error)
                return
            while True:
                self._answer(served, stream, buffer, *question)
                question = read_question(stream)

    def _end(self, stream: socket.socket) -> None:
        with self._lock:
            del self._streams[stream]
            stream.close()

    def _answer(
        self,
        served: ServedPlace,
        stream: socket.socket,
        buffer: Buffer | None,
        pieces: Pieces,
        coordinated: bool,
    ) -> None:
        nbytes = sum(count for _, count in pieces)
        try:
            served.require(pieces)
            if buffer is not None and nbytes > BUFFER_BYTES:
                raise StateError(f"{nbytes:,} bytes are more than a buffer has: {BUFFER_BYTES:,}")
        except StateError as error:
            _refuse(stream, error)
            return
        with self._copying(nbytes) if coordinated else nullcontext():
            if buffer is not None:
                served.copy(buffer.bytes[:nbytes], pieces)
                stream.sendall(ANSWER.pack(nbytes))
                return
            stream.sendall(ANSWER.pack(nbytes), socket.MSG_MORE)
            served.send(stream, pieces)

    def _pool(self, place: str) -> PagePool | None:
        with self._lock:
            return self._pools.get(place)

    def _open(self, place: str) -> ServedPlace:
        pool = self._pool(place)
        if pool is None:
            raise StateError(f"it has no place {place!r}; it serves {', '.join(self._pools) or 'none'}")
        file = pool.backend.shared_file()
        return MappedPlace(pool) if file is None else FilePlace(file.descriptor)


def read_question(stream: socket.socket) -> tuple[Pieces, bool]:
    """Return the next question, and whether it is to be coordinated.

    Raises `OSError` at the end of the connection, and for what is no question.
    """
    count, coordinated = HEAD.unpack(read_exactly(stream, HEAD.size))
    if count > MOST_PIECES:
        raise ConnectionAbortedError(f"{count:,} pieces were asked for at once")
    pieces = [(offset, nbytes) for offset, nbytes in PAIR.iter_unpack(read_exactly(stream, count * PAIR.size))]
    if sum(max(0, nbytes) for _, nbytes in pieces) > MOST_BYTES:
        raise ConnectionAbortedError("too much was asked for at once")
    return pieces, coordinated


def _parts(target: torch.Tensor, pieces: Pieces) -> tuple[torch.Tensor, ...]:
    """Cut a tensor, [bytes], into what pieces go to."""
    return torch.split(target, [count for _, count in pieces])


def _refuse(stream: socket.socket, error: Exception) -> None:
    words = str(error).encode()[:4096]
    stream.sendall(ANSWER.pack(-len(words)) + words)
