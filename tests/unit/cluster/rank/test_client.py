"""A rank as its fleet sees it: news in order, each question's answer, and one end with a reason."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elastic.cluster.control.connection import QueueConnection, SocketConnection, queue_pair, socket_pair
from elastic.cluster.control.messages import (
    Answer,
    Ask,
    Beat,
    Bye,
    Cancel,
    Check,
    Hello,
    ModelFacts,
    News,
    Refused,
)
from elastic.cluster.control.processes import Exit
from elastic.cluster.rank.client import RankClient
from elastic.engines.core.load import EngineLoad
from elastic.errors import ConfigError, StateError
from elastic.memory.backends.shared_file import host_name
from support.processes import wait_until
from support.serving.stepped_engine import FORMAT

HELLO = Hello("r0", 1, host_name(), ModelFacts((), 0, 96, None, ()), FORMAT, 256, None)
BEAT = Beat(EngineLoad())


class Process:
    """A process whose end the test decides."""

    ended: int | None = None

    def __init__(self, exit: Exit | None = None, killable: Exit | None = None) -> None:
        self.exit, self._killed = exit, killable
        self.kills = 0
        self.closed = False

    def kill(self) -> None:
        self.kills += 1
        self.exit = self.exit or self._killed

    def wait(self, timeout_s: float) -> Exit | None:
        return self.exit

    def close(self) -> None:
        self.closed = True


class Fleet:
    """What a fleet hears of one rank."""

    def __init__(self, process: Process | None = None, hello: Hello = HELLO) -> None:
        here, self.rank = queue_pair()
        self.client = RankClient(here, hello, process)
        self.heard: list[Any] = []
        self.lost: list[str] = []
        self.heard_all: list[bool] = []
        self.end = threading.Event()

    def listen(self) -> None:
        def on_lost(why: str) -> None:
            self.lost.append(why)
            self.heard_all.append(self.client.heard_all)
            self.end.set()

        self.client.listen(self.heard.append, on_lost)

    def wait(self) -> str:
        assert self.end.wait(60)
        for thread in self.client._threads:
            thread.join(60)
        assert len(self.lost) == 1
        return self.lost[0]


@pytest.fixture
def fleet() -> Iterator[Callable[..., Fleet]]:
    fleets: list[Fleet] = []

    def make(*args: Any, **options: Any) -> Fleet:
        fleets.append(Fleet(*args, **options))
        fleets[-1].listen()
        return fleets[-1]

    yield make
    for each in fleets:
        each.rank.close()
        each.wait()


def test_messages_are_told_in_order_then_the_end_once(fleet: Callable[..., Fleet]) -> None:
    one = fleet()
    said = [BEAT, Refused("request", ConfigError("no")), News((), (), EngineLoad(1))]
    for message in said:
        one.rank.send(message)
    one.rank.close()
    assert one.wait() == "its connection ended"
    assert [type(message) for message in one.heard] == [Beat, Refused, News]
    assert one.client.lost


def test_nothing_is_lost_before_it_is_listened_to() -> None:
    one = Fleet()
    one.rank.send(BEAT)
    one.rank.close()
    one.listen()
    one.wait()
    assert one.heard == [BEAT]
    with pytest.raises(StateError, match="listened to already"):
        one.listen()


def test_who_listens_second_hears_nothing() -> None:
    one = Fleet()
    one.listen()
    with pytest.raises(StateError, match="listened to already"):
        one.client.listen(lambda _: None, lambda _: None)
    one.rank.send(BEAT)
    one.rank.close()
    assert one.wait() == "its connection ended"
    assert one.heard == [BEAT]


@pytest.mark.parametrize("missing", ["_read", "_write"])
def test_a_rank_for_which_no_thread_can_be_had_is_ended(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Nobody told its end: it was there for good, and so were its requests."""
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name.endswith(missing):
            raise RuntimeError("can't start new thread")
        start(thread)

    process = Process()
    one = Fleet(process)
    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(StateError, match="'r0' cannot be listened to now: can't start new thread"):
        one.listen()
    wait_until(lambda: not [each for each in threading.enumerate() if each.name == "elastic-r0-_write"])
    one.client.refuse("no threads")
    assert one.rank.receive() == Bye(why="no threads")
    with pytest.raises(EOFError):
        one.rank.receive()
    assert process.kills
    assert process.closed


def test_messages_are_sent_in_order_and_sending_never_waits(fleet: Callable[..., Fleet]) -> None:
    here, there = socket_pair()
    client = RankClient(here, HELLO)
    client.listen(lambda _: None, lambda _: None)
    for i in range(200):  # more than the sockets hold
        client.send(Cancel(f"{i}" * 10_000))
    rank = SocketConnection(there)
    assert [rank.receive().request[:1] for _ in range(200)] == [f"{i}"[0] for i in range(200)]
    client.kill()
    client.close()
    rank.close()


def test_questions_have_their_own_answers(fleet: Callable[..., Fleet]) -> None:
    one = fleet()
    first, second = one.client.ask(Check()), one.client.ask(Check())
    ids = [one.rank.receive().id, one.rank.receive().id]
    one.rank.send(Answer(ids[1], "second"))
    one.rank.send(Answer(ids[0], error=ConfigError("first")))
    assert second.result(60) == "second"
    with pytest.raises(ConfigError, match="first"):
        first.result(60)


def test_questions_fail_at_the_end_before_it_is_told_and_after_it(fleet: Callable[..., Fleet]) -> None:
    one = fleet()
    asked = one.client.ask(Check())
    assert isinstance(one.rank.receive(), Ask)
    one.rank.close()
    one.wait()
    for answer in (asked, one.client.ask(Check())):
        assert answer.done()
        with pytest.raises(StateError, match="rank 'r0' has gone: its connection ended"):
            answer.result()
    one.client.send(Cancel("request"))  # goes nowhere


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b"x", "which"),
        (Cancel("request"), "which"),
        (Answer(7), "which"),
        (Answer.__new__(Answer), "no attribute 'id'"),
    ],
    ids=["bytes", "of a fleet", "unasked", "not whole"],
)
def test_what_no_rank_says_ends_it_in_words(fleet: Callable[..., Fleet], message: object, words: str) -> None:
    process = Process(killable=Exit("killed", True))
    one = fleet(process)
    one.rank.send(BEAT)
    one.rank.send(message)
    assert words in one.wait()
    assert process.kills
    assert one.heard_all == [False]
    assert one.heard == [BEAT]


def test_a_fault_of_the_fleet_is_not_the_ranks(fleet: Callable[..., Fleet]) -> None:
    one = Fleet()
    heard: list[Any] = []

    def fail_once(message: Any) -> None:
        heard.append(message)
        if len(heard) == 1:
            raise ZeroDivisionError

    one.client.listen(fail_once, one.lost.append)
    one.rank.send(BEAT)
    one.rank.send(BEAT)
    one.rank.close()
    one.client.close()
    assert len(heard) == 2
    assert one.lost


SIGNAL = Exit("its process was killed by SIGKILL", True)
CODE = Exit("its process has ended with code 1")


@pytest.mark.parametrize(
    ("process", "bye", "heard_all", "reason"),
    [
        (Process(SIGNAL), False, True, "killed by SIGKILL"),
        (Process(CODE), False, False, "ended with code 1"),
        (Process(SIGNAL), True, False, "killed by SIGKILL"),  # in order: its memory went first
        (Process(None, killable=SIGNAL), False, False, "killed by SIGKILL"),  # it lived on behind a closed connection
        (Process(None), False, False, "its connection ended"),
    ],
    ids=["killed", "exit", "in order", "hung up", "unknown"],
)
def test_all_was_heard_only_of_what_was_killed_while_it_spoke(
    fleet: Callable[..., Fleet], process: Process, bye: bool, heard_all: bool, reason: str
) -> None:
    one = fleet(process)
    if bye:
        one.rank.send(Bye())
    one.rank.close()
    assert reason in one.wait()
    assert one.heard_all == [heard_all]
    assert process.kills  # fenced
    assert process.closed


def test_a_kill_tells_what_had_been_said_and_its_own_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = socket_pair()
    rank = SocketConnection(there)

    class Killable(Process):
        ended = -1  # so that the connection is left to end by itself

        def kill(self) -> None:
            super().kill()
            rank.close()

    monkeypatch.setattr(SocketConnection, "wait", lambda *_: True)
    one = Fleet()
    one.client = RankClient(here, HELLO, Killable(killable=SIGNAL))
    for _ in range(100):
        rank.send(BEAT)
    one.listen()
    one.client.kill("no beat for 2 s")
    assert one.wait() == "no beat for 2 s"
    assert len(one.heard) == 100
    assert one.heard_all == [True]


def test_a_rank_that_is_not_ours_is_not_heard_after_a_kill(fleet: Callable[..., Fleet]) -> None:
    one = fleet()
    one.client.kill("no beat")
    assert one.wait() == "no beat"
    with pytest.raises(StateError):
        one.rank.send(BEAT)


def test_a_close_asks_first_and_kills_whoever_does_not_listen(fleet: Callable[..., Fleet]) -> None:
    polite = fleet()
    leaving = threading.Thread(target=lambda: (polite.rank.receive(), polite.rank.close()))
    leaving.start()
    polite.client.close()
    leaving.join(60)
    assert polite.wait() == "its connection ended"

    deaf = fleet(Process(killable=SIGNAL))
    deaf.client.close(timeout_s=0.1)
    assert "killed by the fleet" in deaf.wait()


def test_the_ends_of_a_pair_are_what_launchers_give() -> None:
    assert all(isinstance(end, QueueConnection) for end in queue_pair())


@pytest.mark.parametrize("sockets", [False, True])
def test_what_has_come_and_was_not_taken_is_known(sockets: bool) -> None:
    """A listener that takes its time is not taken for a rank that is silent."""
    if sockets:
        here, stream = socket_pair()
        rank: Any = SocketConnection(stream)
    else:
        here, rank = queue_pair()  # type: ignore[assignment]
    client = RankClient(here, HELLO)
    assert not client.behind
    rank.send(BEAT)
    assert client.behind
    taking, go_on = threading.Event(), threading.Event()

    def take(_: object) -> None:
        taking.set()
        go_on.wait(30)

    client.listen(take, lambda _: None)
    assert taking.wait(30)
    assert client.behind
    go_on.set()
    rank.close()
    client._threads[0].join(30)
