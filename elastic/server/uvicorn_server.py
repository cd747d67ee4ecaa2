"""An app run with uvicorn, and ended without losing a request."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from types import FrameType

import uvicorn
from fastapi import FastAPI

from elastic.errors import ConfigError
from elastic.server.generation.state import ServerState
from elastic.server.hosts import ANY, Hosts, check_hosts, names_for
from elastic.server.http_protocol import Config
from elastic.server.routes.catalogue import Catalogue

DRAIN_S = 30.0
HEADER_TIMEOUT_S = 20.0
_CLOSE_S = 2
"""Time for connections to close at the end."""


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
        self._models: Catalogue = app.state.models
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signals = 0
        self._draining: Future[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None = None) -> None:
        """Drain at the first call, end at once at the second: a signal's handler, to be called on any thread."""
        self._signals += 1
        self._serving.drain()
        if self._loop is None:
            self.should_exit = True
        elif self._signals == 1:
            self._draining = asyncio.run_coroutine_threadsafe(self._drain(), self._loop)
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
            self._models.cancel_answers()
            if self.server_state.tasks:
                await asyncio.wait(self.server_state.tasks, timeout=_CLOSE_S)
            await self.lifespan.shutdown()

    def _hang_up(self) -> None:
        """Have what still runs see its client gone: it ends by itself, which cancelling it would not do quietly."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _drain(self) -> None:
        """Wait for the answers under way, and exit; also where an engine fails to cancel them."""
        try:
            if not await self._idle_within(self._drain_s):
                self._models.cancel_answers()
                await self._idle_within(_CLOSE_S)
        finally:
            self.should_exit = True

    async def _idle_within(self, seconds: float) -> bool:
        """Wait until nothing is answered any more, and tell whether that was in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._serving.idle()
        return not self._serving.answering


def bind(host: str, port: int) -> socket.socket:
    """Make a socket that nobody can connect to yet; port 0 takes a free one. Raises `ConfigError`."""
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
    check_hosts(allowed_hosts or (), "allowed_hosts")
    with bind(host, port) if bound is None else bound as bound, _short_collections():
        listen(bound)
        address, port = bound.getsockname()[:2]
        url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
        print(f"serving {app.state.serving.name} on {url}", flush=True)
        hosts = names_for(host, address) if allowed_hosts is None else allowed_hosts
        server = Server(app, drain_s=drain_s, header_timeout_s=header_timeout_s, allowed_hosts=hosts)
        server.run([bound])
    return int(server.force_exit)


@contextlib.contextmanager
def _short_collections() -> Iterator[None]:
    """Leave what is there already out of garbage collections.

    A body of many objects sets off a collection of all, which stops the event loop: of torch, transformers and the rest
    there are some 400,000.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
