"""The fork server of ranks as a fork of a program that has torch already, instead of a new interpreter."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from elastic.cluster.launch import fork_server, local


class ForkedServer:
    """Is what `local.ForkServerClient` starts; to be made before its program has threads. Its imports take no time."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if not self.pid:
            ours.close()
            _serve(theirs)
        theirs.close()
        self._asking, self._ended = ours, os.pidfd_open(self.pid)

    def start(self, command: Sequence[str], *, pass_fds: Sequence[int], **_: Any) -> ForkedServer:
        """Have it serve, as `subprocess.Popen` would; once."""
        assert command[2:4] == ["-m", fork_server.__name__]
        with self._asking:
            socket.send_fds(self._asking, [command[-1].encode()], pass_fds)
        return self

    def wait(self, timeout: float | None = None) -> None:
        if not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(fork_server.__name__, timeout or 0)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _serve(asked: socket.socket) -> None:
    """Be the server of whoever asks, which is told at the end of its command; do not return."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    with asked:
        parent, descriptors, _, _ = socket.recv_fds(asked, 64, 1)
    if parent:
        fork_server.main(descriptors[0], int(parent))
    os._exit(0)


def fork_the_server() -> None:
    """Have the first fork server of this program be a fork of it as it is now."""
    there = SimpleNamespace(**vars(subprocess) | {"Popen": ForkedServer().start})
    local.subprocess = there  # type: ignore[assignment]
