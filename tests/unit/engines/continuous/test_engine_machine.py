"""The engine under any order of requests, cancels, moves and changes of memory: the same tokens, nothing lost."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import elastic
from elastic import CapacityError, Overloaded
from elastic.engines.base import Output, Request, Sampling
from elastic.engines.continuous import ContinuousEngine
from support import architectures
from support.lossless_variant import HALF, exact
from support.serving.generations import Collector, Continuation, prompts
from support.wrapped_model import small

MOST = 24
PROMPTS = prompts([3, 17, 40], architectures.VOCAB)
MODELS = ("llama-gqa", "gemma3", "gemma2", "gpt-oss")
ENGINE: dict[str, Any] = {"block_tokens": 4, "max_batch_tokens": 24, "max_requests": 4}
DRAWN = Sampling(1.3, seed=7, frequency_penalty=0.1)


@cache
def plain(name: str) -> Any:
    return exact(architectures.build(name))


class Tokens(Collector):
    """The tokens of every answer, by request and index."""

    def __call__(self, output: Output) -> None:
        name = f"{output.request}/{output.index}"
        super().__call__(Output(name, output.tokens, output.finish, output.error))


@cache
def drawn_alone(name: str, which: int) -> list[list[int]]:
    """What an engine that nothing happens to draws after a prompt, for each of three answers."""
    model = exact(architectures.build(name))
    elastic.wrap(model, places=small(2 << 20))
    engine, heard = ContinuousEngine(model, **ENGINE), Tokens()
    engine.start()
    request = Request(PROMPTS[which], MOST, DRAWN, n=3)
    engine.submit(request, heard)
    heard.wait([f"{request.id}/{i}" for i in range(3)])
    engine.stop()
    elastic.unwrap(model)
    return [heard.tokens[f"{request.id}/{i}"] for i in range(3)]


class Serving(RuleBasedStateMachine):
    """A real engine over a wrapped model in which everything moves."""

    @initialize(
        name=st.sampled_from(MODELS), cohorts=st.integers(1, 2), share=st.booleans(), capture_after=st.integers(0, 2)
    )
    def begin(self, name: str, cohorts: int, share: bool, capture_after: int) -> None:
        self.model = exact(architectures.build(name))
        elastic.wrap(self.model, places=small(2 << 20), variants=[HALF])
        self.rt = self.model.elastic
        self.engine = ContinuousEngine(self.model, cohorts=cohorts, share_prefixes=share, **ENGINE)
        assert self.engine._runner.graphs is not None
        self.engine._runner.graphs.capture_after = capture_after
        self.engine.start()
        self.name, self.heard = name, Tokens()
        self.asked: dict[str, tuple[int, Request]] = {}
        self.cancelled: set[str] = set()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.rt.kv.resize("max")
        answers = {f"{name}/{i}": which for name, (which, request) in self.asked.items() for i in range(request.n)}
        self.heard.wait(list(answers))
        self.engine.stop()
        for answer, which in answers.items():
            request = self.asked[answer.split("/")[0]][1]
            greedy = request.sampling == Sampling()
            got, end = self.heard.tokens[answer], self.heard.ends[answer].finish
            assert end == "length" or (end == "cancelled" and request.id in self.cancelled)
            assert len(got) == request.max_tokens or (end == "cancelled" and len(got) < request.max_tokens)
            if greedy:
                assert got == Continuation(plain(self.name), PROMPTS[which], len(got))
            else:
                assert got == drawn_alone(self.name, which)[int(answer.split("/")[1])][: len(got)]
        assert self.rt.kv.used_bytes == 0
        self.engine._blocks.check()
        self.rt.restore()
        elastic.unwrap(self.model)

    @rule(which=st.integers(0, len(PROMPTS) - 1), most=st.integers(1, MOST), n=st.integers(1, 3), drawn=st.booleans())
    def submit(self, which: int, most: int, n: int, drawn: bool) -> None:
        request = Request(PROMPTS[which], most, DRAWN if drawn else Sampling(), n=n)
        try:
            self.engine.submit(request, self.heard)
        except (Overloaded, CapacityError):
            return
        self.asked[request.id] = which, request

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.asked)))
        self.cancelled.add(name)
        self.engine.cancel(name, data.draw(st.sampled_from([None, 0, 1])))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def leave_and_come_back(self, data: Any) -> None:
        states = self.engine.export(data.draw(st.sampled_from(sorted(self.asked))))
        if states:
            self.rt.kv.resize("max")  # else it may be refused, as any newcomer
            self.engine.adopt(states, self.heard)

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), tokens=st.integers(1, 6))
    def wait_for_tokens(self, data: Any, tokens: int) -> None:
        self.rt.kv.resize("max")
        which = self.asked[data.draw(st.sampled_from(sorted(self.asked)))][1]
        if which.id not in self.cancelled:
            self.heard.wait_for_tokens(f"{which.id}/0", min(tokens, which.max_tokens))

    @rule(share=st.floats(0, 1))
    def resize(self, share: float) -> None:
        self.rt.kv.resize(int(self.rt.kv.maximum_bytes * share) // 4096 * 4096)

    @rule(layers=st.lists(st.integers(0, 2), min_size=1, unique=True))
    def swap(self, layers: list[int]) -> None:
        self.rt.swap(layers, "half")

    @rule(layers=st.lists(st.integers(0, 2), min_size=1, unique=True))
    def release(self, layers: list[int]) -> None:
        self.rt.release(layers)

    @rule()
    def restore(self) -> None:
        self.rt.restore()

    @rule()
    def trim(self) -> None:
        self.rt.kv.trim()

    @invariant()
    def books(self) -> None:
        if hasattr(self, "engine"):
            self.rt.check()
            self.engine._blocks.check()


class TestServing(Serving.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(max_examples=6, stateful_step_count=20, deadline=None)


@pytest.mark.long
class TestServingForLong(Serving.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
