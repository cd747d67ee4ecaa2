"""A state machine of a fleet on ranks of one process: whatever happens to them, every request gets the tokens that it
gets from one model that nothing happens to, each once."""

from __future__ import annotations

import itertools
from contextlib import suppress
from functools import cache, partial
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import elastic
from elastic import CapacityError, ConfigError, Overloaded, StateError
from elastic.cluster.fleet.fleet import Fleet
from elastic.engines.base import Output, Request
from elastic.types import ResizeKV, Restore, Swap
from support import architectures
from support.cluster.wrapped_launcher import WrappedLauncher
from support.lossless_variant import HALF, exact
from support.serving.generations import Collector, continuation, prompts
from support.wrapped_model import small

MOST = 40
PROMPTS = prompts([3, 17, 40], architectures.VOCAB)
MODELS = ("llama-gqa", "gemma3")
ENGINE = {"block_tokens": 4, "max_batch_tokens": 24, "max_requests": 4}


@cache
def expected(name: str) -> list[list[int]]:
    """What the plain model goes on with after each prompt."""
    return [continuation(exact(architectures.build(name)), prompt, MOST) for prompt in PROMPTS]


class Tokens(Collector):
    """The tokens of every answer, by request and index."""

    def __call__(self, output: Output) -> None:
        super().__call__(Output(f"{output.request}/{output.index}", output.tokens, output.finish, output.error))


class FleetMachine(RuleBasedStateMachine):
    """At least one rank is left; what hangs is killed."""

    @initialize(name=st.sampled_from(MODELS), ranks=st.integers(2, 4), policy=st.sampled_from([None, "balance"]))
    def begin(self, name: str, ranks: int, policy: Any) -> None:
        self.launcher = WrappedLauncher(lambda: exact(architectures.build(name)), partial(self.wrap, name))
        self.fleet = Fleet(
            "tiny", ranks=ranks, launch=self.launcher, engine=ENGINE, policy=policy, replace=False,
            beat_timeout_s=120, hang_timeout_s=120,
        )  # fmt: skip
        self.fleet.start()
        self.policy = policy
        self.expected, self.heard = expected(name), Tokens()
        self.asked: dict[str, tuple[int, Request]] = {}
        self.cancelled: set[str] = set()
        self.gone: list[str] = []
        self.numbers = itertools.count()

    def wrap(self, name: str, model: Any) -> None:
        elastic.wrap(model, places=small(2 << 20), variants=[HALF])

    def teardown(self) -> None:
        if not hasattr(self, "fleet"):
            return
        try:
            for rank in self.ranks:
                self.resize_to(rank, None)
            answers = {f"{name}/{i}": which for name, (which, request) in self.asked.items() for i in range(request.n)}
            self.heard.wait(list(answers))
            for answer, which in answers.items():
                self.compare(answer, which)
            self.fleet.check()
        finally:
            self.fleet.stop(drain=False)

    def compare(self, answer: str, which: int) -> None:
        request = self.asked[answer.split("/")[0]][1]
        got, plain = self.heard.tokens[answer], self.expected[which][: request.max_tokens]
        end = self.heard.ends[answer]
        assert end.finish == "length" or (end.finish == "cancelled" and request.id in self.cancelled), end
        assert got == plain[: len(got)]
        assert end.finish == "cancelled" or got == plain

    @property
    def ranks(self) -> list[str]:
        return [instance.name for instance in self.fleet.status().instances]

    def any_rank(self, data: Any) -> str:
        """Draw a rank; what is drawn does not depend on how many there are, which may depend on the threads' luck."""
        return self.ranks[data.draw(st.integers(0, 11)) % len(self.ranks)]

    def any_request(self, data: Any) -> Request | None:
        number, asked = data.draw(st.integers(0, 59)), sorted(self.asked)
        return self.asked[asked[number % len(asked)]][1] if asked else None

    def resize_to(self, rank: str, nbytes: int | None) -> None:
        place = self.fleet.look(rank).status.places[0].name
        self.fleet.apply(rank, ResizeKV(place, nbytes))

    @rule(which=st.integers(0, len(PROMPTS) - 1), most=st.integers(1, MOST), n=st.integers(1, 3))
    def submit(self, which: int, most: int, n: int) -> None:
        request = Request(PROMPTS[which], most, n=n, id=f"request-{next(self.numbers)}")
        try:
            self.fleet.submit(request, self.heard)
        except (Overloaded, CapacityError):
            return
        self.asked[request.id] = which, request

    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        request, index = self.any_request(data), data.draw(st.sampled_from([None, 0, 1]))
        if request is not None:
            self.cancelled.add(request.id)
            self.fleet.cancel(request.id, index)

    @rule(data=st.data())
    def move(self, data: Any) -> None:
        """It may have ended, or be moving, or not fit; then it goes on where it is."""
        request, target = self.any_request(data), self.any_rank(data)
        if request is None:
            return
        try:
            moved = self.fleet.move(request.id, target)
        except (ConfigError, StateError, Overloaded, CapacityError):
            return
        assert moved.target == target
        if self.policy is None:  # nobody else moves it; None: it has ended, or its rank was lost and it waits
            assert self.fleet.instance_of(request.id) in (target, None)

    @rule(data=st.data(), tokens=st.integers(1, 12))
    def wait_for_tokens(self, data: Any, tokens: int) -> None:
        for rank in self.ranks:
            self.resize_to(rank, None)
        request = self.any_request(data)
        if request is not None and request.id not in self.cancelled:
            self.heard.wait_for_tokens(f"{request.id}/0", min(tokens, request.max_tokens))

    @rule(data=st.data(), hangs=st.booleans())
    def lose_a_rank(self, data: Any, hangs: bool) -> None:
        rank = self.any_rank(data)
        if len(self.ranks) > 1:
            if hangs:
                self.launcher.hang(rank)
            self.fleet.kill(rank)
            self.gone.append(rank)

    @rule()
    def add(self) -> None:
        """Ranks that are gone hang, or compute, until then; after it they would leave none of the place's pages."""
        if len(self.ranks) < 4:
            while self.gone:
                self.launcher.forget(self.gone.pop())
            self.fleet.add()

    @rule(data=st.data(), drain=st.booleans())
    def remove(self, data: Any, drain: bool) -> None:
        rank = self.any_rank(data)
        if len(self.ranks) < 2:
            return
        for each in self.ranks:
            self.resize_to(each, None)  # or what is drained may wait for room without an end
        self.fleet.remove(rank, drain=drain)
        assert rank not in self.ranks
        self.gone.append(rank)

    @rule(data=st.data(), pages=st.integers(0, 300))
    def resize(self, data: Any, pages: int) -> None:
        with suppress(CapacityError):  # above the maximum
            self.resize_to(self.any_rank(data), pages * 4096)

    @rule(data=st.data(), layers=st.lists(st.integers(0, 2), min_size=1, unique=True))
    def swap(self, data: Any, layers: list[int]) -> None:
        self.fleet.apply(self.any_rank(data), Swap(tuple(layers), "half"))

    @rule(data=st.data())
    def restore(self, data: Any) -> None:
        with suppress(CapacityError):  # requests have the pages
            self.fleet.apply(self.any_rank(data), Restore((0, 1, 2)))

    @invariant()
    def books(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.check()
