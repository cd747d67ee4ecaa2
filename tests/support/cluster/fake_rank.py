"""Ranks that compute nothing: a test has them step, and says when they die. They speak as `RankClient` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from elastic.cluster.control.messages import (
    Beat,
    Cancel,
    FreeBlocks,
    HandedOver,
    HandOver,
    Hello,
    ModelFacts,
    News,
    Refused,
    Submit,
    TakeBack,
)
from elastic.cluster.control.stage_questions import SetCap
from elastic.cluster.rank.spec import RankSpec
from elastic.engines.base import Output, Request
from elastic.engines.core.kv_state import KVFormat
from elastic.engines.core.load import EngineLoad
from elastic.engines.core.step import SequenceState
from elastic.errors import StateError
from support.serving.simulated_executor import next_token

BLOCK = 4
KV = KVFormat(BLOCK, "head_centric", "float32", 2, 8, (((0, 1), None),))
MODEL = ModelFacts((1, 2), 3, 1000, None, (), ())


def alone(request: Request, seed: int, count: int | None = None) -> list[int]:
    """The tokens that a request gets, with nothing else there."""
    tokens = list(request.prompt)
    for _ in range(request.max_tokens if count is None else count):
        tokens.append(next_token(seed, tokens))
    return tokens[len(request.prompt) :]


class FakeRank:
    """A rank. All that lives gets a token at each `step`; it takes what it is sent when it steps."""

    heard_all = False
    behind = False

    def __init__(
        self,
        name: str,
        *,
        blocks: int = 100,
        max_requests: int = 8,
        model: ModelFacts = MODEL,
        host: str = "elsewhere",
    ) -> None:
        load = EngineLoad(0, 0, blocks, blocks, 0)
        self.hello = Hello(name, 1, host, model, KV, max_requests, None, load)
        self.blocks = blocks
        self.inbox: list[Any] = []
        self.live: dict[str, list[SequenceState]] = {}
        self.held: dict[str, list[SequenceState]] = {}
        self.refuses: Exception | None = None
        self.lost = False
        self.refused = ""
        self.steps = self.waiting = 0
        self.ends: list[bool] = []
        self.on_message: Callable[[Any], None] = lambda _: None
        self.on_lost: Callable[[str], None] = lambda _: None

    # -- as a RankClient

    def listen(self, on_message: Callable[[Any], None], on_lost: Callable[[str], None]) -> None:
        self.on_message, self.on_lost = on_message, on_lost

    def send(self, message: Any) -> None:
        self.inbox.append(message)

    def ask(self, question: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        if self.lost:
            answer.set_exception(StateError("it has gone"))
        elif isinstance(question, HandOver):
            self.take()
            states = self.live.pop(question.request, None)
            self.held |= {question.request: states} if states else {}
            answer.set_result(None if states is None else HandedOver(tuple(states), ()))
        elif isinstance(question, TakeBack):
            self.live[question.request] = self.held.pop(question.request)
            answer.set_result(None)
        elif isinstance(question, FreeBlocks):
            answer.set_result(self.held.pop(question.request, None) and None)
        else:
            answer.set_result(self.load() if isinstance(question, SetCap) else None)
        return answer

    def kill(self, why: str = "killed by the fleet") -> None:
        self.die(why)

    def refuse(self, why: str) -> None:
        self.refused = why
        self.die(why)

    def leave(self, *, drain: bool = False) -> None:
        """Do nothing yet: `close` ends it."""

    def close(self, *, drain: bool = False, timeout_s: float = 5.0) -> None:
        self.ends.append(drain)
        self.die("it was asked to")

    # -- what a test does

    def die(self, why: str = "killed by the test") -> None:
        if not self.lost:
            self.lost = True
            self.on_lost(why)

    def take(self) -> None:
        """Read what came."""
        inbox, self.inbox = self.inbox, []
        for message in inbox:
            if isinstance(message, Submit):
                name = message.states[0].request.id
                assert name not in self.live, "given twice"
                assert name not in self.held, "given while it is held"
                if self.refuses is not None:
                    self.on_message(Refused(name, self.refuses))
                else:
                    self.live[name] = list(message.states)
            elif isinstance(message, Cancel):
                left = [s for s in self.live.get(message.request, ()) if message.index not in (None, s.index)]
                gone = [s for s in self.live.get(message.request, ()) if s not in left]
                self.live |= {message.request: left} if left else {}
                if not left:
                    self.live.pop(message.request, None)
                self.tell([(Output(message.request, (), "cancelled", index=s.index), len(s.generated)) for s in gone])

    def step(self, count: int = 1) -> None:
        """Give everything that lives a token, so many times."""
        for _ in range(count):
            if self.lost:
                return
            self.take()
            self.steps += 1
            told: list[tuple[Output, int]] = []
            for name, states in list(self.live.items()):
                self.live[name] = [s for state in states if (s := self._advance(state, told)) is not None]
                if not self.live[name]:
                    del self.live[name]
            self.tell(told)

    def _advance(self, state: SequenceState, told: list[tuple[Output, int]]) -> SequenceState | None:
        request, start = state.request, len(state.generated)
        token = next_token(state.seed, [*request.prompt, *state.generated])
        finish = "length" if start + 1 == request.max_tokens else "stop" if token in request.stop_tokens else None
        told.append((Output(request.id, (token,), finish, index=state.index), start))
        return None if finish else replace(state, generated=(*state.generated, token))

    def tell(self, told: Sequence[tuple[Output, int]]) -> None:
        self.on_message(News(tuple(output for output, _ in told), tuple(start for _, start in told), self.load()))

    def beat(self) -> None:
        self.on_message(Beat(self.load()))

    def load(self) -> EngineLoad:
        promised = sum(
            -(-(len(s.request.prompt) + s.request.max_tokens) // BLOCK) for states in self.live.values() for s in states
        )
        running = sum(map(len, self.live.values()))
        return EngineLoad(running, self.waiting, self.blocks - promised, self.blocks, self.steps)


class FakeLauncher:
    """Starts fake ranks; `make` says how each is, `ranks` are all that it made."""

    name = "fake"

    def __init__(self, make: Callable[[RankSpec], FakeRank] = lambda spec: FakeRank(spec.name)) -> None:
        self.make = make
        self.ranks: dict[str, FakeRank] = {}
        self.closed = False

    def start(self, spec: RankSpec) -> Any:
        rank = self.make(spec)
        self.ranks[spec.name] = rank
        return rank

    def close(self) -> None:
        self.closed = True

    def step(self, count: int = 1) -> None:
        """Have all that live make so many steps, in turn."""
        for _ in range(count):
            for rank in list(self.ranks.values()):
                rank.step()


def made_worlds(kind: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield what makes worlds of a kind; their fleets are stopped at the end."""
    made: list[Any] = []

    def make(*args: Any, **options: Any) -> Any:
        made.append(kind(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.fleet.stop(drain=False)
