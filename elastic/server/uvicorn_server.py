"""Running an app with uvicorn, and ending it without losing a request."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from types import FrameType

import uvicorn
from fastapi import FastAPI

from elastic.errors import ConfigError
from elastic.server.generation.state import ServerState
from elastic.server.hosts import ANY, Hosts, names_for
from elastic.server.http_protocol import Config

DRAIN_S = 30.0
HEADER_TIMEOUT_S = 20.0
_CLOSE_S = 2
"""How long connections may take to close at the end."""


class Server(uvicorn.Server):
    """A uvicorn server whose first signal drains and whose second one ends it at once.

    While it drains it answers new requests with 503, and finishes those it has: after `drain_s` they are cancelled.
    """

    def __init__(
        self,
        app: FastAPI,
        *,
        drain_s: float = DRAIN_S,
        header_timeout_s: float = HEADER_TIMEOUT_S,
        allowed_hosts: Sequence[str] = (ANY,),
        log_level: str = "info",
    ) -> None:
        config = Config(
            Hosts(app, allowed_hosts),
            header_timeout_s=header_timeout_s,
            lifespan="on",
            ws="none",
            log_level=log_level,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2 * _CLOSE_S,
        )
        super().__init__(config)
        self._drain_s = drain_s
        self._serving: ServerState = app.state.serving
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signals = 0
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None = None) -> None:
        """A signal, or a call from any thread."""
        self._signals += 1
        self._serving.drain()
        if self._loop is None:
            self.should_exit = True
        elif self._signals == 1:
            self._loop.call_soon_threadsafe(self._begin_to_drain)
        else:
            self.should_exit = self.force_exit = self._serving.forced = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close connections and the engine; at once after a second signal."""
        hanging_up = asyncio.get_running_loop().call_later(0 if self.force_exit else _CLOSE_S, self._hang_up)
        await super().shutdown(sockets)
        hanging_up.cancel()
        if self.force_exit:
            self._hang_up()
            await self._stop_engine()
            await self._requests_ended()
            await self.lifespan.shutdown()

    def _hang_up(self) -> None:
        """Have what still runs see its client gone: it ends by itself, which cancelling it would not do quietly."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _requests_ended(self) -> None:
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=_CLOSE_S)

    def _begin_to_drain(self) -> None:
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        if not await self._idle_within(self._drain_s):
            await self._stop_engine()
            await self._idle_within(_CLOSE_S)
        self.should_exit = True

    async def _idle_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._serving.idle()
        return not self._serving.answering

    async def _stop_engine(self) -> None:
        """End what still runs, as cancelled."""
        await asyncio.to_thread(self._serving.engine.stop, drain=False, timeout_s=_CLOSE_S)


def bind(host: str, port: int) -> socket.socket:
    """A socket that nobody can connect to yet; port 0 takes a free one. Raises `ConfigError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(f"--host {host} --port {port}: {error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigError(f"--host {host} --port {port}: {error.strerror}") from error
    return bound


def listen(bound: socket.socket) -> None:
    """Let clients connect to a socket of `bind`. Raises `ConfigError` where another server was faster."""
    try:
        bound.listen()
    except OSError as error:
        host, port = bound.getsockname()[:2]
        raise ConfigError(f"--host {host} --port {port}: {error.strerror}") from error


def run(
    app: FastAPI,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    bound: socket.socket | None = None,
    drain_s: float = DRAIN_S,
    header_timeout_s: float = HEADER_TIMEOUT_S,
    allowed_hosts: Sequence[str] | None = None,
) -> int:
    """Serve an app of `create_app` until SIGTERM or SIGINT. Returns an exit code: 0, or 1 after a second signal.

    `bound` is a socket of `bind(host, …)` to use instead of a new one for `port`; it is closed at the end.
    `header_timeout_s` is how long a client may take to send the head of a request. `allowed_hosts` are the names in
    `Host` headers that are answered to; `"*"` is any, `"*.example.com"` any below. Addresses always are. None: names of
    this machine where only it can reach the server, else any.
    """
    if not header_timeout_s > 0:
        raise ConfigError(f"header_timeout_s={header_timeout_s} must be above 0")
    with bind(host, port) if bound is None else bound as bound:
        listen(bound)
        where = bound.getsockname()[:2]
        print(f"serving {app.state.serving.name} on http://{_in_url(where[0])}:{where[1]}", flush=True)
        hosts = names_for(host, where[0]) if allowed_hosts is None else allowed_hosts
        server = Server(app, drain_s=drain_s, header_timeout_s=header_timeout_s, allowed_hosts=hosts)
        server.run([bound])
    return int(server.force_exit)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
