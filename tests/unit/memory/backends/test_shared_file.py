"""Memory files of other processes: read by /proc, held beyond their maker's end, and nothing left behind."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.errors import StateError
from elastic.memory.backends.libc import libc
from elastic.memory.backends.memfd import MemfdBackend
from elastic.memory.backends.shared_file import OpenFile, SharedFile, host_name, share
from support.child_process import Forked, in_fork
from support.isolation.named_memory import NamedMemory

PAGE = 4096
CHILD = """
    import ctypes, sys
    from elastic.memory.backends.memfd import MemfdBackend
    from elastic.memory.backends.shared_file import OpenFile, SharedFile
    backend = MemfdBackend(4096)
    address = backend.reserve(4 * 4096)
    backend.create([0, 1, 2, 3])
    backend.map(address, [2, 0, 1, 3])
    ctypes.memset(address, ord("a"), 4096)
    print(repr(backend.shared_file()), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def child() -> Iterator[tuple[Forked, SharedFile]]:
    """A process whose page 2 is full of "a"; killed at the end."""
    with closing(Forked(CHILD)) as process:
        yield process, eval(process.stdout.readline(), {"SharedFile": SharedFile})


@pytest.fixture
def backend() -> Iterator[MemfdBackend]:
    made = MemfdBackend(PAGE)
    yield made
    made.close()


def read(file: OpenFile, page: int, nbytes: int = PAGE) -> bytes:
    buffer = ctypes.create_string_buffer(nbytes)
    file.read_into(ctypes.addressof(buffer), page * PAGE, nbytes)
    return buffer.raw


def test_pages_are_read_where_they_are_in_the_file_also_those_that_come_later(backend: MemfdBackend) -> None:
    address = backend.reserve(8 * PAGE)
    backend.create([0, 1])
    backend.map(address, [1, 0])
    ctypes.memset(address, 7, PAGE)
    ctypes.memset(address + PAGE, 8, PAGE)
    shared = backend.shared_file()
    assert shared is not None
    with closing(OpenFile(shared)) as file:
        assert (read(file, 0), read(file, 1)) == (b"\x08" * PAGE, b"\x07" * PAGE)
        assert read(file, 0, 2 * PAGE) == b"\x08" * PAGE + b"\x07" * PAGE
        with pytest.raises(StateError, match="8,192 bytes"):
            read(file, 1, 2 * PAGE)
        backend.create([5])
        backend.map(address + 2 * PAGE, [5])
        ctypes.memset(address + 2 * PAGE, 9, PAGE)
        assert (read(file, 5), read(file, 4)) == (b"\x09" * PAGE, bytes(PAGE))
        assert file.nbytes == 6 * PAGE
    backend.unmap(address, 3)
    backend.unreserve(address, 8 * PAGE)


@pytest.mark.slow
def test_what_a_file_has_outlives_its_process_while_another_holds_it(
    child: tuple[Forked, SharedFile],
) -> None:
    process, shared = child
    with closing(OpenFile(shared)) as held:
        assert share(held.descriptor).pid == os.getpid()
        process.close()
        with pytest.raises(StateError, match="its process has ended"):
            OpenFile(shared)
        assert read(held, 2) == b"a" * PAGE
        again = share(held.descriptor)
        code = f"""
            import ctypes
            from contextlib import closing
            from elastic.memory.backends.shared_file import OpenFile, SharedFile
            buffer = ctypes.create_string_buffer(4)
            with closing(OpenFile({again!r})) as file:
                file.read_into(ctypes.addressof(buffer), 2 * 4096, 4)
            print(buffer.raw.decode())
        """
        assert in_fork(code) == "aaaa\n"
    with pytest.raises(StateError, match=r"is gone|another file"):
        OpenFile(again)


def test_a_file_that_cannot_be_opened_is_refused_in_words(backend: MemfdBackend, tmp_path: Path) -> None:
    shared = backend.shared_file()
    assert shared is not None
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StateError, match=r"is on host elsewhere; .* this one is on"):
        OpenFile(replace(shared, host="elsewhere"))
    with pytest.raises(StateError, match="its process has ended"):
        OpenFile(replace(shared, descriptor=1 << 20))
    (tmp_path / "other").write_text("x")
    with open(tmp_path / "other") as other, pytest.raises(StateError, match="another file by now"):
        OpenFile(replace(shared, descriptor=other.fileno()))
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_nothing_is_left_open(backend: MemfdBackend) -> None:
    shared = backend.shared_file()
    assert shared is not None
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with closing(OpenFile(shared)):
            assert len(os.listdir("/proc/self/fd")) == descriptors + 1
    file = OpenFile(shared)
    file.close()
    file.close()
    del file
    assert len(os.listdir("/proc/self/fd")) == descriptors
    backend.close()
    assert backend.shared_file() is None


def test_nothing_has_a_name() -> None:
    named = NamedMemory()
    with closing(MemfdBackend(PAGE)) as backend:
        shared = backend.shared_file()
        assert shared is not None
        with closing(OpenFile(shared)):
            assert named.left() == set()


def test_what_is_opened_cannot_be_written(backend: MemfdBackend) -> None:
    shared = backend.shared_file()
    assert shared is not None
    backend.create([0])
    with closing(OpenFile(shared)) as file, pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(file.descriptor, b"x", 0)


def test_a_read_to_where_nothing_is_mapped_is_an_error_and_no_crash(backend: MemfdBackend) -> None:
    backend.create([0])
    shared = backend.shared_file()
    assert shared is not None
    address = backend.reserve(PAGE)
    with closing(OpenFile(shared)) as file, pytest.raises(StateError, match="Bad address"):
        file.read_into(address, 0, PAGE)
    backend.unreserve(address, PAGE)
    assert libc.pread(-1, 0, 0, 0) == -1


@pytest.mark.slow
def test_a_host_has_one_name_in_all_of_its_processes() -> None:
    code = "from elastic.memory.backends.shared_file import host_name; print(host_name())"
    assert in_fork(code).strip() == host_name()
