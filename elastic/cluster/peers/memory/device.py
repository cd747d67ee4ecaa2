"""The memory of a GPU, read by other ranks of its host from device to device: no byte of it passes host memory.

What two ranks share is a buffer of fixed size, never pages: a page that another process has imported is not given back
before that lets go of it, its owner would have to be held up until that has copied it, and each would be exported,
imported, mapped and granted anew (36 us to grant access alone, see `memory.backends.cuda`; 2 MiB take 21 us at
100 GB/s). The rank that has the memory copies what is asked for to its buffer, on the same device, and says when it is
there; the other one copies it from there to its own device. Questions go over a connection, as without a GPU, and so
does the offer of the buffer: ranks of one process have it at one address, another process of the host is handed a file
descriptor, over a Unix socket, for a secret that stood in the offer.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress

import torch

from elastic.cluster.peers.memory.reader import BUFFER_BYTES, BufferReader, RankMemoryReader, read_exactly
from elastic.errors import ElasticError, StateError
from elastic.memory.backends.cuda import CudaBackend
from elastic.memory.backends.peers import can_access
from elastic.memory.backends.shared_file import host_name
from elastic.memory.pages.mapped_storage import MappedStorage
from elastic.memory.pages.page_pool import PagePool
from elastic.types import RankMemory

logger = logging.getLogger(__name__)
OFFER_S = 30.0
"""How long each end waits for the other one's next word about a buffer."""
_OFFER = struct.Struct("<QQ16s32s64s")  # process, address (0: no buffer), name of the socket, secret, host
_COPIES, _IMPORTS, _DECLINES = b"c", b"i", b"d"
"""What the other end says: it copies from the buffer, it wants a descriptor first, it cannot have it."""
_buffers: dict[int, DeviceBuffer] = {}
"""Those made in this process, by address."""
_sharing = threading.Lock()


class DeviceBuffer:
    """Memory of a GPU that two ranks have mapped, [BUFFER_BYTES]: it goes when both have closed it."""

    def __init__(self, device: torch.device, descriptor: int | None = None) -> None:
        """Make memory of a device, or have what another process made (`descriptor`) be within reach of a device.

        Raises `CapacityError` where there is no room, `StateError` for what the driver refuses.
        """
        backend = CudaBackend(device, BUFFER_BYTES, shareable=True)
        with ExitStack() as undo:
            self.address = backend.reserve(BUFFER_BYTES)
            undo.callback(backend.unreserve, self.address, BUFFER_BYTES)
            undo.callback(backend.close)
            backend.create([0]) if descriptor is None else backend.adopt(0, descriptor)
            backend.map(self.address, [0])
            undo.callback(backend.unmap, self.address, 1)
            self._give_back = undo.pop_all().close
        self.device, self.backend, self._ends = backend.device, backend, 1

    @property
    def bytes(self) -> torch.Tensor:
        """All of it, [BUFFER_BYTES]: only where it was made, where torch knows it as memory of its device."""
        return MappedStorage(self.address, BUFFER_BYTES, self.device, lambda: None).tensor(torch.uint8)

    def share(self) -> bool:
        """Have one more end in this process, which closes it too; False where all have closed it."""
        with _sharing:
            self._ends += bool(self._ends)
            return bool(self._ends)

    def close(self) -> None:
        """Let go of it at one end: nothing is queued on it there."""
        with _sharing:
            self._ends -= 1
            if self._ends:
                return
            _buffers.pop(self.address, None)
        self._give_back()


class DeviceMemoryReader(BufferReader):
    """A `MemoryReader` that copies to a GPU, from a buffer that the other rank fills."""

    _buffer: DeviceBuffer

    def __init__(
        self,
        buffer: DeviceBuffer,
        device: torch.device,
        memory: RankMemory,
        stream: socket.socket,
        closed: Callable[[RankMemoryReader], None],
        count: Callable[[int], None],
    ) -> None:
        """`buffer` ends with it."""
        super().__init__(memory, stream, closed, count)
        self.device, self._buffer, self._backend = device, buffer, CudaBackend(device)

    def _take(self, address: int, nbytes: int) -> None:
        self._backend.copy(address, self._buffer.address, nbytes)


# -- the rank that has the memory


def offer(pool: PagePool | None, stream: socket.socket) -> DeviceBuffer | None:
    """Offer a buffer at a connection for what is read of a place; None: the other end does not have it.

    Raises `OSError` where the other end goes away.
    """
    buffer = _made_for(pool)
    if buffer is None:
        stream.sendall(_OFFER.pack(os.getpid(), 0, b"", b"", b""))
        return None
    try:
        taken = _agree(buffer, stream)
    except BaseException:
        buffer.close()
        raise
    if taken:
        return buffer
    buffer.close()
    return None


def _made_for(pool: PagePool | None) -> DeviceBuffer | None:
    if pool is None or pool.device.type != "cuda":
        return None
    try:
        buffer = DeviceBuffer(pool.device)
    except ElasticError as error:
        logger.warning("the memory of %s goes to other ranks by way of host memory: %s", pool.name, error)
        return None
    with _sharing:
        _buffers[buffer.address] = buffer
    return buffer


def _agree(buffer: DeviceBuffer, stream: socket.socket) -> bool:
    """Say where a buffer is; return whether the other end copies from it."""
    name, secret = secrets.token_bytes(16), secrets.token_bytes(32)
    stream.settimeout(OFFER_S)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(b"\0" + name)  # of no file: it goes with this process
        listener.listen()
        stream.sendall(_OFFER.pack(os.getpid(), buffer.address, name, secret, host_name().encode()))
        answer = read_exactly(stream, 1)
        if answer == _IMPORTS:
            _hand_over(buffer, listener, stream, secret)
    if answer == _IMPORTS:  # behind the listener, so that who waits for a descriptor in vain is told
        answer = read_exactly(stream, 1)
    stream.settimeout(None)
    return answer == _COPIES


def _hand_over(buffer: DeviceBuffer, listener: socket.socket, stream: socket.socket, secret: bytes) -> None:
    """Give a descriptor of a buffer to whoever comes with the secret, unless the other end says that it cannot."""
    try:
        descriptor = buffer.backend.export(0)
    except StateError as error:
        logger.warning("the memory of %s goes to other processes by way of host memory: %s", buffer.device, error)
        return
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(stream, select.POLLIN)
    try:
        while listener.fileno() in dict(poll.poll(OFFER_S * 1000)):
            if _given(descriptor, listener.accept()[0], secret):
                return
    finally:
        os.close(descriptor)


def _given(descriptor: int, connection: socket.socket, secret: bytes) -> bool:
    """Send a descriptor over a connection, unless it is a stranger's."""
    with connection, suppress(OSError):
        connection.settimeout(OFFER_S)
        if hmac.compare_digest(read_exactly(connection, len(secret)), secret):
            socket.send_fds(connection, [b"\0"], [descriptor])
            return True
    return False


# -- the rank that reads it


def accept(stream: socket.socket, device: torch.device, rank: str) -> DeviceBuffer | None:
    """Take the buffer that is offered at a connection; None: bytes have to go by way of host memory.

    Raises `OSError` where the other end goes away.
    """
    stream.settimeout(OFFER_S)
    process, address, name, secret, host = _OFFER.unpack(read_exactly(stream, _OFFER.size))
    if not address:
        logger.info("the memory of rank %r comes by way of host memory: it has no buffer on a GPU", rank)
        stream.settimeout(None)
        return None
    buffer: DeviceBuffer | None = None
    try:
        if host.rstrip(b"\0").decode() != host_name():
            raise StateError("it is on another host")
        if process == os.getpid():
            buffer = _shared(address, device)
        else:
            stream.sendall(_IMPORTS)
            buffer = _imported(name, secret, device)
    except (ElasticError, OSError) as error:
        logger.info("the memory of rank %r comes to %s by way of host memory: %s", rank, device, error)
    stream.sendall(_DECLINES if buffer is None else _COPIES)
    stream.settimeout(None)
    return buffer


def _shared(address: int, device: torch.device) -> DeviceBuffer:
    """Return a buffer that was made in this process, with one more end."""
    buffer = _buffers.get(address)
    if buffer is None or not buffer.share():
        raise StateError("its buffer has gone")
    if buffer.device != device and not can_access(device.index, buffer.device.index):
        buffer.close()
        raise StateError(f"{device} has no access to the memory of {buffer.device}")
    return buffer


def _imported(name: bytes, secret: bytes, device: torch.device) -> DeviceBuffer:
    """Return a buffer that another process made. Raises `OSError`, `CapacityError`, `StateError`."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(OFFER_S)
        connection.connect(b"\0" + name)
        connection.sendall(secret)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        raise StateError("the driver there exports no memory")
    try:
        return DeviceBuffer(device, descriptors[0])
    finally:
        os.close(descriptors[0])
