"""What becomes of requests when ranks die, move, leave and come, on ranks without models: none lost, no token twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from elastic import CapacityError, ConfigError, Overloaded, StateError
from elastic.cluster.control.messages import Beat, Drain, HandOver, News, Receive, TakeBack
from elastic.cluster.fleet import supervisor
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.membership import MOST_LOSSES
from elastic.cluster.fleet.moves import Mover
from elastic.engines.base import Output, Request, Sampling
from elastic.engines.core.kv_state import KVSource
from elastic.engines.sampling import answer_seed
from elastic.errors import RankLost
from elastic.types import RankMemory
from support.cluster.fake_rank import BLOCK, KV, FakeLauncher, FakeRank, alone, made_worlds
from support.serving.generations import Collector


class World:
    """A fleet over fake ranks, and all that is heard."""

    def __init__(self, ranks: int = 2, make: Callable[[Any], FakeRank] | None = None, **options: Any) -> None:
        self.launcher = FakeLauncher(make or (lambda spec: FakeRank(spec.name)))
        options = {"beat_timeout_s": 1e6, "hang_timeout_s": 1e6, "replace": False, **options}
        self.fleet = Fleet("no model", ranks=ranks, launch=self.launcher, **options)
        self.heard = Collector()
        self.requests: list[Request] = []
        self.fleet.start()

    def submit(self, count: int = 1, tokens: int = 10, **options: Any) -> list[Request]:
        new = [Request((1, 2, 3), tokens, Sampling(seed=0), **options) for _ in range(count)]
        for request in new:
            self.fleet.submit(request, self.heard)
        self.requests += new
        return new

    def rank_of(self, request: Request) -> FakeRank:
        name = self.fleet.instance_of(request.id)
        assert name is not None
        return self.launcher.ranks[name]

    def finish(self) -> None:
        """Let all end; each has the tokens that it has alone."""
        until_s = time.monotonic() + 30
        while self.heard.ends.keys() < {request.id for request in self.requests} and time.monotonic() < until_s:
            self.launcher.step()
        for request in self.requests:
            assert self.heard.ends[request.id].finish == "length", self.heard.ends[request.id]
            assert self.heard.tokens[request.id] == alone(request, answer_seed(request, 0))
        self.fleet.check()

    def in_background(self, call: Callable[[], Any]) -> Any:
        """Return what a call returns or raises, while ranks step."""
        found: list[Any] = []

        def work() -> None:
            try:
                found.append(call())
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        while thread.is_alive():
            self.launcher.step()
            thread.join(0.005)
        return found[0]

    def kinds(self) -> list[str]:
        return [event.kind for event in self.fleet.events()]


@pytest.fixture
def world() -> Iterator[Any]:
    yield from made_worlds(World)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_requests_of_a_dead_rank_go_on_elsewhere(world: Any, steps: int) -> None:
    w = world()
    requests = w.submit(6)
    w.launcher.step(steps)
    lost = w.rank_of(requests[0])
    lost.die("it fell over")
    assert all(w.rank_of(request) is not lost for request in requests)
    w.finish()
    events = {event.kind: event for event in w.fleet.events()}
    assert (events["lost"].requests, events["lost"].why) == (3, "it fell over")
    assert events["requests resumed"].requests == 3
    assert events["requests resumed"].recomputed_tokens == (3 * (3 + steps - 1) if steps else 0)
    assert w.fleet.status().totals.recomputed_tokens == events["requests resumed"].recomputed_tokens


def test_what_a_dead_rank_still_says_does_not_count(world: Any) -> None:
    w = world()
    (request,) = w.submit()
    w.launcher.step(2)
    lost = w.rank_of(request)
    lost.die()
    lost.on_message(News((Output(request.id, (9, 9)),), (2,), lost.load()))
    w.finish()


def test_a_rank_that_leaves_out_tokens_is_fenced(world: Any) -> None:
    w = world()
    (request,) = w.submit()
    w.launcher.step(2)
    rank = w.rank_of(request)
    rank.on_message(News((Output(request.id, (9,)),), (7,), rank.load()))
    assert rank.lost
    assert "from 7 on came after 2" in w.fleet.status().ranks[0].why
    w.finish()


def test_a_rank_that_tells_of_an_answer_that_nobody_asked_for_is_fenced(world: Any) -> None:
    w = world()
    (request,) = w.submit()
    w.launcher.step(2)
    rank = w.rank_of(request)
    rank.on_message(News((Output(request.id, (9,), index=1),), (2,), rank.load()))
    assert rank.lost
    assert "has 1 answers, and tokens of answer 1 came" in w.fleet.status().ranks[0].why
    w.finish()


def test_a_rank_that_ends_what_nobody_cancelled_is_fenced(world: Any) -> None:
    w = world()
    (request,) = w.submit()
    w.launcher.step(2)
    rank = w.rank_of(request)
    rank.on_message(News((Output(request.id, (), "cancelled"),), (2,), rank.load()))
    assert rank.lost
    w.finish()


def test_a_cancelled_request_of_a_dead_rank_ends(world: Any) -> None:
    w = world()
    (request,) = w.submit()
    w.launcher.step(2)
    w.fleet.cancel(request.id)
    w.rank_of(request).die()
    assert w.heard.ends[request.id].finish == "cancelled"
    w.fleet.check()


def test_without_a_rank_requests_wait_for_the_next_one(world: Any) -> None:
    w = world(1, replace=True)
    requests = w.submit(3)
    w.launcher.step(2)
    w.rank_of(requests[0]).die()
    late = w.submit(1)
    assert {w.fleet.instance_of(request.id) for request in [*requests, *late]} <= {None, "r1"}
    w.finish()
    w.fleet.stop()  # which waits for whoever replaces it to say so
    assert "replaced" in w.kinds()


def test_a_request_with_which_ranks_end_is_not_given_to_all_of_them(world: Any) -> None:
    w = world(MOST_LOSSES + 2)
    (bad,) = w.submit()
    w.launcher.step(2)
    others = w.submit(2)
    tokens = len(w.heard.tokens[bad.id])
    for _ in range(MOST_LOSSES + 1):  # once after it had a token there
        with w.fleet._dispatcher.lock:
            there = w.fleet._dispatcher.records[bad.id].instance
        for name, rank in w.launcher.ranks.items():
            if name != there:
                rank.step()
        w.launcher.ranks[there].die("a fault in its model")
    end = w.heard.ends[bad.id]
    assert (end.finish, "a fault in its model" in str(end.error)) == ("failed", True)
    assert len(w.heard.tokens[bad.id]) == tokens
    w.launcher.step(12)
    for request in others:
        assert w.heard.tokens[request.id] == alone(request, answer_seed(request, 0))


def test_that_a_request_ends_with_its_rank_is_told_once(world: Any) -> None:
    w = world(MOST_LOSSES)
    (bad,) = w.submit()
    for _ in range(MOST_LOSSES):
        w.rank_of(bad).die("a fault in its model")
    assert w.heard.ends[bad.id].finish == "failed"
    assert w.kinds().count("requests resumed") == w.kinds().count("lost") == MOST_LOSSES


def test_requests_fail_in_words_when_none_can_come(world: Any) -> None:
    w = world(1)
    (request,) = w.submit()
    w.launcher.step(1)
    w.rank_of(request).die("it fell over")
    end = w.heard.ends[request.id]
    assert (end.finish, "it fell over" in str(end.error)) == ("failed", True)
    assert not w.fleet.serving
    with pytest.raises(StateError, match="no rank is left"):
        w.submit()


def test_a_rank_that_cannot_be_replaced_is_given_up(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.cluster.fleet.supervisor.BACKOFF_S", (0.0, 0.0, 0.0))

    def make(spec: Any) -> FakeRank:
        if spec.name != "r0":
            raise StateError("no such device")
        return FakeRank(spec.name)

    w = world(1, make, replace=True)
    (request,) = w.submit()
    w.rank_of(request).die()
    w.heard.wait([request.id], 30)
    assert "no such device" in str(w.heard.ends[request.id].error)
    assert w.kinds().count("refused") == 3


def test_a_silent_rank_is_fenced(world: Any) -> None:
    w = world(2, beat_timeout_s=0.3)
    (request,) = w.submit()
    silent = w.rank_of(request)
    (other,) = [rank for rank in w.launcher.ranks.values() if rank is not silent]
    fenced = threading.Event()
    tell, silent.on_lost = silent.on_lost, lambda why: (tell(why), fenced.set())
    while not fenced.wait(0.02):
        other.beat()
    while not other.live:
        other.step()
    other.step(20)
    assert w.heard.ends[request.id].finish == "length"
    assert "nothing was heard" in next(event.why for event in w.fleet.events() if event.kind == "lost")


def test_a_rank_is_fenced_once(world: Any) -> None:
    w = world(2)
    later = time.perf_counter() + 1e7
    w.launcher.ranks["r0"].lost = True  # its end was not told yet
    assert [instance.name for instance, _ in w.fleet._supervisor._silent(later, late=False)] == ["r1"]
    w.launcher.ranks["r0"].lost = False


def test_ranks_are_watched_behind_a_look_that_had_a_bug(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    w = world(1)
    looked, again = [], threading.Event()

    def fails(*_: Any) -> Any:
        looked.append(1)
        if len(looked) == 2:
            again.set()
        raise KeyError("r0")

    monkeypatch.setattr(w.fleet._supervisor, "_silent", fails)
    assert again.wait(30)


def test_a_rank_is_not_silent_that_has_told_what_nobody_has_read_yet(world: Any) -> None:
    w = world(2)
    w.launcher.ranks["r0"].behind = True
    later = time.perf_counter() + 1e7
    assert [instance.name for instance, _ in w.fleet._supervisor._silent(later, late=False)] == ["r1"]
    w.launcher.ranks["r0"].behind = False
    silent = w.fleet._supervisor._silent(2 * later, late=False)
    assert [instance.name for instance, _ in silent] == ["r0", "r1"]


def test_a_rank_whose_engine_hangs_is_fenced(world: Any) -> None:
    w = world(2, hang_timeout_s=0.3)
    (request,) = w.submit()
    w.launcher.step(2)
    hanging = w.rank_of(request)
    while not hanging.lost:
        hanging.beat()
    w.finish()
    assert "began no step" in next(event.why for event in w.fleet.events() if event.kind == "lost")


def test_a_rank_whose_requests_wait_for_a_limit_does_not_hang(world: Any) -> None:
    w = world(2, hang_timeout_s=5)
    (request,) = w.submit()
    rank = w.rank_of(request)
    later, blocks = time.perf_counter() + 1e5, rank.blocks
    rank.blocks = 0  # before it has begun the request: it has not taken it yet
    rank.on_message(Beat(replace(rank.load(), waiting=1)))
    assert w.fleet._supervisor._silent(later, late=False) == []
    rank.blocks = blocks
    rank.on_message(Beat(replace(rank.load(), waiting=1)))
    assert [each.name for each, _ in w.fleet._supervisor._silent(later, late=False)] == [rank.hello.name]
    w.finish()


def test_a_rank_that_another_cannot_reach_is_fenced(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both live, but the one computes layers of the other, which waits until somebody gives it up."""
    monkeypatch.setattr(supervisor, "CUT_OFF_S", 0.2)
    w = world(2)
    waiting, cut_off = w.launcher.ranks.values()
    while not cut_off.lost:
        waiting.on_message(Beat(replace(waiting.load(), lost_rank=cut_off.hello.name)))
        cut_off.beat()
    assert "has no connection" in next(event.why for event in w.fleet.events() if event.kind == "lost")
    w.submit()
    w.finish()


# -- moves


def test_a_request_moves_and_nobody_notices(world: Any) -> None:
    w = world()
    first, _ = w.submit(2)
    w.launcher.step(3)
    source = w.rank_of(first)
    (target,) = [name for name, rank in w.launcher.ranks.items() if rank is not source]
    moved = w.in_background(lambda: w.fleet.move(first.id, target))
    assert (moved.source, moved.target, moved.moved_bytes) == (source.hello.name, target, 0)
    assert moved.recomputed_tokens >= 3 + 3 - 1  # these ranks have no memory that others can read
    assert source.held == {}
    w.finish()
    assert w.kinds().count("moved") == 1


def test_a_request_of_a_lost_rank_that_moves_on_at_once_has_gone_on(world: Any) -> None:
    w = world(3)
    (request,) = w.submit()
    w.launcher.step(2)
    w.rank_of(request).die()
    heir = w.rank_of(request)
    heir.step = lambda count=1: None  # it has told nothing of it when it is to leave
    target = next(rank for rank in w.launcher.ranks.values() if rank is not heir and not rank.lost)
    assert w.in_background(lambda: w.fleet.move(request.id, target.hello.name)).target == target.hello.name
    w.finish()
    assert w.kinds().count("requests resumed") == w.kinds().count("lost") == 1


def test_several_answers_move_together(world: Any) -> None:
    w = world()
    ends: dict[int, list[int]] = {0: [], 1: [], 2: []}
    request = Request((1, 2, 3), 12, Sampling(seed=0), n=3)
    w.fleet.submit(request, lambda output: ends[output.index].extend(output.tokens))
    w.launcher.step(3)
    (target,) = {"r0", "r1"} - {w.fleet.instance_of(request.id)}
    w.in_background(lambda: w.fleet.move(request.id, target))
    assert w.fleet.instance_of(request.id) == target
    w.launcher.step(20)
    assert ends == {i: alone(request, answer_seed(request, i)) for i in range(3)}


def test_moves_that_make_no_sense_are_refused(world: Any) -> None:
    w = world()
    (request,) = w.submit()
    here = w.fleet.instance_of(request.id)
    for error, name, target in (
        (ConfigError, "unknown", "r0"),
        (ConfigError, request.id, "r9"),
        (StateError, request.id, here),
    ):
        with pytest.raises(error):
            w.fleet.move(name, target)
    w.finish()


@pytest.mark.parametrize("soon", [False, True])
def test_a_request_that_its_target_refuses_goes_on_where_it_was(world: Any, soon: bool) -> None:
    """Its next tokens may come before the fleet sees that it was taken back, and have been overlooked."""

    class Quick(FakeRank):
        def ask(self, question: Any) -> Any:
            answer = super().ask(question)
            if soon and isinstance(question, TakeBack):
                self.step(2)
            return answer

    w = world(2, lambda spec: Quick(spec.name))
    (request,) = w.submit()
    w.launcher.step(2)
    source = w.rank_of(request)
    (target,) = [rank for rank in w.launcher.ranks.values() if rank is not source]
    target.refuses = Overloaded("no room", retry_after_s=1)
    assert isinstance(w.in_background(lambda: w.fleet.move(request.id, target.hello.name)), Overloaded)
    assert w.rank_of(request) is source
    target.refuses = None
    w.finish()
    assert "move failed" in w.kinds()
    assert "lost" not in w.kinds()
    assert w.fleet.status().totals.recomputed_tokens == 0


def test_a_request_moves_neither_to_where_it_was_refused_nor_to_where_a_limit_is_being_changed(world: Any) -> None:
    w = world()
    (request,) = w.submit(tokens=200)
    w.launcher.step(2)
    (target,) = w.fleet._dispatcher.instances.keys() - {w.fleet.instance_of(request.id)}
    instance = w.fleet._dispatcher.instances[target]
    instance.limit_changes = 1
    told = [w.in_background(lambda: w.fleet.move(request.id, target))]
    instance.limit_changes = 0
    w.launcher.ranks[target].refuses = CapacityError("too long", requested_bytes=2, free_bytes=0, total_bytes=1)
    told += [w.in_background(lambda: w.fleet.move(request.id, target)) for _ in range(2)]
    assert [str(each).partition("(")[0] for each in told] == [
        f"instance {target!r} gets nothing while its limit changes: not request {request.id!r} ",
        f"instance {target!r} refused request {request.id!r} ",
        f"instance {target!r} has just refused request {request.id!r} ",
    ]
    assert w.kinds().count("move failed") == 1
    w.launcher.ranks[target].refuses = None
    w.finish()


def test_what_becomes_of_use_while_a_request_moves_is_not_asked_of_a_rank_that_the_target_has_not_met(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of a prompt whose logprobs are asked for are of use from its first token on."""

    class Readable(FakeRank):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            memory = KVSource(None, 4096, KV, memory=RankMemory(name, "cpu#0"))
            self.hello = replace(self.hello, memory=memory)

        def ask(self, question: Any) -> Any:
            asked.append(question)
            if isinstance(question, HandOver):
                self.step()
            return super().ask(question)

    w, asked, met = world(2, lambda spec: Readable(spec.name)), list[Any](), list[Any]()
    monkeypatch.setattr(w.fleet._mover, "_introduce", met.append)
    (request,) = w.submit(prompt_logprobs=1)
    (target,) = {"r0", "r1"} - {w.fleet.instance_of(request.id)}
    assert w.in_background(lambda: w.fleet.move(request.id, target)).target == target
    assert (met, [question for question in asked if isinstance(question, Receive)]) == ([], [])
    w.finish()


def test_a_target_without_room_takes_none(world: Any) -> None:
    w = world(2, lambda spec: FakeRank(spec.name, blocks=100 if spec.name == "r0" else 4))
    (request,) = w.submit(tokens=20)
    with pytest.raises(Overloaded):
        w.fleet.move(request.id, "r1")
    w.finish()


@pytest.mark.parametrize("who", ["source", "target"])
def test_a_rank_that_dies_while_a_request_moves_costs_nothing_else(world: Any, who: str) -> None:
    w = world(3)
    (request,) = w.submit()
    w.launcher.step(2)
    source = w.rank_of(request)
    target = next(rank for rank in w.launcher.ranks.values() if rank is not source)
    dying = source if who == "source" else target
    ask = dying.ask

    def die_then_answer(question: Any) -> Any:
        dying.die("it fell over")
        return ask(question)

    dying.ask = die_then_answer  # type: ignore[method-assign]
    if who == "target":  # the lock is held when the target is asked; it dies when it reads
        dying.ask = ask  # type: ignore[method-assign]
        dying.step = lambda count=1: dying.die("it fell over")  # type: ignore[method-assign]
    error = w.in_background(lambda: w.fleet.move(request.id, target.hello.name))
    assert isinstance(error, RankLost)
    assert error.rank == dying.hello.name
    w.finish()


@pytest.mark.parametrize("where", ["_require_alive", "_wait"])
def test_whatever_ends_who_moves_a_request_it_goes_on(world: Any, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """It was handed over, or given to its target already."""

    def fail(*_: object) -> None:
        raise MemoryError

    w = world()
    (request,) = w.submit()
    w.launcher.step(2)
    source = w.rank_of(request)
    (target,) = {"r0", "r1"} - {source.hello.name}
    with monkeypatch.context() as patch:
        patch.setattr(Mover, where, fail)
        assert isinstance(w.in_background(lambda: w.fleet.move(request.id, target)), MemoryError)
    assert source.held == {}
    assert "move failed" in w.kinds()
    w.finish()


def test_a_request_that_ends_before_it_is_handed_over_is_not_moved(world: Any) -> None:
    w = world()
    (request,) = w.submit(tokens=3)
    w.launcher.step(1)
    source = w.rank_of(request)
    (target,) = {"r0", "r1"} - {source.hello.name}
    ask = source.ask
    source.ask = lambda question: (source.step(5), ask(question))[1]  # type: ignore[method-assign]
    with pytest.raises(StateError, match="ended before"):
        w.fleet.move(request.id, target)
    w.finish()


def test_a_request_that_is_cancelled_while_it_moves_ends(world: Any) -> None:
    w = world()
    (request,) = w.submit(tokens=50)
    w.launcher.step(1)
    source = w.rank_of(request)
    (target,) = {"r0", "r1"} - {source.hello.name}
    ask = source.ask
    source.ask = lambda question: (w.fleet.cancel(request.id), ask(question))[1]  # type: ignore[method-assign]
    w.in_background(lambda: w.fleet.move(request.id, target))
    w.launcher.step(3)
    assert w.heard.ends[request.id].finish == "cancelled"
    w.fleet.check()


# -- ranks come and go


def test_a_rank_that_is_added_gets_what_waits(world: Any) -> None:
    w = world(1, lambda spec: FakeRank(spec.name, max_requests=1))
    w.submit(4)
    assert w.fleet.status().queued == 2
    assert w.fleet.add(places=["cpu#1=1MiB"]) == "r1"
    assert w.fleet.status().queued == 0
    assert w.fleet.scale_out(2) == ("r2", "r3")
    w.finish()
    assert [rank.state for rank in w.fleet.status().ranks] == ["serving"] * 4


def test_a_rank_does_not_end_before_what_leaves_it_has_arrived(world: Any) -> None:
    w = world(2)
    (request,) = w.submit(tokens=30)
    w.launcher.step(2)
    source = w.rank_of(request)
    (target,) = [rank for rank in w.launcher.ranks.values() if rank is not source]
    leaving = threading.Thread(target=w.fleet.move, args=(request.id, target.hello.name))
    leaving.start()
    while not source.held:
        source.step()
    removing = threading.Thread(target=w.fleet.remove, args=(source.hello.name,))
    removing.start()
    assert not source.lost, "it ended, and with it what the target still reads"
    while removing.is_alive():
        assert not source.lost or not source.held
        target.step()
        removing.join(0.005)
    leaving.join(30)
    w.finish()


@pytest.mark.parametrize("drain", [True, False])
def test_a_rank_is_removed_and_its_requests_go_on(world: Any, drain: bool) -> None:
    w = world(2)
    w.submit(4)
    w.launcher.step(2)
    assert w.in_background(lambda: w.fleet.remove("r0", drain=drain)) is None
    assert {w.fleet.instance_of(request.id) for request in w.requests} == {"r1"}
    w.finish()
    assert [(rank.name, rank.state) for rank in w.fleet.status().ranks] == [("r0", "ended"), ("r1", "serving")]
    assert w.fleet.status().totals.ranks_lost == 0


@pytest.mark.parametrize("why", ["its requests stay", "it computes no more at a time"])
def test_requests_of_a_rank_that_is_removed_pass_over_a_freer_one_that_can_have_none(world: Any, why: str) -> None:
    few = {"max_requests": 1} if why != "its requests stay" else {}
    w = world(3, lambda spec: FakeRank(spec.name, **{"r1": {"blocks": 500, **few}}.get(spec.name, {})))
    instances = w.fleet._dispatcher.instances
    if few:
        for instance in (instances["r0"], instances["r2"]):
            instance.state = "draining"
        w.submit(2, tokens=1000)
        for instance in (instances["r0"], instances["r2"]):
            instance.state = "serving"
    else:
        instances["r1"].group = ("r1", "r3")
    instances["r1"].state = instances["r2"].state = "draining"
    (request,) = w.submit(1, tokens=200)
    instances["r1"].state = instances["r2"].state = "serving"
    w.launcher.step(2)
    w.in_background(lambda: w.fleet.remove("r0"))
    assert w.fleet.instance_of(request.id) == "r2"
    assert w.kinds().count("moved") == 1
    assert "move failed" not in w.kinds()
    instances["r1"].group = ()


@pytest.mark.parametrize(
    "error",
    [Overloaded("no room", retry_after_s=1), CapacityError("too long", requested_bytes=2, free_bytes=0, total_bytes=1)],
)
def test_a_rank_that_refuses_a_request_of_one_that_is_removed_is_not_asked_before_others(
    world: Any, error: Exception
) -> None:
    w = world(3, lambda spec: FakeRank(spec.name, blocks=500 if spec.name == "r1" else 100))
    instances, (r0, r1, r2) = w.fleet._dispatcher.instances, w.launcher.ranks.values()
    instances["r1"].state = instances["r2"].state = "draining"
    (request,) = w.submit(1, tokens=200)
    instances["r1"].state = instances["r2"].state = "serving"
    r0.step(2)
    r1.refuses = error
    removing = threading.Thread(target=w.fleet.remove, args=("r0",), daemon=True)
    removing.start()
    while removing.is_alive() and w.kinds().count("move failed") < 3:  # the rank that leaves makes no steps
        r1.step()
        r2.step()
        removing.join(0.005)
    assert (w.fleet.instance_of(request.id), w.kinds().count("move failed")) == ("r2", 1)
    r1.refuses = None
    w.finish()


def test_a_rank_whose_limit_is_being_changed_gets_no_request_of_one_that_is_removed(world: Any) -> None:
    w = world(2)
    (request,) = w.submit(1)
    dispatcher, name = w.fleet._dispatcher, w.fleet.instance_of(request.id)
    (other,) = dispatcher.instances.keys() - {name}
    leaving, record = dispatcher.instances[name], dispatcher.records[request.id]
    leaving.state, dispatcher.instances[other].limit_changes = "draining", 1
    assert w.fleet._mover._next_target(leaving, record) is None
    dispatcher.instances[other].limit_changes = 0
    assert w.fleet._mover._next_target(leaving, record) is dispatcher.instances[other]
    leaving.state = "serving"


def test_a_request_that_left_a_rank_that_is_removed_is_not_moved_again(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world(3)
    w.submit(6)
    (first, second), mover = list(w.fleet._dispatcher.instances["r0"].records), w.fleet._mover
    move, asked = mover.move, []

    def move_both(request: str, _: str) -> None:
        """While the one is moved, somebody else has the other one moved."""
        asked.append(request)
        for each in (first, second):
            move(each, "r1")

    monkeypatch.setattr(mover, "move", move_both)
    w.in_background(lambda: w.fleet.remove("r0"))
    assert asked == [first]
    w.finish()


def test_no_move_begins_when_a_removal_has_had_its_time(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    w = world(2)
    dispatcher, mover, moved = w.fleet._dispatcher, w.fleet._mover, list[str]()
    dispatcher.instances["r1"].state = "draining"
    w.submit(5)
    dispatcher.instances["r1"].state, dispatcher.instances["r0"].state = "serving", "draining"
    monkeypatch.setattr(dispatcher, "clock", lambda: float(len(moved)))
    monkeypatch.setattr(mover, "move", lambda request, target: moved.append(request))
    mover.drain(dispatcher.instances["r0"], 2.5)
    assert len(moved) == 3, "each takes a second"


def test_a_rank_that_is_removed_twice_at_once_is_told_of_once(world: Any) -> None:
    class Twice(FakeRank):
        def ask(self, question: Any) -> Any:
            if isinstance(question, Drain) and not drained:
                drained.append(self.hello.name)
                w.fleet.remove(self.hello.name)
            return super().ask(question)

    drained = list[str]()
    w = world(2, lambda spec: Twice(spec.name))
    w.fleet.remove("r0")
    assert w.kinds() == ["joined", "joined", "removed"]


def test_no_rank_begins_in_the_place_of_one_that_is_lost_as_it_is_removed(world: Any) -> None:
    w = world(2, replace=True)
    w.submit(4)
    removing = threading.Thread(target=w.fleet.remove, args=("r0",))
    removing.start()
    while removing.is_alive() and w.fleet.status().ranks[0].state != "draining":
        removing.join(0.005)
    w.launcher.ranks["r0"].die("it fell over")
    assert not w.fleet.replaces("r0")
    while removing.is_alive():
        w.launcher.step()
        removing.join(0.005)
    w.finish()
    assert w.kinds().count("lost") == w.kinds().count("removed") == 1
    assert w.launcher.ranks.keys() == {"r0", "r1"}


def test_the_last_rank_is_removed_when_its_requests_have_ended(world: Any) -> None:
    w = world(1)
    w.submit(2)
    with pytest.raises(StateError, match="the last one"):
        w.fleet.remove("r0", drain=False)
    w.in_background(lambda: w.fleet.remove("r0"))
    assert len(w.heard.ends) == 2
    assert {end.finish for end in w.heard.ends.values()} == {"length"}


@pytest.mark.parametrize("drain", [True, False])
def test_the_last_rank_is_not_removed_while_a_request_waits_for_room(world: Any, drain: bool) -> None:
    w = world(1, lambda spec: FakeRank(spec.name, blocks=4))
    w.submit(2)
    with pytest.raises(StateError, match="rank 'r0' is the last one, and requests are left; add one"):
        w.fleet.remove("r0", drain=drain)
    w.finish()


def test_a_request_that_came_while_the_last_rank_was_drained_ends_in_words(world: Any) -> None:
    w = world(1)
    w.submit(1)
    removing = threading.Thread(target=w.fleet.remove, args=("r0",))
    removing.start()
    while removing.is_alive() and w.fleet.status().ranks[0].state != "draining":
        removing.join(0.005)
    (late,) = w.submit(1)
    while removing.is_alive():
        w.launcher.step()
        removing.join(0.005)
    end = w.heard.ends[late.id]
    assert (end.finish, end.error) == ("failed", "no rank is left, and none comes: rank 'r0' was removed")


@pytest.mark.parametrize("seconds", ["a", -1, float("nan")])
def test_a_rank_that_cannot_be_removed_so_serves_on(world: Any, seconds: Any) -> None:
    w = world(2)
    with pytest.raises(ConfigError, match="timeout_s"):
        w.fleet.remove("r1", timeout_s=seconds)
    assert [rank.state for rank in w.fleet.status().ranks] == ["serving", "serving"]


def test_a_rank_whose_removal_is_interrupted_serves_on(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    w = world(1)
    w.submit(2)
    with monkeypatch.context() as patch:

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(w.fleet._dispatcher.changed, "wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt):
            w.fleet.remove("r0")
    assert [rank.state for rank in w.fleet.status().ranks] == ["serving"]
    w.submit(1)
    assert {w.fleet.instance_of(request.id) for request in w.requests} == {"r0"}
    w.in_background(lambda: w.fleet.remove("r0"))
    assert {end.finish for end in w.heard.ends.values()} == {"length"}


def test_a_rank_that_is_removed_twice_takes_no_request_when_one_of_the_two_is_interrupted(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world(1)
    w.submit(2)
    removing = threading.Thread(target=w.fleet.remove, args=("r0",), daemon=True)
    removing.start()
    while removing.is_alive() and w.fleet.status().ranks[0].state != "draining":
        removing.join(0.005)
    with monkeypatch.context() as patch:

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(w.fleet._mover, "drain", interrupt)
        with pytest.raises(KeyboardInterrupt):
            w.fleet.remove("r0")
    assert [rank.state for rank in w.fleet.status().ranks] == ["draining"]
    while removing.is_alive():
        w.launcher.step()
        removing.join(0.005)
    assert [rank.state for rank in w.fleet.status().ranks] == ["ended"]


def test_a_balanced_fleet_moves_requests_to_where_there_is_room(world: Any) -> None:
    w = world(1, policy="balance")
    w.submit(6, tokens=60)
    w.launcher.step(2)
    w.fleet.add()
    for _ in range(2000):
        w.launcher.step()
        if w.launcher.ranks["r1"].live or not w.launcher.ranks["r0"].live:
            break
        threading.Event().wait(0.005)
    assert w.launcher.ranks["r1"].live
    w.finish()


def test_a_balanced_fleet_makes_room_for_a_long_request(world: Any) -> None:
    w = world(2, lambda spec: FakeRank(spec.name, blocks=50), policy="balance", routing="freeness")
    short = w.submit(4, tokens=16 * BLOCK - 3)
    w.launcher.step(12 * BLOCK - 3)  # two at each, with 12 blocks of 16
    long = Request(tuple(range(30 * BLOCK - 4)), 4, Sampling(seed=0))
    w.fleet.submit(long, w.heard)
    w.requests.append(long)
    assert w.fleet.instance_of(long.id) is None
    until_s = time.monotonic() + 60
    while w.fleet.instance_of(long.id) is None and time.monotonic() < until_s:
        ranks = w.launcher.ranks.values()
        if any(rank.held for rank in ranks):  # a request is on its way: its target tells that it has begun
            w.launcher.step()
        threading.Event().wait(0.005)
    assert w.kinds().count("moved") == 1
    assert not w.heard.ends, "nobody had to end for it"
    assert len({w.fleet.instance_of(request.id) for request in short}) == 2
    w.finish()
