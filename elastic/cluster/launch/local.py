"""Ranks as processes of this host, forked from a process that has imported what they need."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from elastic.cluster.control.connection import SocketConnection, encode, hang_up, socket_pair
from elastic.cluster.control.handshake import compare_protocols
from elastic.cluster.control.processes import Exit
from elastic.cluster.launch.base import START_S, await_hello, of_a_directory
from elastic.cluster.launch.fork_server import MOST_BYTES
from elastic.cluster.rank.client import RankClient
from elastic.cluster.rank.spec import RankSpec
from elastic.errors import ElasticError, StateError, require_period, require_whole

IMPORT_S = 120.0
"""How long the fork server may take to import torch and transformers."""


class LocalProcess:
    """A rank's process, which the fork server waits for: a `RankProcess`."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.ended = pidfd
        self._exit: Future[Exit] = Future()
        self._lock = threading.Lock()  # of the descriptor
        self._open = True

    def kill(self) -> None:
        """End it at once; also when it is stopped."""
        with self._lock, suppress(ProcessLookupError):
            if self._open:
                signal.pidfd_send_signal(self.ended, signal.SIGKILL)

    def wait(self, timeout_s: float) -> Exit | None:
        """Wait until the fork server has told how it ended."""
        with suppress(TimeoutError):
            return self._exit.result(timeout_s)
        return None

    def close(self) -> None:
        """Close the descriptor."""
        with self._lock:
            if self._open:
                os.close(self.ended)
            self._open = False

    def told(self, end: Exit) -> None:
        """Note how it ended."""
        if not self._exit.done():
            self._exit.set_result(end)


class ForkServerClient:
    """The fork server of this process, and the ranks that it has forked."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = [os.path.abspath(entry) for entry in sys.path]
        alone = {"OPENBLAS_NUM_THREADS": "1"}  # else numpy starts threads, which no fork takes along
        with ExitStack() as failed, theirs:
            failed.callback(ours.close)
            arguments = [str(theirs.fileno()), str(os.getpid())]
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-m", "elastic.cluster.launch.fork_server", *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a rank prints is no output of this program
                env={**os.environ, **alone, "PYTHONPATH": os.pathsep.join(path)},
                start_new_session=True,
            )
            failed.pop_all()
        self.pid = self._server.pid
        self._socket = ours
        self._ids = itertools.count()
        self._lock = threading.Lock()  # of the wishes
        self._wishes: dict[int, Future[LocalProcess]] = {}
        self._ranks: dict[int, LocalProcess] = {}
        self.ended = False
        self._thread = threading.Thread(target=self._read, name="elastic-fork-server", daemon=True)
        self._thread.start()

    def fork(self, stream: socket.socket, model: str) -> Future[LocalProcess]:
        """Have a rank forked that has a connected socket, which is closed here."""
        wish: Future[LocalProcess] = Future()
        with stream, self._lock:
            if self.ended:
                raise StateError("the fork server has ended; start the rank again")
            number = next(self._ids)
            self._wishes[number] = wish
            try:
                message = json.dumps({"id": number, "model": model}).encode()
                socket.send_fds(self._socket, [message], [stream.fileno()])
            except OSError as error:
                del self._wishes[number]
                raise StateError(f"the fork server cannot be asked: {error.strerror}") from error
        return wish

    def close(self) -> None:
        """End it, and its ranks. Can be called twice."""
        hang_up(self._socket)
        try:
            self._server.wait(5)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._thread.join()
        self._socket.close()

    def _read(self) -> None:
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._socket, MOST_BYTES, 1)
            except OSError:
                break
            if not data:
                break
            self._take(json.loads(data), descriptors)
        with self._lock:
            self.ended = True
            wishes, self._wishes = list(self._wishes.values()), {}
        for wish in wishes:
            wish.set_exception(StateError("the fork server has ended; what it said is at standard error"))
        for rank in self._ranks.values():
            rank.told(Exit("its fork server has ended, and it with it"))

    def _take(self, message: dict[str, Any], descriptors: list[int]) -> None:
        if "status" in message:
            if (rank := self._ranks.pop(message["pid"], None)) is not None:
                rank.told(_exit(message["status"], message["by_signal"]))
            return
        with self._lock:
            wish = self._wishes.pop(message["id"])
        if "error" in message:
            wish.set_exception(StateError(message["error"]))
            return
        if not descriptors:  # it was cut off; the rank ends with its connection
            wish.set_exception(StateError("this process has too many open files"))
            return
        os.set_inheritable(descriptors[0], False)
        rank = self._ranks[message["pid"]] = LocalProcess(message["pid"], descriptors[0])
        wish.set_result(rank)


class LocalLauncher:
    """Starts ranks as processes of this host. None outlives this process, however it ends.

    The process that they are forked from is started with the first rank: that takes as long as importing torch and
    transformers does. It never imports the program that runs here. Ranks whose specs say neither `cores` nor `threads`
    share the host's cores among `ranks`: with a thread for every core in each, they would wait for one another.
    """

    name = "local"

    def __init__(self, ranks: int = 1, *, start_timeout_s: float = START_S) -> None:
        """`ranks` is how many there will be at first. Raises `ConfigError` for less than one."""
        require_whole(ranks, "ranks")
        self._threads = max(1, len(os.sched_getaffinity(0)) // ranks)
        require_period(start_timeout_s, "start_timeout_s")
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()  # of the server
        self._server: ForkServerClient | None = None
        self._closed = False

    def start(self, spec: RankSpec) -> RankClient:
        """Start a rank; see `Launcher`."""
        spec = of_a_directory(spec)
        if spec.threads is None and not spec.cores:
            spec = replace(spec, threads=self._threads)
        encoded = encode(spec)
        try:
            server = self.warm_up()
            ours, theirs = socket_pair()
        except OSError as error:
            raise StateError(f"rank {spec.name!r} cannot be started now: {error.strerror or error}") from error
        try:
            wish = server.fork(theirs, spec.model)
            try:
                process = wish.result(IMPORT_S)
            except TimeoutError:
                wish.add_done_callback(_close_late)
                raise StateError("the fork server is busy; try again later") from None
        except ElasticError as error:
            ours.close()
            raise StateError(f"rank {spec.name!r} did not start: {error}") from error
        greet = partial(_greet, ours, encoded)
        return await_hello(ours, process, spec.name, timeout_s=self._start_timeout_s, greet=greet)

    def close(self) -> None:
        """End all that it has started. Can be called twice."""
        with self._lock:
            self._closed = True
            if self._server is not None:
                self._server.close()

    def warm_up(self) -> ForkServerClient:
        """Return the process that ranks are forked from: it begins to import what they need, unless it is there."""
        with self._lock:
            if self._closed:
                raise StateError("the launcher was closed; make a new one")
            if self._server is not None and self._server.ended:
                self._server.close()
                self._server = None
            if self._server is None:
                self._server = ForkServerClient()
            return self._server


def _greet(connection: SocketConnection, spec: bytes) -> None:
    """Tell a process which rank it is. Raises `ConfigError` for another protocol, `EOFError` where it has gone."""
    try:
        compare_protocols(connection)
        connection.send_bytes(spec)
    except StateError as error:
        raise EOFError(str(error)) from error


def _close_late(wish: Future[LocalProcess]) -> None:
    """Keep no descriptor of a process that nobody waits for any more: it ends with its connection."""
    if wish.exception() is None:
        wish.result().close()


def _exit(status: int, by_signal: bool) -> Exit:
    if not by_signal:
        return Exit(f"its process has ended with code {status}")
    try:
        name = signal.Signals(status).name
    except ValueError:  # one without a name, such as a real-time signal
        name = f"signal {status}"
    return Exit(f"its process was killed by {name}", True)
