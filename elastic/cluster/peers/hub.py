"""The connections of one rank with the others: each rank listens, and connects where it has something to send."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from elastic.cluster.control import handshake
from elastic.cluster.control.connection import SocketConnection, has_hung_up
from elastic.cluster.control.listener import LOOPBACK, Listener
from elastic.cluster.peers.log import PeerLogConnection
from elastic.cluster.peers.memory import device as devices
from elastic.cluster.peers.memory import nixl
from elastic.cluster.peers.memory.nixl import NixlAgent, NixlMemoryReader
from elastic.cluster.peers.memory.reader import OtherMemories, RankMemoryReader
from elastic.cluster.peers.memory.server import MemoryServer, Offer
from elastic.cluster.peers.transport import PeerTransport, TrafficCounter
from elastic.errors import ElasticError, RankLost, StateError
from elastic.memory.backends.rank_memory import CPU
from elastic.types import RankMemory

Address = tuple[str, int]
Kind = Literal["hidden states", "log", "memory", "device", "nixl"]


@dataclass(frozen=True)
class PeerHello:
    """The first message on a connection between two ranks."""

    rank: str
    """Who connects."""
    of: str
    """The instance, by its home; of memory the place."""
    kind: Kind
    number: int
    """Of hidden states: grows with the connections that the rank has made."""


class PeerHub:
    """Where a rank meets others. Thread-safe; it listens from its making to `close`.

    What the instances of other homes send never waits behind one another's: each has connections of its own, and so has
    whoever reads a rank's memory.
    """

    def __init__(
        self, name: str, key: bytes, address: Address = (LOOPBACK, 0), bulk: Literal["sockets", "nixl"] = "sockets"
    ) -> None:
        """`bulk` is how it reads the memory of others: by NIXL, all ranks need its package.

        Raises `ConfigError` for an address that cannot be listened on, `BackendUnavailable` without NIXL.
        """
        self.name = name
        self.wires = TrafficCounter()
        """What went to other ranks, and came from them."""
        self._key = key
        self._changed = threading.Condition()
        self._addresses: dict[str, Address] = {}
        self._lost: dict[str, str] = {}  # rank -> why
        self._transports: dict[str, PeerTransport] = {}  # by home
        self._early: dict[tuple[str, str], tuple[socket.socket, int]] = {}  # home, rank: before there is a transport
        self._arrived: dict[str, SocketConnection] = {}  # home -> its log, until it is accepted
        self._logs: set[PeerLogConnection] = set()
        self._bulk, self._making_agent = bulk, threading.Lock()
        self._agent = NixlAgent() if bulk == "nixl" else None
        self.memory = MemoryServer()
        """What other ranks read of this one's memory: nothing, until it serves places."""
        self._others = OtherMemories(self._connect_memory)
        self._numbers = itertools.count()
        self._closed = False
        self._listener = Listener(address, key, self._accept, hello=PeerHello)
        self.address: Address = self._listener.address
        """Where other ranks find it."""

    def meet(self, addresses: Mapping[str, Address]) -> None:
        """Know where other ranks are, before they connect.

        One that was lost, or is at another address now, is a new one: what was sent to or came from the one before is
        dropped.
        """
        addresses = {rank: address for rank, address in addresses.items() if rank != self.name}
        with self._changed:
            earlier = {rank: self._addresses.get(rank, address) for rank, address in addresses.items()}
            new = [rank for rank, address in addresses.items() if rank in self._lost or address != earlier[rank]]
            self._addresses.update(addresses)
            for rank in new:
                self._lost.pop(rank, None)
                self._drop_early(rank)
            transports = [*self._transports.values()]
        for transport in transports:
            for rank in new:
                transport.met(rank)
            for rank in addresses:
                transport.peer(rank).sender.open()

    def transport(self, home: str) -> PeerTransport:
        """Return this rank's transport for the instance of a home; after `close` of one, a new one.

        It connects to the ranks that were met, so that they know of a new one before anything is sent.
        """
        with self._changed:
            self._require_open()
            transport = self._transports.get(home)
            if transport is not None and not transport.closed:
                return transport
            transport = self._transports[home] = PeerTransport(
                home,
                lambda rank, number: self._connect(rank, home, "hidden states", number).detach(),
                self.wires,
                self._numbers,
            )
            for rank, reason in self._lost.items():
                transport.peer(rank).end(reason)
            for of, rank in [key for key in self._early if key[0] == home]:
                transport.peer(rank).receiver.attach(*self._early.pop((of, rank)))
            for rank in self._addresses.keys() - self._lost.keys():
                transport.peer(rank).sender.open()
            return transport

    def part(self, home: str) -> None:
        """Have nothing to do with the instance of a home any more: close its transport, if there is one."""
        with self._changed:
            transport = self._transports.pop(home, None)
        if transport is not None:
            transport.close()

    def connect_log(self, rank: str, home: str) -> PeerLogConnection:
        """Return this end, the home's, of the log of an instance to a rank. Raises `RankLost`."""
        return self._keep(self._connect(rank, home, "log"), rank)

    def accept_log(self, home: str, timeout_s: float) -> PeerLogConnection:
        """Return the other end of the log of an instance: wait until its home connects. Raises `RankLost`."""
        with self._changed:
            self._changed.wait_for(lambda: self._log_came(home) or home in self._lost or self._closed, timeout_s)
            self._require_open()
            connection = self._arrived.pop(home, None)
            reason = self._lost.get(home, f"rank {home!r} did not connect its log within {timeout_s:g} s")
        if connection is None:
            raise RankLost(reason, rank=home)
        return self._keep(connection, home)

    def open_memory(
        self, memory: RankMemory, device: torch.device = CPU, *, coordinated: bool = False
    ) -> RankMemoryReader:
        """Read the memory of another rank; see `Peers`. Raises `RankLost`."""
        reader = self._others.open(memory, device, coordinated)
        with self._changed:
            reason = self._lost.get(memory.rank)
        if reason is not None:  # while it connected: `lost` did not see it yet
            reader.lost(reason)
        return reader

    @property
    def sending(self) -> bool:
        """Whether hidden states wait to be sent: the other ranks have not taken them yet."""
        with self._changed:
            transports = [*self._transports.values()]
        return any(transport.sending for transport in transports)

    def lost(self, rank: str) -> None:
        """Have every call for a rank raise `RankLost`, now and until it is met again."""
        reason = f"rank {rank!r} was lost"
        with self._changed:
            self._lost[rank] = reason
            self._addresses.pop(rank, None)
            transports, logs = [*self._transports.values()], [log for log in self._logs if log.rank == rank]
            self._drop_early(rank)
            self._changed.notify_all()
        for transport in transports:
            transport.peer(rank).end(reason)
        for log in logs:
            log.lost(reason)
        self._others.lost(rank, reason)

    def close(self) -> None:
        """End all connections, and listen no more. Can be called twice."""
        with self._changed:
            self._closed = True
            transports, logs = [*self._transports.values()], [*self._logs]
            self._changed.notify_all()
        self._listener.close()
        for transport in transports:
            transport.close()
        for log in logs:
            log.close()
        self._others.close()
        self.memory.close()
        with self._changed:
            self._drop_early(None)

    # -- connections

    def _connect_memory(
        self, memory: RankMemory, device: torch.device, take_back: Callable[[RankMemoryReader], None]
    ) -> RankMemoryReader:
        if device.type == "cuda" and (reader := self._connect_device(memory, device, take_back)) is not None:
            return reader
        count = partial(self.wires.count, memory.rank, "read_bytes")
        if self._bulk == "sockets":
            stream = self._connect(memory.rank, memory.place, "memory").detach()
            return RankMemoryReader(memory, stream, take_back, count)
        agent, stream = self._nixl(), self._connect(memory.rank, memory.place, "nixl").detach()
        try:
            return NixlMemoryReader(agent, memory, stream, take_back, count)
        except OSError as error:
            stream.close()
            raise RankLost(f"rank {memory.rank!r} cannot be read by NIXL: {error}", rank=memory.rank) from error

    def _connect_device(
        self, memory: RankMemory, device: torch.device, take_back: Callable[[RankMemoryReader], None]
    ) -> RankMemoryReader | None:
        """Return a reader from device to device; None where bytes have to go by way of host memory."""
        stream = self._connect(memory.rank, memory.place, "device").detach()
        try:
            buffer = devices.accept(stream, device, memory.rank)
        except OSError as error:
            stream.close()
            raise RankLost(f"rank {memory.rank!r} has gone: {error}", rank=memory.rank) from error
        if buffer is None:
            stream.close()
            return None
        count = partial(self.wires.count, memory.rank, "copied_bytes")
        return devices.DeviceMemoryReader(buffer, device, memory, stream, take_back, count)

    def _nixl(self) -> NixlAgent:
        """Return NIXL's agent, made at the first call."""
        with self._making_agent:
            self._agent = self._agent or NixlAgent()
            return self._agent

    def _connect(self, rank: str, of: str, kind: Kind, number: int = 0) -> SocketConnection:
        """Return a connection on which the hello was said. Raises `RankLost`."""
        with self._changed:
            self._require_open()
            address, reason = self._addresses.get(rank), self._lost.get(rank)
        if reason is not None:
            raise RankLost(reason, rank=rank)
        if address is None:
            raise StateError(f"rank {self.name!r} has not met {rank!r}; tell it the address first")
        try:
            connection = handshake.connect(address, self._key)
            try:
                connection.send(PeerHello(self.name, of, kind, number))
            except ElasticError:
                connection.close()
                raise
        except ElasticError as error:
            raise RankLost(f"rank {rank!r} cannot be reached: {error}", rank=rank) from error
        return connection

    def _keep(self, connection: SocketConnection, rank: str) -> PeerLogConnection:
        log = PeerLogConnection(connection, rank, self._drop_log)
        with self._changed:
            self._logs.add(log)
            reason = self._lost.get(rank)
            closed = self._closed
        if closed:
            log.close()
        elif reason is not None:
            log.lost(reason)
        return log

    def _drop_log(self, log: PeerLogConnection) -> None:
        with self._changed:
            self._logs.discard(log)

    def _accept(self, connection: SocketConnection, hello: PeerHello) -> None:
        """Take a connection that another rank has made; on a thread of the listener."""
        with self._changed:
            if self._closed or hello.rank in self._lost:
                connection.close()
                return
            if hello.kind == "log":
                earlier = self._arrived.pop(hello.of, None)
                if earlier is not None:
                    earlier.close()
                self._arrived[hello.of] = connection
            elif hello.kind in ("memory", "device", "nixl"):
                offers: dict[Kind, Offer] = {
                    "device": devices.offer,
                    "nixl": lambda _, stream: nixl.offer(self._nixl(), stream),
                }
                self.memory.attach(hello.of, connection.detach(), offers.get(hello.kind))
            else:
                self._attach(hello, connection.detach())
            self._changed.notify_all()

    def _log_came(self, home: str) -> bool:
        """Return whether the log of an instance waits here. One that its home has ended since is closed."""
        connection = self._arrived.get(home)
        if connection is not None and has_hung_up(connection.pipe):
            self._arrived.pop(home).close()
            return False
        return connection is not None

    def _attach(self, hello: PeerHello, stream: socket.socket) -> None:
        """Give a stream to the instance's transport, or keep it until there is one, or the other end closes it."""
        transport = self._transports.get(hello.of)
        if transport is not None and not transport.closed:
            transport.peer(hello.rank).receiver.attach(stream, hello.number)
            return
        for key in [key for key, (early, _) in self._early.items() if has_hung_up(early)]:
            self._early.pop(key)[0].close()
        earlier, number = self._early.get((hello.of, hello.rank), (None, -1))
        if earlier is not None and number > hello.number:
            stream.close()
            return
        if earlier is not None:
            earlier.close()
        self._early[hello.of, hello.rank] = stream, hello.number

    def _drop_early(self, rank: str | None) -> None:
        """Close what a rank (None: any) has connected and nobody has taken."""
        for key in [key for key in self._early if rank in (None, key[1])]:
            self._early.pop(key)[0].close()
        for home in [home for home in self._arrived if rank in (None, home)]:
            self._arrived.pop(home).close()

    def _require_open(self) -> None:
        if self._closed:
            raise StateError(f"the connections of rank {self.name!r} were closed")
