"""Processes that tests look at from outside: whether they live, and who else of them."""

from __future__ import annotations

import os
import re
import select
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PATIENCE_S = 60.0
FORKSERVER = Counter({"pipe:[]": 2, "socket:[]": 2})
"""What starting ranks opens once; see `held`."""


def wait_until(what: Callable[[], object], why: str = "it never came to be", timeout_s: float = PATIENCE_S) -> None:
    """Wait for a condition that nobody tells of."""
    until = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < until, why
        time.sleep(0.002)


def alive(pid: int) -> bool:
    """Whether a process runs: one that has ended and was not waited for does not."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def wait_for_end(pid: int, timeout_s: float = PATIENCE_S) -> None:
    """Wait until a process of anybody's has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(timeout_s * 1000), f"process {pid} lives on"
    finally:
        os.close(pidfd)


def children(pid: int) -> set[int]:
    """The processes that one has forked and that have not been waited for."""
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def descendants(pid: int) -> set[int]:
    """The processes that any thread of one has forked, and those that these have."""
    found = set[int]()
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            found |= {int(child) for child in file.read_text().split()}
    return found.union(*map(descendants, found))


def open_files(pid: int) -> list[str]:
    """What a process holds open."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(os.readlink(entry))
        except OSError:
            continue  # closed meanwhile
    return found


def held() -> Counter[str]:
    """Count what this process has open that ranks leave behind if anything does: memory files, sockets, processes."""
    found = Counter(re.sub(r"\d+", "", name) for name in open_files(os.getpid()))
    return Counter({what: n for what, n in found.items() if re.match(r"/memfd|socket|anon_inode:\[pidfd|pipe", what)})
