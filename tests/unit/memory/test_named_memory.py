"""What is left in /dev/shm is told apart from what other programs of the machine have there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from support.isolation.named_memory import FOLDER, NamedMemory
from support.processes import wait_for_end

PROGRAM = """
    import json, multiprocessing, os, signal, sys
    from multiprocessing import resource_tracker, shared_memory

    sys.stdin.readline()
    if os.fork():
        sys.stdin.readline()  # the other does not read before it was said that this one has ended
        os._exit(0)
    print(os.getpid(), flush=True)
    sys.stdin = os.fdopen(os.dup(MORE))
    sys.stdin.readline()
    before = set(os.listdir("/dev/shm"))
    lock = multiprocessing.get_context("spawn").Lock()
    memory = shared_memory.SharedMemory(create=True, size=4096)
    mark = memory.name.strip("/").removeprefix("psm_")
    names = [lock._semlock.name.replace("/", "sem."), memory.name.strip("/"), f"torch_{os.getpid()}_{mark}_0"]
    open(f"/dev/shm/{names[-1]}", "x").close()
    named = open(f"/dev/shm/elastic-{mark}", "x")
    print(*names, f"elastic-{mark}", flush=True)
    sys.stdin.readline()
    os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)  # else it would tidy up
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Program:
    """A process of which nobody here is a parent, once `orphan` was called; it leaves its names when it is killed."""

    def __init__(self) -> None:
        ours, self._orders = os.pipe()
        code = f"MORE = {ours}\n" + textwrap.dedent(PROGRAM)
        pipe = subprocess.PIPE
        self._parent = subprocess.Popen(
            [sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True, bufsize=1, pass_fds=[ours]
        )
        os.close(ours)
        self.names: set[str] = set()

    def fork(self) -> None:
        """Have a child of it be there, which goes on alone."""
        self._say_to_parent()
        self.pid = int(self._hear())

    def orphan(self) -> None:
        self._say_to_parent()
        assert self._parent.wait(60) == 0

    def make(self) -> None:
        """Have it make a semaphore, two kinds of memory, and a file."""
        os.write(self._orders, b"\n")
        self.names = set(self._hear().split())
        assert len(self.names) == 4
        assert self.names <= set(os.listdir(FOLDER))

    def kill(self) -> None:
        os.write(self._orders, b"\n")
        wait_for_end(self.pid)

    def close(self) -> None:
        os.close(self._orders)  # reads end: whoever waits goes on to its end
        for pid in (self._parent.pid, getattr(self, "pid", None)):
            if pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._parent.communicate()
        for name in self.names:
            (FOLDER / name).unlink(missing_ok=True)

    def _say_to_parent(self) -> None:
        assert self._parent.stdin is not None
        self._parent.stdin.write("\n")

    def _hear(self) -> str:
        assert self._parent.stdout is not None
        return self._parent.stdout.readline()


@pytest.fixture
def program() -> Iterator[Program]:
    made = Program()
    try:
        yield made
    finally:
        made.close()


def test_names_of_another_program_do_not_count_while_it_lives_and_when_it_was_killed(program: Program) -> None:
    program.fork()
    program.orphan()
    living, watch = NamedMemory(), NamedMemory()
    program.make()
    assert not living.left() & program.names
    assert not watch.look() & program.names
    program.kill()
    assert program.names <= set(os.listdir(FOLDER))
    assert not watch.left() & program.names


@pytest.mark.parametrize("orphaned", [False, True])
def test_names_that_a_descendant_made_count_while_it_lives_and_when_it_was_killed(
    orphaned: bool, program: Program
) -> None:
    living, watch = NamedMemory(), NamedMemory()
    program.fork()
    for each in (living, watch):
        each.look()
    if orphaned:
        program.orphan()
    program.make()
    assert living.left(0) >= program.names
    assert watch.look() >= program.names
    program.kill()
    assert watch.left(0) >= program.names


def test_a_name_that_nobody_was_seen_with_counts_until_it_goes() -> None:
    watch, late, file = NamedMemory(), NamedMemory(), Path(FOLDER, f"elastic-{os.getpid()}")
    file.touch(exist_ok=False)
    try:
        assert file.name in watch.left(0)
        timer = threading.Timer(0.2, file.unlink)
        timer.start()
        assert file.name not in late.left(60)
        timer.join()
    finally:
        file.unlink(missing_ok=True)
