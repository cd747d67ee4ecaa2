"""The fork server of a launcher, forked from a process that has torch and transformers already."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from elastic.cluster.launch import fork_server


class ForkedServer:
    """Stands in for `subprocess.Popen` in `elastic.cluster.launch.local`: a new interpreter imports for seconds."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **_: Any) -> None:
        self.pid = os.fork()
        if not self.pid:
            try:
                _serve(command, *pass_fds, env)
            finally:
                os._exit(1)
        self._ended: int | None = os.pidfd_open(self.pid)

    def wait(self, timeout: float | None = None) -> None:
        if self._ended is None:
            return
        ended = select.poll()
        ended.register(self._ended, select.POLLIN)
        if not ended.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired("the fork server", timeout or 0)
        os.waitpid(self.pid, 0)
        os.close(self._ended)
        self._ended = None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _serve(command: Sequence[str], descriptor: int, env: Mapping[str, str]) -> None:
    """Be the fork server, with nothing of the asking program open but its socket."""
    os.setsid()
    os.dup2(2, 1)
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, 1 << 12)
    os.environ.update(env)
    fork_server.main(*map(int, command[-2:]))
    os._exit(0)
