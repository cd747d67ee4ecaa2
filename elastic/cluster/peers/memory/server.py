"""A rank's memory, as it is served to others: raw bytes of its places, as they lie in their pages."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass

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
Copying = Callable[[int], AbstractContextManager[object]]
"""What the sending of so many bytes is done in."""
Offer = Callable[[PagePool | None, socket.socket], Buffer | None]
"""Makes a buffer for what is read of a place, if there is that place, and tells the other end of a connection of it.

None: there is none. Raises `OSError` where the other end goes away, `BackendUnavailable` without what it needs here.
"""


@dataclass(frozen=True)
class FilePlace:
    """A place whose memory is a file: the system sends from it, and no byte passes through here."""

    descriptor: int

    def require(self, pieces: Pieces) -> None:
        """Raise `StateError` for pieces beyond the end of the file."""
        nbytes = os.fstat(self.descriptor).st_size
        for offset, count in pieces:
            if offset < 0 or count < 0 or offset + count > nbytes:
                raise StateError(f"its memory has {nbytes:,} bytes; {offset:,} to {offset + count:,} are not there")

    def send(self, stream: socket.socket, pieces: Pieces) -> None:
        """Send pieces. Raises `OSError`, also where they are there no more: nothing may follow then."""
        for offset, count in pieces:
            stop = offset + count
            while offset < stop:
                sent = os.sendfile(stream.fileno(), self.descriptor, offset, stop - offset)
                if not sent:
                    raise BrokenPipeError("the memory file was cut")
                offset += sent

    def copy(self, targets: Sequence[torch.Tensor], pieces: Pieces) -> None:
        """Copy each piece to a tensor in host memory, [bytes]. Raises as `send`."""
        for target, (offset, count) in zip(targets, pieces, strict=True):
            if os.preadv(self.descriptor, [memoryview(target.numpy())], offset) < count:  # type: ignore[arg-type]
                raise BrokenPipeError("the memory file was cut")


@dataclass(frozen=True)
class MappedPlace:
    """A place whose pages are in no file, as those of a GPU: they are shown here, and copied to host memory."""

    pool: PagePool

    def require(self, pieces: Pieces) -> None:
        """Raise `StateError` for pages that nobody has."""
        page_bytes = self.pool.page_bytes
        for offset, count in pieces:
            pages = range(offset // page_bytes, -(-(offset + count) // page_bytes))
            with self.pool.mapping_lock:
                if offset < 0 or count < 0 or len(self.pool.owned_of(pages)) < len(pages):
                    raise StateError(f"the pages of bytes {offset:,} to {offset + count:,} are not in use any more")

    def send(self, stream: socket.socket, pieces: Pieces) -> None:
        """Send what is in pages, which stay as they are while it is copied. Raises as `FilePlace.send`."""
        finish_queued_work(self.pool.device)  # it may still be written, on other streams than this one
        for piece in pieces:
            stream.sendall(memoryview(self._content(*piece).numpy()))  # type: ignore[arg-type]

    def copy(self, targets: Sequence[torch.Tensor], pieces: Pieces) -> None:
        """Copy each piece to a tensor, [bytes], on the device of the pages or, by page-locked memory, elsewhere."""
        finish_queued_work(self.pool.device)
        for target, piece in zip(targets, pieces, strict=True):
            if target.device == self.pool.device:
                self._copy(target, piece[0])
            else:
                target.copy_(self._content(*piece))

    def _content(self, offset: int, count: int) -> torch.Tensor:
        """Return bytes of pages, which stay as they are while they are copied. Raises `OSError`."""
        content = host_buffer([count], torch.uint8, self.pool.device)
        self._copy(content, offset)
        return content

    def _copy(self, target: torch.Tensor, offset: int) -> None:
        """Copy bytes of pages, which stay as they are while they are copied. Raises `OSError`."""
        count, (first, skip) = len(target), divmod(offset, self.pool.page_bytes)
        try:
            with self.pool.mapping_lock, self._window(first, -(-(skip + count) // self.pool.page_bytes)) as pages:
                target.copy_(pages[skip : skip + count])
                finish_current_stream(self.pool.device)  # what comes next is on other streams, and unmaps
                del pages
        except ElasticError as error:
            raise BrokenPipeError(str(error)) from error

    @contextmanager
    def _window(self, first: int, count: int) -> Iterator[torch.Tensor]:
        """Show pages at an address of their own, [bytes]; nothing is queued on it when it is left."""
        backend, nbytes = self.pool.backend, count * self.pool.page_bytes
        address = backend.reserve(nbytes)
        try:
            backend.map(address, range(first, first + count))
            try:
                storage = MappedStorage(address, nbytes, self.pool.device, lambda: None)
                yield storage.tensor(torch.uint8)
                storage.drop()
            finally:
                backend.unmap(address, count)
        finally:
            backend.unreserve(address, nbytes)


ServedPlace = FilePlace | MappedPlace


class MemoryServer:
    """Answers questions about a rank's memory, on a thread for each connection. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[str, PagePool] = {}
        self._copying: Copying = nullcontext
        self._streams: dict[socket.socket, threading.Thread] = {}
        self._closed = False

    def serve(self, pools: Iterable[PagePool], copying: Copying = nullcontext) -> None:
        """Serve the memory of places from now on. What is asked to be coordinated is sent in `copying`; it may wait."""
        with self._lock:
            self._pools, self._copying = {pool.name: pool for pool in pools}, copying

    def attach(self, place: str, stream: socket.socket, offer: Offer | None = None) -> None:
        """Answer what is asked about a place on a connection, until it ends; by the buffer that `offer` makes."""
        with self._lock:
            if self._closed:
                stream.close()
                return
            pool = self._pools.get(place)
            refusal = f"it has no place {place!r}; it serves {', '.join(self._pools) or 'none'}"
            arguments = (pool, refusal, stream, offer)
            thread = threading.Thread(target=self._run, args=arguments, name="elastic-memory", daemon=True)
            thread.start()
            self._streams[stream] = thread  # which cannot end before: it takes the lock

    def close(self) -> None:
        """End all connections. Can be called twice."""
        with self._lock:
            self._closed = True
            threads = list(self._streams.values())
            for stream in self._streams:
                hang_up(stream)
        for thread in threads:
            thread.join()

    def _run(self, pool: PagePool | None, refusal: str, stream: socket.socket, offer: Offer | None) -> None:
        """Answer, or say the refusal where there is no such place."""
        with suppress(OSError), ExitStack() as stack:  # the other end has gone
            stack.callback(self._end, stream)
            try:
                buffer = None if offer is None else offer(pool, stream)
            except BackendUnavailable as error:
                logger.warning("another rank cannot read this one's memory: %s", error)
                return
            if buffer is not None:
                stack.enter_context(closing(buffer))
            question = read_question(stream)
            if pool is None:
                _refuse(stream, refusal)
                return
            served = _opened(pool, stack)
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
            if buffer is not None and nbytes > BUFFER_BYTES:
                raise StateError(f"{nbytes:,} bytes are more than a buffer has: {BUFFER_BYTES:,}")
            with self._copying(nbytes) if coordinated else nullcontext():
                served.require(pieces)  # not before: pages go while it waits for what computes
                if buffer is not None:
                    served.copy(torch.split(buffer.bytes[:nbytes], [count for _, count in pieces]), pieces)
                    stream.sendall(ANSWER.pack(nbytes))
                    return
                stream.sendall(ANSWER.pack(nbytes), socket.MSG_MORE)
                served.send(stream, pieces)
        except StateError as error:  # nothing was sent
            _refuse(stream, str(error))


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


def _opened(pool: PagePool, stack: ExitStack) -> ServedPlace:
    """Return the memory of a place, which is there until the stack ends."""
    file = pool.backend.shared_file()
    if file is None:
        return MappedPlace(pool)
    descriptor = os.dup(file.descriptor)
    stack.callback(os.close, descriptor)
    return FilePlace(descriptor)


def _refuse(stream: socket.socket, why: str) -> None:
    words = why.encode()[:4096]
    stream.sendall(ANSWER.pack(-len(words)) + words)
