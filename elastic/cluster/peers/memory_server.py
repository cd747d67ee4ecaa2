"""A rank's memory, as it is served to others: raw bytes of its places, as they lie in their pages."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from typing import Protocol

import torch

from elastic.cluster.peers.memory_reader import ANSWER, HEAD, MOST_BYTES, MOST_PIECES, PAIR
from elastic.cluster.peers.nixl_memory import BUFFER_BYTES, NixlAgent, NixlBuffer
from elastic.errors import BackendUnavailable, ElasticError, StateError
from elastic.memory.backends.rank_memory import Pieces
from elastic.memory.backends.streams import finish_queued_work
from elastic.memory.mapped_storage import MappedStorage
from elastic.memory.page_pool import PagePool

logger = logging.getLogger(__name__)
Copying = Callable[[int], AbstractContextManager[None]]
"""What the sending of so many bytes is done in."""


def at_once(nbytes: int) -> AbstractContextManager[None]:
    """Send without waiting for anything."""
    return nullcontext()


class ServedPlace(Protocol):
    """The memory of a place."""

    def require(self, pieces: Pieces) -> None:
        """Raise `StateError` for pieces that are not there."""

    def send(self, stream: socket.socket, pieces: Pieces) -> None:
        """Send pieces. Raises `OSError`, also where they are there no more: nothing may follow then."""

    def copy(self, address: int, pieces: Pieces) -> None:
        """Copy pieces side by side to an address in host memory. Raises `OSError` as `send`."""

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

    def copy(self, address: int, pieces: Pieces) -> None:
        """Copy pieces of the file to an address."""
        for offset, count in pieces:
            if os.preadv(self._file, [(ctypes.c_char * count).from_address(address)], offset) < count:
                raise BrokenPipeError("the memory file was cut")
            address += count

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

    def copy(self, address: int, pieces: Pieces) -> None:
        """Copy what is in pages to an address."""
        finish_queued_work(self._pool.device)
        for piece in pieces:
            content = self._content(*piece)
            ctypes.memmove(address, content.data_ptr(), content.nbytes)
            address += content.nbytes

    def close(self) -> None:
        """Nothing is held between two questions."""

    def _content(self, offset: int, count: int) -> torch.Tensor:
        """Return bytes of pages, which stay as they are while they are copied. Raises `OSError`."""
        content = torch.empty(count, dtype=torch.uint8, pin_memory=self._pool.device.type == "cuda")
        first, skip = divmod(offset, self._pool.page_bytes)
        try:
            with self._pool.mapping_lock, self._window(first, -(-(skip + count) // self._pool.page_bytes)) as pages:
                content.copy_(pages[skip : skip + count])
                del pages
        except ElasticError as error:
            raise BrokenPipeError(str(error)) from error
        return content

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

    def attach(self, place: str, stream: socket.socket, nixl: Callable[[], NixlAgent] | None = None) -> None:
        """Answer what is asked about a place on a connection, until it ends; with `nixl`, by that."""
        with self._lock:
            if self._closed:
                stream.close()
                return
            thread = threading.Thread(target=self._run, args=(place, stream, nixl), name="elastic-memory", daemon=True)
            self._streams[stream] = thread
            thread.start()

    def close(self) -> None:
        """End all connections. Can be called twice."""
        with self._lock:
            self._closed = True
            threads = list(self._streams.values())
            for stream in self._streams:
                with suppress(OSError):  # it has ended
                    stream.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()

    def _run(self, place: str, stream: socket.socket, nixl: Callable[[], NixlAgent] | None) -> None:
        with suppress(OSError), ExitStack() as stack:  # the other end has gone
            stack.callback(self._end, stream)
            buffer = None
            if nixl is not None:
                try:
                    agent = nixl()
                except BackendUnavailable as error:
                    logger.warning("another rank cannot read this one's memory: %s", error)
                    return
                buffer = stack.enter_context(closing(NixlBuffer(agent)))
                agent.greet(stream, buffer)
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
        buffer: NixlBuffer | None,
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
                served.copy(buffer.address, pieces)
                stream.sendall(ANSWER.pack(nbytes))
                return
            stream.sendall(ANSWER.pack(nbytes), socket.MSG_MORE)
            served.send(stream, pieces)

    def _open(self, place: str) -> ServedPlace:
        with self._lock:
            pool = self._pools.get(place)
        if pool is None:
            raise StateError(f"it has no place {place!r}; it serves {', '.join(self._pools) or 'none'}")
        file = pool.backend.shared_file()
        return MappedPlace(pool) if file is None else FilePlace(file.descriptor)


def read_question(stream: socket.socket) -> tuple[Pieces, bool]:
    """Return the next question, and whether it is to be coordinated.

    Raises `OSError` at the end of the connection, and for what is no question.
    """
    count, coordinated = HEAD.unpack(_read(stream, HEAD.size))
    if count > MOST_PIECES:
        raise ConnectionAbortedError(f"{count:,} pieces were asked for at once")
    pieces = [(offset, nbytes) for offset, nbytes in PAIR.iter_unpack(_read(stream, count * PAIR.size))]
    if sum(max(0, nbytes) for _, nbytes in pieces) > MOST_BYTES:
        raise ConnectionAbortedError("too much was asked for at once")
    return pieces, coordinated


def _read(stream: socket.socket, nbytes: int) -> bytes:
    encoded = b""
    while len(encoded) < nbytes:
        part = stream.recv(nbytes - len(encoded), socket.MSG_WAITALL)
        if not part:
            raise ConnectionResetError("the other end has gone")
        encoded += part
    return encoded


def _refuse(stream: socket.socket, error: Exception) -> None:
    words = str(error).encode()[:4096]
    stream.sendall(ANSWER.pack(-len(words)) + words)
