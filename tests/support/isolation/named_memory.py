"""Names that come to /dev/shm while a test runs, without those of other programs of the machine.

Elastic makes none: memory of ranks is in memory files without names. What would come here if a rank, or the process of
a fleet, began to: `psm_*` of `multiprocessing.shared_memory`, `sem.mp-*` of locks and queues of `multiprocessing` that
are not for forks, `torch_<pid>_*` of tensors that are shared by name, `__KMP_REGISTERED_LIB_<pid>_*` of LLVM's OpenMP.
Programs beside it make the same, and `vllm_*`. Most say nothing of who they are of, so it is looked at who holds them
while they come. A semaphore is mapped by the name that it had before glibc linked it to its own: its inode tells.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from support.processes import descendants

FOLDER = Path("/dev/shm")
LOOK_S = 0.1
File = tuple[str, int]
"""A device as /proc/PID/maps gives it, and an inode."""


class NamedMemory:
    """The names that come from when it is made, on a thread of its own until `left`.

    A name is another program's if it is another user's, or was seen with a process that neither this one nor any of its
    descendants has forked, and with none of these; what nobody was seen with counts as one that was made here.
    """

    def __init__(self) -> None:
        self._before, self._others = set(_named()), set[File]()
        self._ours, self._lock, self._ended = {os.getpid()}, threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="named-memory", daemon=True)
        self._thread.start()

    def left(self, patience_s: float = 5.0) -> set[str]:
        """Return the names that have come and that are of no other program; one that goes meanwhile is not left."""
        self._ended.set()
        self._thread.join()
        until = time.monotonic() + patience_s
        while (names := self.look()) and time.monotonic() < until:
            time.sleep(LOOK_S)
        return names

    def look(self) -> set[str]:
        """Return the names that have come so far and that are not known to be of others."""
        with self._lock:
            processes = {int(entry.name) for entry in Path("/proc").glob("[0-9]*")}
            self._follow()  # after it was asked who is there: whom we fork from now on is not among the others
            come = {file: name for file, name in _named().items() if file not in self._before | self._others}
            if come:
                theirs = set[File]().union(*(_files_of(pid, come) for pid in processes - self._ours))
                self._others |= theirs.difference(*(_files_of(pid, come) for pid in self._ours))
            return {name for file, name in come.items() if file not in self._others}

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.look()

    def _follow(self) -> None:
        """Know who descends from this process, also of those whose parents have ended since the last time."""
        living = {os.getpid()} | descendants(os.getpid())
        for pid in self._ours - living:
            if Path(f"/proc/{pid}").exists():
                living |= {pid} | descendants(pid)
        self._ours = living


def _named() -> dict[File, str]:
    """The files of this user that have names."""
    files = dict[File, str]()
    for entry in FOLDER.iterdir():
        with suppress(FileNotFoundError):  # it has just gone
            facts = entry.lstat()
            if facts.st_uid == os.geteuid():
                files[_file(facts)] = entry.name
    return files


def _files_of(pid: int, come: dict[File, str]) -> set[File]:
    """Those that a process has mapped or open, or that say its number."""
    files = {file for file, name in come.items() if name.startswith((f"torch_{pid}_", f"__KMP_REGISTERED_LIB_{pid}_"))}
    with suppress(OSError):  # it has ended, or is another user's
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if str(FOLDER) in line:
                _, _, _, device, inode, *_ = line.split()
                files.add((device, int(inode)))
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(entry).startswith(str(FOLDER)):
                    files.add(_file(entry.stat()))
    return files & come.keys()


def _file(facts: os.stat_result) -> File:
    return f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}", facts.st_ino
