"""The log of an instance, between its home and one other rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic.cluster.control.connection import SocketConnection
from elastic.errors import RankLost, StateError


class PeerLogConnection:
    """A `LogConnection` to another rank; both of its calls raise `RankLost` when that has gone.

    After `close` at this end they raise what a `Connection` raises.
    """

    def __init__(self, connection: SocketConnection, rank: str, closed: Callable[[PeerLogConnection], None]) -> None:
        """`closed` is called when it is, once or more."""
        self.rank = rank
        self._connection, self._on_close = connection, closed
        self._closed = False
        self._lost = ""

    def send(self, message: Any) -> None:
        """Send a message; see `Connection`. Raises `RankLost`."""
        try:
            self._connection.send(message)
        except StateError as error:
            if self._closed:
                raise
            raise self._error(error) from error

    def receive(self) -> Any:
        """Return the next message; see `Connection`. Raises `RankLost`, also where the rank has closed its end."""
        try:
            return self._connection.receive()
        except EOFError as error:
            if self._closed:
                raise
            raise self._error(error) from error

    def lost(self, reason: str) -> None:
        """Have every call raise `RankLost`, now and from now on."""
        self._lost = self._lost or reason
        self._connection.close()

    def close(self) -> None:
        """End it for both; see `Connection`."""
        self._closed = True
        self._connection.close()
        self._on_close(self)

    def _error(self, error: Exception) -> RankLost:
        return RankLost(self._lost or f"rank {self.rank!r} has gone: {str(error) or 'end of file'}", rank=self.rank)
