"""What ranks send each other arrives by its key, and nobody waits for one that has gone."""

from __future__ import annotations

import itertools
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import pytest
import torch

from elastic.cluster.control import handshake
from elastic.cluster.control.connection import SocketConnection
from elastic.cluster.control.handshake import connect
from elastic.cluster.control.status import Wire
from elastic.cluster.peers import receiver
from elastic.cluster.peers import transport as transport_module
from elastic.cluster.peers.hub import PeerHello, PeerHub
from elastic.cluster.peers.mailbox import MOST_FAILED, Mailbox
from elastic.cluster.peers.transport import PeerTransport, TrafficCounter
from elastic.engines.pipeline.transport import Key, StepFailure
from elastic.errors import RankLost, StateError
from support.child_process import Forked
from support.processes import wait_until

KEY = b"a key of this test's own"
LIKE = torch.zeros(1, 3, 4)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def hubs(stack: ExitStack, names: str = "ab") -> list[PeerHub]:
    """Hubs that have met each other."""
    made = [stack.enter_context(closing(PeerHub(name, KEY))) for name in names]
    for hub in made:
        hub.meet({other.name: other.address for other in made if other is not hub})
    return made


def later(stack: ExitStack, call: Callable[..., Any], *args: Any) -> Future[Any]:
    """A call on a thread of its own, that had the time to begin to wait."""
    future = stack.enter_context(ThreadPoolExecutor(1)).submit(call, *args)
    time.sleep(0.05)
    assert not future.done()
    return future


def assert_lost(future: Future[Any], rank: str) -> None:
    with pytest.raises(RankLost) as error:
        future.result(10)
    assert error.value.rank == rank


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_sent_is_received_by_its_key_whatever_becomes_of_the_tensor(
    dtype: torch.dtype, stack: ExitStack
) -> None:
    a, b = (hub.transport("a") for hub in hubs(stack))
    hidden = torch.rand(1, 3, 4).to(dtype)
    sent = []
    keys = [Key(step, 2, site) for step in range(10) for site in range(2)]
    for key in keys:
        a.send("b", hidden, key)
        sent.append(hidden.clone())
        hidden += 1
    for number in (*range(10, 20), *range(10)):
        assert torch.equal(b.receive("a", hidden, keys[number]), sent[number])


def test_what_went_to_each_rank_and_came_from_it_is_counted(stack: ExitStack) -> None:
    a, b = hubs(stack)
    assert (a.wires.read(), b.wires.read()) == ((), ())
    for home in ("a", "b"):
        a.transport(home).send("b", LIKE, Key(0, 1))
        b.transport(home).receive("a", LIKE, Key(0, 1))
    a.transport("a").close()
    assert a.wires.read() == (Wire("b", sent_bytes=2 * LIKE.nbytes),), "of all instances, and of those that ended"
    assert b.wires.read() == (Wire("a", received_bytes=2 * LIKE.nbytes),)


def test_threads_that_wait_each_get_their_own(stack: ExitStack) -> None:
    a, b = (hub.transport("a") for hub in hubs(stack))
    waiting = [later(stack, b.receive, "a", LIKE, Key(step, 0)) for step in range(4)]
    for step in (2, 0, 3, 1):
        a.send("b", LIKE + step, Key(step, 0))
    assert [int(future.result(10)[0, 0, 0]) for future in waiting] == [0, 1, 2, 3]


def test_who_waits_for_a_host_that_is_cut_off_sees_it_though_nothing_was_sent(stack: ExitStack) -> None:
    """What a network has dropped on its way, and whose sender sends no more, else is waited for without end."""
    a, b = (hub.transport("a") for hub in hubs(stack))
    a.send("b", LIKE, Key(0, 0))
    b.receive("a", LIKE, Key(0, 0))
    for stream in (a.peer("b").sender._stream, b.peer("a").receiver._stream):
        assert stream is not None
        assert stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        times = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)
        asked_s = sum(stream.getsockopt(socket.IPPROTO_TCP, each) for each in times)
        assert asked_s * 1000 < stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def test_instances_and_directions_do_not_get_each_others(stack: ExitStack) -> None:
    a, b = hubs(stack)
    a.transport("a").send("b", LIKE + 1, Key(0, 0))
    a.transport("b").send("b", LIKE + 2, Key(0, 0))
    b.transport("a").send("a", LIKE + 3, Key(0, 0))
    got = [b.transport("a").receive("a", LIKE, Key(0, 0)), b.transport("b").receive("a", LIKE, Key(0, 0))]
    got.append(a.transport("a").receive("b", LIKE, Key(0, 0)))
    assert [int(hidden[0, 0, 0]) for hidden in got] == [1, 2, 3]


def test_others_than_expected_are_refused(stack: ExitStack) -> None:
    a, b = (hub.transport("a") for hub in hubs(stack))
    a.send("b", torch.zeros(1, 2, 4), Key(0, 0))
    with pytest.raises(StateError, match="do not compute the same step"):
        b.receive("a", LIKE, Key(0, 0))


def test_a_step_that_failed_is_told_of_and_forgotten(stack: ExitStack) -> None:
    a, b = (hub.transport("a") for hub in hubs(stack))
    a.fail("b", 0, StepFailure("broken"))
    a.fail("b", 1, StepFailure("rank 'c' was lost", "c"))
    with pytest.raises(StateError, match="broken"):
        b.receive("a", LIKE, Key(0, 1))
    assert_lost(stack.enter_context(ThreadPoolExecutor(1)).submit(b.receive, "a", LIKE, Key(1, 1)), "c")
    a.send("b", LIKE, Key(2, 1))
    a.send("b", LIKE, Key(2, 2))
    a.send("b", LIKE, Key(3, 1))
    b.receive("a", LIKE, Key(2, 2))
    b.forget(2)
    b.receive("a", LIKE, Key(3, 1))
    assert b.peer("a").receiver.box._arrived == {}


def test_of_steps_that_failed_long_ago_nothing_is_known() -> None:
    """One that fails for each request of a kind made it ever more, over days."""
    box = Mailbox("a")
    for step in range(2 * MOST_FAILED):
        box.forget(2 * step)
        with box.changed:
            box.put(Key(2 * step + 1, 0), StepFailure("broken"))
    with box.changed:
        box.put(Key(2 * step, 0), LIKE)
        assert box.take(Key(2 * step, 0)) is None
        assert box.take(Key(2 * step + 1, 0)) == StepFailure("broken")
    assert (len(box._forgotten), len(box._failed), box._arrived) == (MOST_FAILED, MOST_FAILED, {})


def test_a_rank_that_does_not_read_keeps_no_sender_waiting(stack: ExitStack) -> None:
    a, b = (hub.transport("a") for hub in hubs(stack))
    large = torch.arange(1 << 20, dtype=torch.float32).view(1, 1, -1)
    for step in range(16):
        a.send("b", large + step, Key(step, 0))
    for step in range(16):
        assert torch.equal(b.receive("a", large, Key(step, 0)), large + step)


def test_an_end_that_is_closed_tells_who_waits_before_it_waits_itself(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_module, "GOODBYE_S", 60.0)
    a, *others = hubs(stack, "abc")
    transport, large = a.transport("a"), torch.zeros(1, 1, 1 << 22)
    for other in others:
        transport.send(other.name, large, Key(0, 0))
    waiting = [later(stack, transport.receive, other.name, LIKE, Key(0, 1)) for other in others]
    closing_end = threading.Thread(target=transport.close)
    closing_end.start()
    try:
        for other, future in zip(others, waiting, strict=True):
            assert_lost(future, other.name)
    finally:
        for hub in (*others, a):
            hub.close()
        closing_end.join()


def test_a_rank_for_which_no_thread_could_be_started_is_sent_to_later(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = hubs(stack)
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == "elastic-peer-sender":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError):
            a.transport("a")
    received = later(stack, b.transport("a").receive, "a", LIKE, Key(0, 0))
    stack.callback(b.close)
    a.transport("a").send("b", LIKE + 1, Key(0, 0))
    assert torch.equal(received.result(20), LIKE + 1)


def test_a_rank_that_is_not_reached_for_want_of_a_thread_is_lost(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(timer: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    a, _ = hubs(stack)
    monkeypatch.setattr(threading.Timer, "start", fail)
    waiting = stack.enter_context(ThreadPoolExecutor(1)).submit(a.transport("a").receive, "b", LIKE, Key(0, 0))
    stack.callback(a.close)
    assert_lost(waiting, "b")


@pytest.mark.parametrize("end", ["lost", "closed", "hub"])
def test_who_waits_is_told_of_the_end(end: str, stack: ExitStack) -> None:
    a, b = hubs(stack)
    a.transport("a").send("b", LIKE, Key(0, 0))
    transport = b.transport("a")
    transport.receive("a", LIKE, Key(0, 0))
    waiting = [later(stack, transport.receive, "a", LIKE, Key(step, 0)) for step in (1, 2)]
    {"lost": lambda: b.lost("a"), "closed": transport.close, "hub": b.close}[end]()
    for future in waiting:
        assert_lost(future, "a")
    for call in (transport.send, transport.receive):
        with pytest.raises(RankLost):
            call("a", LIKE, Key(3, 0))
    transport.close()
    b.close()


def test_a_rank_that_was_lost_and_is_met_again_is_a_new_one(stack: ExitStack) -> None:
    a, b = hubs(stack)
    here, there = b.transport("a"), a.transport("a")
    b.lost("a")
    with pytest.raises(RankLost):
        here.send("a", LIKE, Key(0, 0))
    b.meet({"a": a.address})
    here.send("a", LIKE + 1, Key(1, 0))
    assert torch.equal(there.receive("b", LIKE, Key(1, 0)), LIKE + 1)
    there.send("b", LIKE + 2, Key(1, 1))
    assert torch.equal(here.receive("a", LIKE, Key(1, 1)), LIKE + 2)


def test_a_connection_made_late_for_a_rank_before_takes_not_the_place_of_the_new_ones(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank was lost and met again while the first connection was being made: that stands after the second."""
    connecting, met, late, attached = threading.Event(), threading.Event(), [], []
    attach = receiver.HiddenStatesReceiver.attach

    def connect_late(*where: Any) -> SocketConnection:
        if not connecting.is_set():
            late.append(threading.current_thread())
            connecting.set()
            assert met.wait(10)
        return connect(*where)

    def noted(of: receiver.HiddenStatesReceiver, stream: socket.socket, connection: int) -> None:
        attach(of, stream, connection)
        attached.append(connection)

    a, b = hubs(stack)
    there = a.transport("a")
    wait_until(lambda: b._early)
    monkeypatch.setattr(handshake, "connect", connect_late)
    monkeypatch.setattr(receiver.HiddenStatesReceiver, "attach", noted)
    here = b.transport("a")
    assert connecting.wait(10)
    b.lost("a")
    b.meet({"a": a.address})
    here.send("a", LIKE, Key(0, 0))
    assert torch.equal(there.receive("b", LIKE, Key(0, 0)), LIKE)
    here.send("a", LIKE + 1, Key(1, 0))
    met.set()
    late[0].join(10)
    wait_until(lambda: len(attached) == 3)  # of `a` at `b`, of the new one, of the late one
    assert torch.equal(there.receive("b", LIKE, Key(1, 0)), LIKE + 1)


def test_what_fails_late_of_a_rank_before_ends_not_the_new_one(stack: ExitStack) -> None:
    """A connection that was being made when the rank was lost fails after it was met again."""
    connecting, met, late = threading.Event(), threading.Event(), []
    near, far = socket.socketpair()
    stack.enter_context(far)

    def connect(rank: str, number: int) -> socket.socket:
        if connecting.is_set():
            return near
        late.append(threading.current_thread())
        connecting.set()
        assert met.wait(10)
        raise OSError("nobody listens there")

    transport = stack.enter_context(closing(PeerTransport("home", connect, TrafficCounter(), itertools.count())))
    transport.peer("a").sender.open()
    assert connecting.wait(10)
    transport.peer("a").end("rank 'a' was lost")
    transport.met("a")
    met.set()
    late[0].join(10)
    transport.send("a", LIKE, Key(0, 0))
    assert far.recv(1)


@pytest.mark.parametrize("closing_end", ["a", "b"])
def test_an_end_that_was_closed_and_made_again_goes_on(closing_end: str, stack: ExitStack) -> None:
    """A rank leaves the instance, and comes back; the other end is the same all the time."""
    ends = {hub.name: hub for hub in hubs(stack)}
    step = 0
    for _ in range(3):
        for _ in range(2):
            step += 1
            for frm, to in ("ab", "ba"):
                ends[frm].transport("a").send(to, LIKE + step, Key(step, 0))
                assert torch.equal(ends[to].transport("a").receive(frm, LIKE, Key(step, 0)), LIKE + step)
        ends[closing_end].transport("a").close()
        other = "b" if closing_end == "a" else "a"
        way_there = ends[other].transport("a").peer(closing_end).sender._stream
        assert select.select([way_there], [], [], 10)[0], "it was not closed"  # which a busy kernel tells late


def test_who_waits_for_a_rank_that_has_closed_its_end_is_told(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "REOPENED_S", 0.2)
    a, b = hubs(stack)
    here, there = a.transport("a"), b.transport("a")
    there.send("a", LIKE + 1, Key(0, 1))
    waiting = later(stack, here.receive, "b", LIKE, Key(1, 1))
    reader = here.peer("b").receiver
    wait_until(lambda: Key(0, 1) in reader.box._arrived, "what was sent did not come")  # it may not be connected yet
    there.close()
    assert_lost(waiting, "b")
    assert torch.equal(here.receive("b", LIKE, Key(0, 1)), LIKE + 1)
    b.transport("a").send("a", LIKE + 2, Key(2, 1))
    wait_until(lambda: reader._left_s is None, "it did not connect again")
    assert torch.equal(here.receive("b", LIKE, Key(2, 1)), LIKE + 2)


def test_a_rank_that_cannot_be_reached_is_lost(stack: ExitStack) -> None:
    a, b = hubs(stack)
    b.close()
    transport = a.transport("a")  # which it tries to reach
    assert_lost(stack.enter_context(ThreadPoolExecutor(1)).submit(transport.receive, "b", LIKE, Key(0, 0)), "b")
    with pytest.raises(RankLost, match="cannot be reached"):
        transport.send("b", LIKE, Key(1, 0))
    with pytest.raises(RankLost, match="cannot be reached"):
        a.connect_log("b", "a")


def test_a_rank_that_nobody_has_met_is_said_so(stack: ExitStack) -> None:
    (a,) = hubs(stack, "a")
    with pytest.raises(StateError, match="has not met 'b'"):
        a.connect_log("b", "a")


# -- logs


def test_a_log_goes_both_ways_in_order(stack: ExitStack) -> None:
    a, b = hubs(stack)
    accepting = later(stack, b.accept_log, "a", 10)
    home = a.connect_log("b", "a")
    guest = accepting.result(10)
    for item in range(100):
        home.send(item)
    assert [guest.receive() for _ in range(100)] == list(range(100))
    guest.send("answer")
    assert home.receive() == "answer"
    guest.close()
    with pytest.raises(EOFError):
        guest.receive()
    with pytest.raises(RankLost, match=r"'b' has gone: .+"):
        home.receive()


def test_a_log_that_nobody_connects_is_not_waited_for(stack: ExitStack) -> None:
    _, b = hubs(stack)
    with pytest.raises(RankLost, match=r"did not connect its log within 0\.01 s"):
        b.accept_log("a", 0.01)
    accepting = later(stack, b.accept_log, "a", 60)
    b.lost("a")
    assert_lost(accepting, "a")


def test_a_log_that_its_home_has_given_up_is_not_taken_for_the_next(stack: ExitStack) -> None:
    a, b = hubs(stack)
    given_up = a.connect_log("b", "a")
    given_up.send("over")
    wait_until(lambda: "a" in b._arrived)
    given_up.close()
    accepting = later(stack, b.accept_log, "a", 10)
    home = a.connect_log("b", "a")
    home.send("first")
    assert accepting.result(10).receive() == "first"
    assert b._arrived == {}


def test_connections_of_instances_that_have_parted_are_not_kept(stack: ExitStack) -> None:
    """A rank connects to all that it has met, also where they have no part in the instance."""
    a, b = hubs(stack)

    def is_open(home: str) -> bool:
        return (home, "a") in b._early and a.transport(home).peer("b").sender._stream is not None

    for home in ("h0", "h1", "h2"):
        transport = a.transport(home)
        wait_until(partial(is_open, home))
        assert len(b._early) == 1
        transport.close()


def test_a_log_whose_rank_is_lost_ends_at_once(stack: ExitStack) -> None:
    a, b = hubs(stack)
    home = a.connect_log("b", "a")
    guest = b.accept_log("a", 10)
    waiting = later(stack, home.receive)
    a.lost("b")
    assert_lost(waiting, "b")
    with pytest.raises(RankLost):
        home.send("more")
    with pytest.raises(RankLost):
        guest.receive()


def test_a_log_may_be_closed_while_a_rank_is_lost(stack: ExitStack) -> None:
    """The set of logs changed while it was looked through, and nobody was told that the rank was lost."""

    class Name(str):
        def __eq__(self, other: object) -> bool:
            closing = threading.Thread(target=logs[1].close)
            closing.start()
            closing.join(0.3)  # it waits until all is told
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    a, _ = hubs(stack)
    logs = [a.connect_log("b", home) for home in "xy"]
    logs[0].rank = Name("b")
    a.lost("b")
    with pytest.raises(RankLost):
        logs[0].receive()
    assert a._addresses == {}


# -- processes


CHILD = """
import sys, threading, torch
from elastic.cluster.peers import receiver
from elastic.cluster.peers.hub import PeerHello, PeerHub
from elastic.engines.pipeline.transport import Key
hub = PeerHub("b", {key!r})
hub.meet({{"a": {address!r}}})
print(hub.address[1], flush=True)
log, transport = hub.accept_log("a", 60), hub.transport("a")
while True:
    step, like = log.receive()
    transport.send("a", transport.receive("a", like, Key(step, 0)) * 2, Key(step, 1))
"""


class Child:
    """A process with a hub that doubles what it gets."""

    def __init__(self, hub: PeerHub, stack: ExitStack) -> None:
        code = CHILD.format(key=KEY, address=hub.address)
        self.process = stack.enter_context(closing(Forked(code)))
        hub.meet({"b": ("127.0.0.1", int(self.process.stdout.readline()))})
        self.log, self.transport = hub.connect_log("b", "a"), hub.transport("a")

    def double(self, step: int, hidden: torch.Tensor) -> torch.Tensor:
        self.log.send((step, torch.empty_like(hidden)))
        self.transport.send("b", hidden, Key(step, 0))
        return self.transport.receive("b", hidden, Key(step, 1))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_process_that_ends_or_stops_is_an_error(how: str, stack: ExitStack) -> None:
    (a,) = hubs(stack, "a")
    child = Child(a, stack)
    hidden = torch.rand(1, 512, 512)
    for step in range(5):
        assert torch.equal(child.double(step, hidden), hidden * 2)
    os.kill(child.process.pid, signal.SIGSTOP)
    calls = [later(stack, child.double, 5, hidden), later(stack, child.log.receive)]
    if how == "killed":
        child.process.close()  # it is an error by itself
    else:
        a.lost("b")
    for call in calls:
        assert_lost(call, "b")


def test_a_connection_that_breaks_before_its_hello_is_closed(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[SocketConnection] = []

    def broken(connection: SocketConnection, message: object) -> None:
        raise StateError("the other end has gone")

    def close(connection: SocketConnection) -> None:
        closed.append(connection)
        plain(connection)

    a, _ = hubs(stack)
    plain = SocketConnection.close
    monkeypatch.setattr(SocketConnection, "send", broken)
    monkeypatch.setattr(SocketConnection, "close", close)
    with pytest.raises(RankLost, match="the other end has gone"):
        a.connect_log("b", "a")
    assert closed


def test_nothing_is_left_of_hubs_that_were_closed() -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def meet_and_part(how: str) -> None:
        with ExitStack() as stack:
            a, b = hubs(stack)
            for home in "ab":
                a.transport(home).send("b", LIKE, Key(0, 0))
                b.transport(home).receive("a", LIKE, Key(0, 0))
                b.transport(home).send("a", LIKE, Key(0, 1))  # which nobody receives
            a.connect_log("b", "a")
            b.accept_log("a", 10)
            b.connect_log("a", "b")  # which nobody accepts
            {"lost": lambda: a.lost("b"), "close": a.transport("a").close, "none": str}[how]()

    def more() -> bool:
        return any(now > then for now, then in zip(held(), before, strict=True))

    meet_and_part("none")
    before = held()
    for how in ("lost", "close", "none") * 5:
        meet_and_part(how)
    deadline = time.monotonic() + 10
    while more() and time.monotonic() < deadline:  # threads that were connecting end by themselves
        time.sleep(0.01)
    assert not more()


# -- strangers


def test_a_stranger_with_the_key_who_says_something_else_is_turned_away(stack: ExitStack) -> None:
    a, b = hubs(stack)
    with closing(connect(a.address, KEY)) as stranger:
        stranger.send("something else")
        with pytest.raises(EOFError):
            stranger.receive()
    b.transport("a").send("a", LIKE, Key(0, 0))
    assert isinstance(a.transport("a"), PeerTransport)
    assert torch.equal(a.transport("a").receive("b", LIKE, Key(0, 0)), LIKE)


@pytest.mark.parametrize(
    "hello", [PeerHello(["b"], "a", "log", 0), PeerHello("b", "a", "logs", 0), PeerHello.__new__(PeerHello), None]
)
def test_a_hello_with_other_fields_is_refused_in_one_line(
    hello: Any, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """That ended in a traceback, or was a connection that nobody took."""
    a, _ = hubs(stack)
    with closing(connect(a.address, KEY)) as stranger:
        stranger.send(hello)
        with pytest.raises(EOFError):
            stranger.receive()
    wait_until(lambda: caplog.records)
    (record,) = caplog.records
    assert "was refused: it began with a" in record.getMessage()
    assert record.exc_info is None


def test_strangers_that_stop_within_their_hello_hold_up_nobody(stack: ExitStack) -> None:
    """Each held a thread of the listener for good: so many, and no rank came through, and no hub could be closed."""
    a, b = hubs(stack)
    for _ in range(40):
        stranger = stack.enter_context(closing(connect(a.address, KEY)))
        os.write(stranger.pipe.fileno(), struct.pack("!i", 1000) + b"half")
    b.transport("a").send("a", LIKE, Key(0, 0))
    assert torch.equal(a.transport("a").receive("b", LIKE, Key(0, 0)), LIKE)
    a.close()
