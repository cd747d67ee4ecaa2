"""HTTP/1.1 by uvicorn and h11, for clients that have only so long to send the head of a request.

uvicorn bounds how long a connection may be idle between requests, not how long a head may take: one byte at a time
holds a connection for ever. Here, a head that is not complete in time closes it. (Bodies: `middleware.py`.)
"""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Config(uvicorn.Config):
    """uvicorn's configuration, with the seconds that a head may take."""

    def __init__(self, app: Any, *, header_timeout_s: float, **options: Any) -> None:
        super().__init__(app, http=Protocol, **options)
        self.header_timeout_s = header_timeout_s


class Protocol(H11Protocol):
    """One connection; closed where a head that is awaited does not come in time."""

    config: Config
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Await the first head."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take data, in which a head may begin or come to its end."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Await nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Start the timer while a head is awaited, stop it while a request is answered."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if not answering and self._timer is None:
            self._timer = self.loop.call_later(self.config.header_timeout_s, self._refuse)
        elif answering and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self) -> None:
        """Close the connection of a client that is too slow."""
        if not self.transport.is_closing():
            self.transport.write(_TOO_SLOW)
            self.transport.close()
