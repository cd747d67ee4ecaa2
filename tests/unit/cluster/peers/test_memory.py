"""A rank reads the memory of another over the network: the bytes that are there, or an error at once."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
import torch

from elastic.cluster.control.status import Wire
from elastic.cluster.peers.hub import PeerHub
from elastic.cluster.peers.memory.reader import HEAD, PAIR, RankMemoryReader
from elastic.cluster.peers.memory.server import MemoryServer
from elastic.errors import RankLost, StateError
from elastic.memory.backends.memfd import MemfdBackend
from elastic.memory.backends.rank_memory import MemoryReader, open_memory
from elastic.memory.pages.page_pool import PagePool
from elastic.memory.pages.virtual_range import VirtualRange
from elastic.types import RankMemory
from support.child_process import Forked

KEY = b"a key of this test's own"
PAGE, PAGES = 4096, 6
PLACE = RankMemory("a", "cpu#a")


class WithoutFile(MemfdBackend):
    """Pages that only their own process can reach, as those of a GPU."""

    def shared_file(self) -> None:
        return None


class Place:
    """A place of six pages with bytes in them, in any order."""

    def __init__(self, kind: type[MemfdBackend]) -> None:
        self.pool = PagePool("cpu#a", kind(PAGE), 16 * PAGE, ready_pages=0)
        self.range = VirtualRange(self.pool, PAGES)
        self.range.map(0, self.pool.allocate("test", PAGES)[::-1])
        self.bytes = self.range.storage(0, PAGES * PAGE, lambda: None).tensor(torch.uint8)
        self.bytes.copy_(torch.randint(256, (PAGES * PAGE,), generator=torch.Generator().manual_seed(0)))

    def give_back(self, count: int) -> None:
        """Have the last pages be nobody's, and the system's again."""
        self.pool.free(self.range.unmap(PAGES - count, count))
        self.pool.trim()

    def expected(self, offset: int, count: int) -> bytes:
        """What the place has from a byte of it on."""
        at = {page: slot for slot, page in self.range.slots.items()}
        whole = b"".join(self.bytes[at[p] * PAGE : (at[p] + 1) * PAGE].numpy().tobytes() for p in sorted(at))
        return whole[offset : offset + count]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def hubs(stack: ExitStack) -> tuple[PeerHub, PeerHub]:
    a, b = (stack.enter_context(closing(PeerHub(name, KEY))) for name in "ab")
    a.meet({"b": b.address})
    b.meet({"a": a.address})
    return a, b


def opened(
    stack: ExitStack, hub: PeerHub, memory: RankMemory = PLACE, *, coordinated: bool = False
) -> RankMemoryReader:
    return stack.enter_context(closing(hub.open_memory(memory, coordinated=coordinated)))


def read(reader: MemoryReader, *pieces: tuple[int, int]) -> bytes:
    buffer = (ctypes.c_char * sum(count for _, count in pieces))()
    reader.read(ctypes.addressof(buffer), pieces)
    return bytes(buffer)


def later(stack: ExitStack, reader: MemoryReader) -> Future[bytes]:
    return stack.enter_context(ThreadPoolExecutor(1)).submit(read, reader, (0, PAGE))


@pytest.mark.parametrize("kind", [MemfdBackend, WithoutFile])
def test_pieces_come_side_by_side_as_they_are_now(kind: type[MemfdBackend], stack: ExitStack) -> None:
    a, b = hubs(stack)
    place = Place(kind)
    a.memory.serve([place.pool])
    reader = opened(stack, b)
    for _ in range(2):
        for pieces in ([(0, PAGES * PAGE)], [(5, 3)], [(PAGE - 1, 2), (0, 7), (3 * PAGE, 2 * PAGE + 1)], []):
            assert read(reader, *pieces) == b"".join(place.expected(*piece) for piece in pieces)
        place.bytes.add_(1)
    asked = 2 * (PAGES * PAGE + 3 + 2 + 7 + 2 * PAGE + 1)
    assert b.wires.read() == (Wire("a", read_bytes=asked),)
    place.pool.check()


@pytest.mark.parametrize("kind", [MemfdBackend, WithoutFile])
def test_what_is_not_there_is_said_and_the_next_question_answered(kind: type[MemfdBackend], stack: ExitStack) -> None:
    a, b = hubs(stack)
    place = Place(kind)
    a.memory.serve([place.pool])
    reader = opened(stack, b)
    for pieces in ([(PAGES * PAGE - 1, 2)], [(0, 1), (-PAGE, 1)]):
        with pytest.raises(StateError, match="rank 'a'") as error:
            read(reader, *pieces)
        assert not isinstance(error.value, RankLost)
        assert read(reader, (1, 2)) == place.expected(1, 2)


def test_only_what_is_to_be_coordinated_waits_for_what_the_rank_does(stack: ExitStack) -> None:
    a, b = hubs(stack)
    sent: list[int] = []

    @contextmanager
    def copying(nbytes: int) -> Iterator[None]:
        sent.append(nbytes)
        yield

    a.memory.serve([Place(MemfdBackend).pool], copying)
    for coordinated in (True, False, True):  # on one connection
        with closing(b.open_memory(PLACE, coordinated=coordinated)) as reader:
            read(reader, (0, 5), (9, 2))
    assert sent == [7, 7]


def test_pages_that_go_while_a_question_waits_are_said_to_be_gone(stack: ExitStack) -> None:
    """What came was of nobody, or the connection ended, as if the rank was lost."""
    a, b = hubs(stack)
    place = Place(WithoutFile)

    @contextmanager
    def copying(nbytes: int) -> Iterator[None]:
        place.give_back(PAGES - 1)
        yield

    a.memory.serve([place.pool], copying)
    reader = opened(stack, b, coordinated=True)
    with pytest.raises(StateError, match="are not in use any more") as error:
        read(reader, (0, PAGES * PAGE))
    assert not isinstance(error.value, RankLost)
    reader.coordinated = False
    (page,) = place.range.slots.values()
    assert read(reader, (page * PAGE, PAGE)) == place.expected(0, PAGE)


def test_a_place_that_is_not_served_is_said_so(stack: ExitStack) -> None:
    a, b = hubs(stack)
    a.memory.serve([Place(MemfdBackend).pool])
    with pytest.raises(StateError, match="no place 'cpu#x'"):
        read(opened(stack, b, RankMemory("a", "cpu#x")), (0, 1))


def test_a_connection_is_kept_for_the_next_reader_unless_it_has_ended(stack: ExitStack) -> None:
    a, b = hubs(stack)
    place = Place(MemfdBackend)
    a.memory.serve([place.pool])
    first, second = opened(stack, b), opened(stack, b)
    assert first is not second
    first.close()
    assert b.open_memory(PLACE) is first
    first.close()
    b.lost("a")
    with pytest.raises(RankLost):
        read(second, (0, 1))
    with pytest.raises(RankLost):
        b.open_memory(PLACE)
    second.close()
    b.meet({"a": a.address})
    with closing(b.open_memory(PLACE)) as third:
        assert read(third, (0, 9)) == place.expected(0, 9)


def test_a_connection_on_which_something_is_left_is_no_next_readers(stack: ExitStack) -> None:
    """The next one would take it for the answer to what it asks."""
    a, b = hubs(stack)
    place = Place(MemfdBackend)
    a.memory.serve([place.pool])
    first = opened(stack, b)
    first._stream.sendall(HEAD.pack(1, False) + PAIR.pack(0, 9))
    assert first._stream.recv(1, socket.MSG_PEEK)
    first.close()
    with closing(b.open_memory(PLACE)) as second:
        assert second is not first
        assert read(second, (3, 4)) == place.expected(3, 4)


def test_who_reads_is_told_at_once_that_the_rank_was_lost(stack: ExitStack) -> None:
    a, b = hubs(stack)
    asked, go_on = threading.Event(), threading.Event()
    stack.callback(go_on.set)

    @contextmanager
    def hang(nbytes: int) -> Iterator[None]:
        asked.set()
        assert go_on.wait(60)
        yield

    a.memory.serve([Place(MemfdBackend).pool], hang)
    waiting = later(stack, opened(stack, b, coordinated=True))
    assert asked.wait(10)
    assert not waiting.done()
    b.lost("a")
    with pytest.raises(RankLost) as error:
        waiting.result(10)
    assert error.value.rank == "a"


def test_who_connects_while_a_rank_is_lost_is_told_so(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank is stopped, and answers nothing: without being told the reader would wait for ever."""
    a, b = hubs(stack)
    go_on = threading.Event()
    stack.callback(go_on.set)

    @contextmanager
    def hang(nbytes: int) -> Iterator[None]:
        assert go_on.wait(60)
        yield

    a.memory.serve([Place(MemfdBackend).pool], hang)
    connect = b._connect

    def connect_and_lose(*arguments: Any) -> Any:
        connection = connect(*arguments)
        b.lost("a")
        return connection

    monkeypatch.setattr(b, "_connect", connect_and_lose)
    with pytest.raises(RankLost, match="rank 'a' was lost"):
        later(stack, opened(stack, b, coordinated=True)).result(10)


def test_where_no_thread_can_be_started_nothing_is_left_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    server, (here, there) = MemoryServer(), socket.socketpair()
    monkeypatch.setattr(threading.Thread, "start", fail)
    with here, there, pytest.raises(RuntimeError):
        server.attach("cpu#a", there)
    server.close()


OWNER = """
import sys, threading
from contextlib import contextmanager
from elastic.cluster.peers.hub import PeerHub
from elastic.memory.backends.memfd import MemfdBackend
from elastic.memory.pages.page_pool import PagePool

pool = PagePool("cpu#a", MemfdBackend(4096), 16 * 4096, ready_pages=0)
pool.allocate("test", 6)
hub = PeerHub("a", %r)

@contextmanager
def copying(nbytes):
    sys.stdin.readline()
    yield

hub.memory.serve([pool], copying)
print(*hub.address, flush=True)
threading.Event().wait()
"""


def test_a_killed_rank_is_lost_at_once(stack: ExitStack) -> None:
    """It is killed while it has an answer to give."""
    owner = stack.enter_context(closing(Forked(OWNER % KEY)))
    host, port = owner.stdout.readline().decode().split()
    b = stack.enter_context(closing(PeerHub("b", KEY)))
    b.meet({"a": (host, int(port))})
    reader = opened(stack, b, coordinated=True)
    owner.stdin.write(b"\n")
    assert len(set(read(reader, (0, PAGE)))) == 1  # pages that nobody wrote to
    waiting = later(stack, reader)
    os.kill(owner.pid, signal.SIGKILL)
    with pytest.raises(RankLost):
        waiting.result(10)


def test_the_file_is_opened_where_it_is_of_this_host_and_the_rank_asked_where_not(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = hubs(stack)
    place = Place(MemfdBackend)
    a.memory.serve([place.pool])
    file = place.pool.backend.shared_file()
    with closing(open_memory(file, PLACE, b)) as reader:
        assert not reader.waits
        assert read(reader, (3, 2 * PAGE)) == place.expected(3, 2 * PAGE)
    monkeypatch.setattr("elastic.memory.backends.rank_memory.host_name", lambda: "another")
    for known in (file, None):
        with closing(open_memory(known, PLACE, b)) as reader:
            assert reader.waits
            assert read(reader, (3, 2 * PAGE)) == place.expected(3, 2 * PAGE)
    with pytest.raises(StateError, match="only its own process"):
        open_memory(None, PLACE, None)
