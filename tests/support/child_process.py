"""Running code that may hang or crash where it can do no harm, and waiting for background work."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from contextlib import suppress
from pathlib import Path

from elastic.memory.pages.background import janitor

TESTS = str(Path(__file__).parents[1])
"""On the path of tests, and not of their children."""
FORK_SERVER = """
import gc, os, socket, sys
import torch, transformers.generation, transformers.models.llama.modeling_llama
asking = socket.socket(fileno=int(sys.argv.pop()))
gc.freeze()
while True:
    code, descriptors, _, _ = socket.recv_fds(asking, 1 << 17, 3)
    if not code:
        os._exit(0)
    pid = os.fork()
    if not pid:
        break
    for descriptor in descriptors:
        os.close(descriptor)
    asking.send(str(pid).encode())
    asking.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
asking.close()
for number, descriptor in enumerate(descriptors, 1):
    os.dup2(descriptor, number % 3)
    os.close(descriptor)
exec(code)
"""
"""Imports what takes seconds, and nothing of ours. A child runs code in `__main__` and ends as any interpreter does."""


def in_child(code: str, timeout: float = 240, **environment: str) -> str:
    """Run code that could hang; a hang is a failure with the stacks of all threads."""
    child = subprocess.run(
        [sys.executable, "-P", "-c", _told_of_a_hang(code, timeout)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, **environment},
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


def in_fork(code: str, timeout: float = 240, **environment: str) -> str:
    """As `in_child`, in a process that has torch and the Llama model already: for code that needs no other start.

    `environment` may hold what ATen and oneDNN read when they first compute: importing them computes nothing.
    """
    status, said, errors = end_of_fork(f"import os\nos.environ.update({environment})\n{textwrap.dedent(code)}", timeout)
    assert status == 0, f"ended with {status}: {(said + errors)[-20000:]}"
    return said


def run_script(script: Path, *arguments: str, timeout: float = 240, with_ranks: bool = False) -> str:
    """Run a program as the interpreter would, in such a fork; return what it wrote to its output.

    With `with_ranks` its ranks come from a fork of it, too, as it is when it begins.
    """
    code = f"""
        import runpy, sys
        sys.setswitchinterval({sys.getswitchinterval()})
        if {with_ranks}:
            sys.path.append({TESTS!r})
            from support.isolation.forked_server import fork_the_server
            fork_the_server()
        sys.argv = {[str(script), *arguments]}
        runpy.run_path({str(script)!r}, run_name="__main__")
    """
    return in_fork(code, timeout)


def end_of_fork(code: str, timeout: float = 240) -> tuple[int, str, str]:
    """Run code as `in_fork` does; return its exit code, and what it wrote to its output and its errors."""
    server = _fork_server()
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        server.settimeout(timeout)
        socket.send_fds(server, [_told_of_a_hang(code, timeout).encode()], [said.fileno(), errors.fileno()])
        try:
            server.recv(16)  # its pid
            status = int(server.recv(16))
        except TimeoutError:
            server.close()
            _fork_server.cache_clear()  # the next answer of this one would be about this child
            raise
        for file in (said, errors):
            file.seek(0)
        return status, said.read(), errors.read()


class Forked:
    """A program in such a fork, beside the test. One at a time: no other fork is started until it is closed."""

    def __init__(self, code: str) -> None:
        """`code` is run in `__main__`. It is ended after four minutes, whoever waits for it by then."""
        self._server = _fork_server()
        guard = "import faulthandler; faulthandler.dump_traceback_later(240, exit=True)\n"
        (said, to_said), (errors, to_errors), (to_hear, heard) = os.pipe(), os.pipe(), os.pipe()
        theirs = to_said, to_errors, to_hear
        socket.send_fds(self._server, [(guard + textwrap.dedent(code)).encode()], theirs)
        for descriptor in theirs:
            os.close(descriptor)
        self.stdout, self.stderr, self.stdin = os.fdopen(said, "rb"), os.fdopen(errors, "rb"), os.fdopen(heard, "wb", 0)
        self.pid = int(self._server.recv(16))
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):  # it has ended
                os.kill(self.pid, number)

    def wait(self, timeout: float = 60) -> int:
        """Wait for its end; return its exit code, or the signal that ended it with a minus."""
        if self.returncode is None:
            self._server.settimeout(timeout)
            self.returncode = int(self._server.recv(16))
        return self.returncode

    def close(self) -> None:
        """End it, if it has not. Can be called twice."""
        self.send_signal(signal.SIGKILL)
        self.wait()
        for file in (self.stdout, self.stderr, self.stdin):
            file.close()


def _told_of_a_hang(code: str, timeout: float) -> str:
    setup = f"import faulthandler, sys; faulthandler.dump_traceback_later({timeout - 10}, exit=True)\n"
    return setup + "sys.setswitchinterval(1e-6)\n" + textwrap.dedent(code)


@functools.cache
def _fork_server() -> socket.socket:
    """The socket of this process's fork server, which ends with the process."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        server = subprocess.Popen(
            [sys.executable, "-P", "-c", FORK_SERVER, str(there.fileno())],
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # else numpy starts threads, which no fork takes along
            start_new_session=True,
        )
    atexit.register(_end, server)
    return here


def _end(server: subprocess.Popen[bytes]) -> None:
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def wait_for_the_janitor() -> None:
    """Return when all that was left for the background thread until now is done, beside it too."""
    done = threading.Event()
    janitor.submit(done.set)
    assert done.wait(timeout=60)
    for thread in tuple(janitor._beside):
        thread.join(timeout=60)
        assert not thread.is_alive()
