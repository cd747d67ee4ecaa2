"""A rank between a fleet and its engine: what it says, in what order, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from elastic.cluster.control.connection import QueueConnection, queue_pair
from elastic.cluster.control.messages import (
    Answer,
    Apply,
    Ask,
    Beat,
    Bye,
    Cancel,
    Check,
    Drain,
    FreeBlocks,
    HandOver,
    Hello,
    Locate,
    ModelFacts,
    News,
    Receive,
    Refused,
    Submit,
)
from elastic.cluster.rank.gpu_load import GPULoad
from elastic.cluster.rank.rank import Rank
from elastic.controller.snapshot import DeviceStats
from elastic.engines.base import Request
from elastic.engines.core.load import EngineLoad
from elastic.engines.core.step import SequenceState
from elastic.errors import CapacityError, ConfigError, Overloaded, StateError
from support.serving.stepped_engine import FORMAT, SteppedEngine

FACTS = ModelFacts((1, 2), 3, 96, 512, (0,))
Message = TypeVar("Message")


class Served:
    """A rank on a thread, and the fleet's end of its connection."""

    def __init__(self, engine: SteppedEngine, beat_s: float) -> None:
        self.engine = engine
        self.fleet, there = queue_pair()
        self.rank = Rank(engine, there, "r0", FACTS, beat_s=beat_s)  # type: ignore[arg-type]
        self.thread = threading.Thread(target=self.rank.run, daemon=True)
        self.thread.start()
        self.hello = self.fleet.receive()

    def next(self, kind: type[Message]) -> Message:
        """The next message; beats come in between."""
        while isinstance(message := self.fleet.receive(), Beat) and kind is not Beat:
            pass
        assert isinstance(message, kind), message
        return message

    def submit(self, name: str, tokens: int = 3, n: int = 1, generated: tuple[int, ...] = ()) -> None:
        request = Request((1, 2), tokens, n=n, id=name)
        before = len(self.engine.live)
        states = [SequenceState(f"{name}[{i}]", request, i, i, generated) for i in range(n)]
        self.fleet.send(Submit(tuple(states)))
        if self.engine.refuse is None:
            self.engine.wait(lambda: len(self.engine.live) == before + n)

    def ended(self) -> None:
        self.thread.join(60)
        assert not self.thread.is_alive()
        assert not self.engine.serving


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    all_served: list[Served] = []

    def start(engine: SteppedEngine | None = None, beat_s: float = 60.0) -> Served:
        all_served.append(Served(engine or SteppedEngine(), beat_s))
        return all_served[-1]

    yield start
    for each in all_served:
        each.engine.runtime.may_end.set()
        each.fleet.close()
        each.ended()


def test_it_says_who_it_is_first(serve: Callable[..., Served]) -> None:
    hello = serve().hello
    assert isinstance(hello, Hello)
    assert (hello.name, hello.model, hello.kv, hello.memory) == ("r0", FACTS, FORMAT, None)
    assert hello.forms == (("float32",),)
    assert hello.load.free_blocks == 5


def test_it_looks_at_no_gpu_where_the_fleet_has_gone_before_it_could_say_who_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that is a thread would go on looking as long as its process lives."""
    load, engine = GPULoad(lambda: (DeviceStats("cuda:0", 0.5),)), SteppedEngine()
    monkeypatch.setattr(GPULoad, "of", lambda _: load)
    fleet, there = queue_pair()
    fleet.close()
    with pytest.raises(StateError, match="closed"):
        Rank(engine, there, "r0", FACTS).run()  # type: ignore[arg-type]
    assert load._thread is None
    engine.stop(drain=False)


def test_it_beats_while_it_looks_at_gpus_for_the_first_time(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_beaten, waited = threading.Event(), []

    def look() -> tuple[DeviceStats, ...]:
        waited.append(has_beaten.wait(10))
        return ()

    monkeypatch.setattr(GPULoad, "of", lambda _: GPULoad(look))
    one = serve(beat_s=0.01)
    assert isinstance(one.fleet.receive(), Beat)
    has_beaten.set()
    one.submit("a")
    assert waited == [True]


def test_news_hold_all_of_one_step_and_where_each_answer_was(serve: Callable[..., Served]) -> None:
    one = serve()
    one.submit("fresh", n=2)
    one.submit("resumed", tokens=9, generated=(7, 7, 7))
    for step in (1, 2):
        one.engine.step()
        news = one.next(News)
        told = [(o.request, o.index, start) for o, start in zip(news.outputs, news.starts, strict=True)]
        assert told == [("fresh", 0, step - 1), ("fresh", 1, step - 1), ("resumed", 0, step + 2)]
        assert news.kv is not None
        assert news.kv.ended == (f"step {step}",)
        assert (news.load.running, news.load.steps) == (3, step)
    one.engine.weights += (("int4",),)
    one.engine.step()
    assert one.next(News).forms == (("int4",),)
    one.submit("fresh")  # the name is free again: its count begins anew
    one.engine.step()
    news = one.next(News)
    assert [(o.request, start) for o, start in zip(news.outputs, news.starts, strict=True)] == [
        ("resumed", 6),
        ("fresh", 0),
    ]


def test_nothing_is_left_of_requests_that_have_moved(serve: Callable[..., Served]) -> None:
    """The engine has no further word for them: a rank that kept their counts would grow for days."""

    def held() -> dict[str, int]:
        return {name: len(value) for name, value in vars(one.rank).items() if hasattr(value, "__len__")}

    one = serve()
    before = held()
    for number in range(3):
        one.submit(f"r{number}", n=2)
        one.engine.step()
        one.next(News)
        one.engine.live.clear()
    assert held() == before


def test_news_are_sent_before_the_engine_goes_on(serve: Callable[..., Served]) -> None:
    one = serve()
    one.submit("request")
    sent: list[Any] = []
    one.rank._connection.send = sent.append  # type: ignore[method-assign]
    one.engine.step()
    assert isinstance(sent[0], News)
    del one.rank._connection.send


def test_room_behind_the_last_news_is_told_at_once(serve: Callable[..., Served]) -> None:
    one = serve(beat_s=60.0)
    one.submit("request", tokens=1)
    one.engine.step()
    one.next(News)
    assert one.engine.on_room is not None
    one.engine.on_room()
    assert one.next(Beat).load.free_blocks == 5


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (Overloaded("9 wait", retry_after_s=2), Overloaded, "9 wait"),
        (ConfigError("n=0"), ConfigError, "n=0"),
        (ZeroDivisionError("oh"), StateError, "ZeroDivisionError: oh"),
    ],
)
def test_a_request_that_is_not_taken_is_refused_and_others_are_served(
    serve: Callable[..., Served], error: Exception, kind: type[Exception], words: str
) -> None:
    one = serve(SteppedEngine(refuse=error))
    one.submit("unlucky")
    refused = one.next(Refused)
    assert refused.request == "unlucky"
    assert type(refused.error) is kind
    assert words in str(refused.error)
    one.engine.refuse = None
    one.submit("lucky")
    one.engine.step()
    assert one.next(News).starts == (0,)


def test_cancels_reach_the_engine(serve: Callable[..., Served]) -> None:
    one = serve()
    one.fleet.send(Cancel("request"))
    one.fleet.send(Cancel("request", 1))
    one.engine.wait(lambda: one.engine.cancelled == [("request", None), ("request", 1)])


def test_a_long_action_does_not_stop_requests_cancels_or_moves(serve: Callable[..., Served]) -> None:
    one = serve()
    one.fleet.send(Ask(1, Apply(())))
    one.fleet.send(Ask(2, Check()))
    assert one.engine.runtime.begun.wait(60)
    one.submit("request")
    one.fleet.send(Cancel("request"))
    one.engine.wait(lambda: one.engine.cancelled)
    one.fleet.send(Ask(3, Locate("request")))
    assert one.next(Answer).id == 3
    assert one.engine.asked == ["request"]
    one.engine.runtime.may_end.set()
    assert [one.next(Answer).id, one.next(Answer).id] == [1, 2]


def test_a_long_copy_does_not_stop_other_questions(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, may_end = serve(), threading.Event()

    def receive(*of: Any, coordinated: bool) -> int:
        assert may_end.wait(60)
        return len(of) if coordinated else 0

    monkeypatch.setattr(one.engine, "receive", receive, raising=False)
    source: Any = None
    one.fleet.send(Ask(1, Receive((), (), source)))
    one.fleet.send(Ask(2, Locate("request")))
    assert one.next(Answer).id == 2
    may_end.set()
    assert one.next(Answer) == Answer(1, 3)


def test_every_question_has_one_answer_also_when_it_fails(serve: Callable[..., Served]) -> None:
    one = serve()
    one.engine.runtime.may_end.set()
    questions = [HandOver("r"), FreeBlocks("r"), Locate("r"), Apply((), dry_run=True), Apply((), "for fun")]
    answers = []
    for number, question in enumerate(questions):
        one.fleet.send(Ask(number, question))
        answers.append(one.next(Answer))
    assert [answer.id for answer in answers] == [0, 1, 2, 3, 4]
    assert "cannot be handed over" in str(answers[0].error)
    assert str(answers[1].error) == "ZeroDivisionError: a fault of our own"
    assert answers[2].value == ()
    assert "cannot be sent to another process" in str(answers[3].error)
    assert answers[4].value == ("applied", "for fun")


def test_the_room_that_an_action_leaves_is_told_before_its_answer(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has the answer may send a request that does not fit any more, or fits only now."""
    one = serve(beat_s=60.0)
    monkeypatch.setattr(one.engine, "load", lambda: EngineLoad(total_blocks=int(one.engine.runtime.may_end.is_set())))
    one.fleet.send(Ask(1, Apply((), "a limit")))
    one.engine.runtime.may_end.set()
    told = one.fleet.receive()
    assert isinstance(told, Beat)
    assert told.load.total_blocks == 1
    assert one.next(Answer).id == 1


def test_a_drained_rank_takes_no_request_and_ends_those_it_has(serve: Callable[..., Served]) -> None:
    one = serve()
    one.submit("early")
    one.fleet.send(Ask(1, Drain()))
    assert one.next(Answer).error is None
    one.submit_late = one.fleet.send(Submit((SequenceState("late", Request((1,), 2, id="late"), 0, 0),)))  # type: ignore
    assert "being drained" in str(one.next(Refused).error)
    one.fleet.send(Bye(drain=True))
    finishes = [[output.finish for output in one.next(News).outputs] for _ in range(3)]
    assert finishes == [[None], [None], ["length"]]
    assert isinstance(one.next(Bye), Bye)
    with pytest.raises(EOFError):
        one.fleet.receive()
    one.ended()


@pytest.mark.parametrize(("told_by", "kind"), [("on_impossible", Overloaded), ("on_crowded_out", CapacityError)])
def test_what_never_fits_any_more_goes_back(serve: Callable[..., Served], told_by: str, kind: type) -> None:
    """Others may have room for it, together with this rank too, unless other models have taken the pages."""
    one = serve()
    one.submit("request")
    getattr(one.engine, told_by)("request", CapacityError("no room", requested_bytes=2, free_bytes=1, total_bytes=1))
    refused = one.next(Refused)
    assert (refused.request, type(refused.error)) == ("request", kind)


def test_an_end_that_nobody_wished_for_its_requests_is_not_told_as_theirs(serve: Callable[..., Served]) -> None:
    one = serve()
    one.submit("request")
    one.fleet.send(Bye())
    one.next(Bye)
    with pytest.raises(EOFError):
        one.fleet.receive()
    one.ended()


@pytest.mark.parametrize("how", ["fleet", "message"])
def test_it_ends_with_its_fleet(serve: Callable[..., Served], how: str) -> None:
    one = serve()
    one.submit("request")
    one.fleet.close() if how == "fleet" else one.fleet.send("what no fleet sends")
    one.ended()
    assert one.rank.ended.is_set()


def test_it_ends_when_its_engine_has_ended_by_itself(serve: Callable[..., Served]) -> None:
    one = serve(beat_s=0.01)
    one.engine.serving = False
    one.ended()


def test_an_engine_that_the_rank_ends_has_not_ended_by_itself(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    """Between the beat's wait and its look at the engine, the rank is stopped."""
    one = serve(beat_s=0.01)
    one.next(Beat)

    class Stopped(SteppedEngine):
        @property
        def serving(self) -> bool:
            one.rank.stop()
            return False

        @serving.setter
        def serving(self, value: bool) -> None:
            pass

    one.engine.__class__ = Stopped
    for beats in [thread for thread in threading.enumerate() if thread.name == "elastic-r0-beat"]:
        beats.join(60)
    one.ended()
    assert not caplog.records


def test_it_beats_while_its_engine_hangs(serve: Callable[..., Served]) -> None:
    one = serve(beat_s=0.01)
    one.submit("request")  # and no step
    loads = [one.next(Beat).load for _ in range(3)]
    assert {load.steps for load in loads} == {0}
    assert loads[-1].running == 1


def test_a_rank_whose_fleet_is_gone_notices_it_by_its_beat_too(serve: Callable[..., Served]) -> None:
    one = serve(beat_s=0.01)
    assert isinstance(one.rank._connection, QueueConnection)
    one.rank._connection._over.set()  # nothing can be sent, and whoever reads has not noticed yet
    assert one.rank.ended.wait(60)
