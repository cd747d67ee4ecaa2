"""The memory of other ranks, read one-sided by NIXL: over RDMA where the hosts have it, else by what UCX finds.

What NIXL knows are buffers of fixed size at both ends, never pages: those come and go, and what a network card has
registered must not. The rank that has the memory copies what is asked for to its buffer, and says when it is there; the
other one reads it from there. Questions go over a connection, as without NIXL.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from uuid import uuid4

import torch

from elastic.cluster.peers.memory.reader import BUFFER_BYTES, BufferReader, RankMemoryReader, read_exactly
from elastic.errors import BackendUnavailable
from elastic.types import RankMemory

POLL_S = 2e-5
GREETING_S = 60.0
"""How long the other end may take to have NIXL."""
_GREETING = struct.Struct("<QQ")  # the buffer's address, the bytes of the metadata that follow


class NixlBuffer:
    """Host memory that NIXL knows, [BUFFER_BYTES]."""

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self.bytes = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()
        self._registered = agent.register(self.bytes)

    def close(self) -> None:
        """Have NIXL forget it. Can be called twice."""
        registered, self._registered = self._registered, None
        if registered is not None:
            self._agent.deregister(registered)


class NixlAgent:
    """What NIXL is in a rank. Thread-safe; making it takes seconds. What NIXL raises are `ConnectionError`s here."""

    def __init__(self) -> None:
        """Raises `BackendUnavailable` without the package."""
        api = _api()
        self._lock = threading.Lock()
        self._met: Counter[str] = Counter()  # other ends -> by how many connections
        bindings = api.nixlBind
        kinds = [
            getattr(bindings, name) for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error")
        ]
        self._errors: tuple[type[Exception], ...] = tuple(kinds)  # they have no class in common
        self._agent = api.nixl_agent(uuid4().hex, api.nixl_agent_config(True, False, 0, backends=["UCX"]))

    def register(self, memory: torch.Tensor) -> Any:
        """Have NIXL know memory, of any shape and dtype; return what `deregister` needs."""
        with self._asking() as agent:
            return agent.register_memory(memory)

    def deregister(self, registered: Any) -> None:
        """Have NIXL forget memory."""
        with self._asking() as agent:
            agent.deregister_memory(registered)

    def greet(self, stream: socket.socket, buffer: NixlBuffer) -> None:
        """Tell the other end of a connection how to read a buffer."""
        with self._asking() as agent:
            metadata = agent.get_agent_metadata()
        stream.sendall(_GREETING.pack(buffer.address, len(metadata)) + metadata)

    def meet(self, metadata: bytes) -> str:
        """Know the other end, as it was said in a greeting, until `part`; return its name."""
        with self._asking() as agent:
            name = agent.add_remote_agent(metadata)
            name = name.decode() if isinstance(name, bytes) else str(name)
            self._met[name] += 1
        return name

    def part(self, name: str) -> None:
        """Know the other end no more, unless another connection goes there."""
        with suppress(ConnectionError), self._asking() as agent:
            self._met[name] -= 1
            if not self._met[name]:
                del self._met[name]
                agent.remove_remote_agent(name)

    def read(self, remote: str, address: int, buffer: NixlBuffer, nbytes: int, gone: Callable[[], object]) -> None:
        """Read bytes at an address there into a buffer, unless the other end has `gone`."""
        with self._asking() as agent:
            target = agent.get_xfer_descs([(buffer.address, nbytes, 0)], "DRAM")
            source = agent.get_xfer_descs([(address, nbytes, 0)], "DRAM")
            handle = agent.initialize_xfer("READ", target, source, remote)
        try:
            with self._asking() as agent:
                state = agent.transfer(handle)
            while state == "PROC" and not gone():
                time.sleep(POLL_S)
                with self._asking() as agent:
                    state = agent.check_xfer_state(handle)
        finally:
            with suppress(ConnectionError), self._asking() as agent:
                agent.release_xfer_handle(handle)
        if state != "DONE":
            raise ConnectionResetError(f"NIXL ended a transfer as {state}")

    @contextmanager
    def _asking(self) -> Iterator[Any]:
        try:
            with self._lock:
                yield self._agent
        except self._errors as error:
            raise ConnectionResetError(f"NIXL: {error}") from error


def offer(agent: NixlAgent, stream: socket.socket) -> NixlBuffer:
    """Make a buffer, and tell the other end of a connection how to read it. Raises `OSError`."""
    buffer = NixlBuffer(agent)
    try:
        agent.greet(stream, buffer)
    except BaseException:
        buffer.close()
        raise
    return buffer


class NixlMemoryReader(BufferReader):
    """A `MemoryReader` whose bytes come by NIXL."""

    _buffer: NixlBuffer

    def __init__(
        self,
        agent: NixlAgent,
        memory: RankMemory,
        stream: socket.socket,
        closed: Callable[[RankMemoryReader], None],
        count: Callable[[int], None],
    ) -> None:
        """Raises `OSError` where the other end goes away."""
        super().__init__(memory, stream, closed, count)
        self._agent, self._buffer = agent, NixlBuffer(agent)
        try:
            self._remote = self._meet(stream)
        except BaseException:
            self._buffer.close()
            raise

    def end(self) -> None:
        """End the connection."""
        super().end()
        self._agent.part(self._remote)

    def _meet(self, stream: socket.socket) -> str:
        """Read the greeting; return the name of the other end."""
        stream.settimeout(GREETING_S)
        self._address, length = _GREETING.unpack(read_exactly(stream, _GREETING.size))
        metadata = read_exactly(stream, length)
        stream.settimeout(None)
        return self._agent.meet(metadata)

    def _take(self, address: int, nbytes: int) -> None:
        if nbytes:
            self._agent.read(self._remote, self._address, self._buffer, nbytes, lambda: self._gone)
            ctypes.memmove(address, self._buffer.address, nbytes)


def _api() -> Any:
    """Return NIXL's module. Raises `BackendUnavailable`."""
    try:
        from nixl_cu12 import _api as api
    except ImportError as error:
        raise BackendUnavailable("bulk='nixl' needs the package nixl-cu12: pip install 'elastic-llm[nixl]'") from error
    return api
