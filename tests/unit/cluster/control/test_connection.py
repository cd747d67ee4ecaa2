"""All connections keep one contract: whole messages in order, ends that both sides see, words for faults."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elastic.cluster.control import connection as module
from elastic.cluster.control.connection import Connection, SocketConnection, encode, queue_pair, socket_pair
from elastic.cluster.control.messages import Cancel, Refused
from elastic.errors import BackendUnavailable, CapacityError, ConfigError, IntegrityError, Overloaded, StateError

Pair = tuple[Connection, Connection]


def sockets() -> Pair:
    here, there = socket_pair()
    return here, SocketConnection(there)


def tcp() -> Pair:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        here, _ = server.accept()
    return SocketConnection(here), SocketConnection(there)


@pytest.fixture(params=[queue_pair, sockets, tcp], ids=["queues", "sockets", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    ends = request.param()
    yield ends
    for end in ends:
        end.close()


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run a call that may wait; what it returned or raised is in the list once the thread has ended."""
    came: list[Any] = []

    def run() -> None:
        try:
            came.append(call())
        except Exception as error:
            came.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, came


def test_messages_come_whole_and_in_order_both_ways(pair: Pair) -> None:
    here, there = pair
    messages = [Cancel(f"request-{i}", i) for i in range(100)] + [b"x" * 1_000_000]
    thread, _ = in_thread(lambda: [here.send(message) for message in messages])
    assert [there.receive() for _ in messages] == messages
    thread.join(10)
    there.send(messages[0])
    assert here.receive() == messages[0]


def test_what_is_received_is_a_copy(pair: Pair) -> None:
    sent = [1, 2]
    pair[0].send(sent)
    sent.append(3)
    assert pair[1].receive() == [1, 2]


def test_what_was_sent_before_the_end_is_received_before_it(pair: Pair) -> None:
    here, there = pair
    here.send("last words")
    here.close()
    assert there.receive() == "last words"
    for _ in range(2):
        with pytest.raises(EOFError):
            there.receive()


@pytest.mark.parametrize("closing", [0, 1])
def test_a_close_wakes_whoever_receives(pair: Pair, closing: int) -> None:
    thread, came = in_thread(pair[0].receive)
    pair[closing].close()
    thread.join(10)
    assert not thread.is_alive()
    assert isinstance(came[0], EOFError)


def test_a_close_wakes_whoever_sends_to_an_end_that_does_not_read() -> None:
    here, there = sockets()
    thread, came = in_thread(lambda: [here.send(b"x" * 100_000) for _ in range(100)])
    while not here._sending.locked():  # type: ignore[attr-defined]
        assert thread.is_alive()
    here.close()
    thread.join(10)
    assert not thread.is_alive()
    assert isinstance(came[0], StateError)
    there.close()


def test_nothing_can_be_sent_after_a_close_and_closing_twice_is_fine(pair: Pair) -> None:
    pair[0].close()
    pair[0].close()
    with pytest.raises(StateError, match="connection"):
        pair[0].send("too late")
    with pytest.raises(EOFError):
        pair[0].receive()


def test_what_cannot_be_pickled_is_refused_and_nothing_is_sent(pair: Pair) -> None:
    with pytest.raises(ConfigError, match="cannot be sent to another process"):
        pair[0].send(threading.Lock())
    pair[0].send("next")
    assert pair[1].receive() == "next"


def test_errors_come_as_they_were(pair: Pair) -> None:
    overloaded = Overloaded("9 wait", retry_after_s=1.5)
    capacity = CapacityError("no room", requested_bytes=3, free_bytes=2, total_bytes=1)
    absent = BackendUnavailable("no ray")
    for error in (overloaded, capacity, absent, ConfigError("n=0"), IntegrityError("2 != 3"), StateError("gone")):
        pair[0].send(Refused("request", error))
        came = pair[1].receive().error
        assert type(came) is type(error)
        assert str(came) == str(error)
        assert vars(came) == vars(error)


def test_bytes_that_are_no_pickle_are_told_in_words(pair: Pair) -> None:
    pair[0].send_bytes(b"not a pickle")
    with pytest.raises(StateError, match="no message"):
        pair[1].receive()


def test_a_message_is_bounded_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = sockets()
    long = encode(b"x" * 2_000)
    monkeypatch.setattr(module, "MOST_BYTES", 1_000)
    with pytest.raises(ConfigError, match="at most 1,000"):
        here.send(b"x" * 2_000)
    here.send_bytes(long)
    with pytest.raises(StateError, match="more than 1,000 bytes"):
        there.receive()
    here.close()
    there.close()


def test_closed_connections_leave_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        for end in (*sockets(), *tcp()):
            end.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_wait_tells_a_message_from_the_end_of_a_process() -> None:
    here, there = sockets()
    reader, writer = os.pipe()
    assert isinstance(here, SocketConnection)
    os.write(writer, b"ended")
    assert not here.wait(reader)
    there.send("still to be read")
    assert here.wait(reader)
    assert here.receive() == "still to be read"
    for end in (here, there):
        end.close()
    for number in (reader, writer):
        os.close(number)


def test_a_wait_on_a_connection_that_was_closed_here_tells_its_end() -> None:
    """As where a rank's Hello and the end of the time that it has for that come together."""
    here, there = socket_pair()
    here.close()
    with there:
        assert here.wait(there.fileno())
    with pytest.raises(EOFError):
        here.receive()


def test_encoding_is_protocol_5() -> None:
    assert pickle.loads(encode("x")) == "x"
    assert encode("x")[:2] == b"\x80\x05"
