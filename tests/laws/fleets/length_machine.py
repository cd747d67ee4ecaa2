"""A fleet whose policy of lengths has ranks share their layers for long requests, and part again, as a state machine.

The machine asks the policy, tick by tick, and has done what it asks for. What is drawn never depends on threads.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import elastic
from elastic import CapacityError, Lengths, Overloaded
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.instance import blocks_of
from elastic.cluster.fleet.lengths import controller
from elastic.cluster.fleet.lengths.controller import LengthController
from elastic.engines.base import Request
from elastic.engines.executor.model_runner import ModelRunner
from elastic.types import ResizeKV
from laws.fleets.group_machine import PLACES, REFUSALS, checkpoint
from laws.fleets.sharded_machine import SHARDS, plain
from support import architectures
from support.cluster.wrapped_launcher import WrappedLauncher
from support.lossless_variant import exact
from support.serving.generations import Collector, prompts, same_unless_close
from support.wrapped_model import PAGE, small, tight

MODELS = ("llama-mha", "qwen3")
DEGREES = (1, 2, 4)
KV_PAGES = 14
"""Of a rank by itself: a request of more than 64 tokens of one model, or 128 of the other, is too long for it."""
LONGEST = 500
"""Tokens for which the models have positions."""
MOST, SHORT = 12, 40
"""Tokens of an answer, and of a short prompt, at the most."""
SETTINGS = Lengths(wait_s=0.0, dwell_s=0.0, cooldown_s=0.0, patience_s=0.0)
ENGINE = {"block_tokens": 4, "max_batch_tokens": 24, "max_requests": 4}
SOON_S, END_S = 2.0, 120.0
"""How long a change may wait for requests, and how long all may take to end."""


@cache
def budget_bytes(name: str) -> int:
    """The memory of a rank."""
    place = tight(exact(architectures.build(name)), KV_PAGES, shards=SHARDS)
    assert place.budget_bytes is not None
    return place.budget_bytes


class LengthMachine(RuleBasedStateMachine):
    """Whoever ranks can hold together ends; while no rank is lost, nothing is computed twice."""

    @initialize(name=st.sampled_from(MODELS), ranks=st.sampled_from([4, 3, 2]), most=st.sampled_from([None, 1]))
    def begin(self, name: str, ranks: int, most: int | None) -> None:
        self.name, self.patch = name, pytest.MonkeyPatch()
        self.patch.setattr(controller, "ACT_S", SOON_S)
        self.heard, self.asked, self.cancelled = Collector(), dict[str, Request](), set[str]()
        self.lost = self.lowered = False
        self.numbers = itertools.count()
        self.prefilled: Counter[str] = Counter()
        self.count_prefill()
        launcher = WrappedLauncher(lambda: exact(architectures.build(name)), partial(self.wrap, name))
        self.fleet = Fleet(
            "tiny", ranks=ranks, launch=launcher, engine=ENGINE, replace=False, beat_timeout_s=120, hang_timeout_s=120
        )
        self.fleet.start()
        self.policy = LengthController(self.fleet._dispatcher, self.fleet, replace(SETTINGS, layers_per_step=most))
        self.fleet._dispatcher.on_waiting = lambda: None  # as if it had started
        self.policy._measure()
        self.policy._note_reach()
        self.capacity = dict(self.fleet.capacity(DEGREES)["r0"])

    def wrap(self, name: str, model: Any) -> None:
        place = small(budget_bytes(name), f"cpu#{next(PLACES)}")
        elastic.wrap(model, places=place, checkpoint=checkpoint(name).name, shards=SHARDS)

    def count_prefill(self) -> None:
        """Count the tokens of prompts that instances compute in steps of their own, by sequence."""
        begin = ModelRunner.begin

        def counted(runner: ModelRunner, step: Any, **options: Any) -> Any:
            for chunk in step.chunks:
                request = self.asked.get(chunk.sequence)
                if request is not None:
                    self.prefilled[chunk.sequence] += max(0, min(len(chunk.tokens), len(request.prompt) - chunk.start))
            return begin(runner, step, **options)

        self.patch.setattr(ModelRunner, "begin", counted)

    def teardown(self) -> None:
        if not hasattr(self, "fleet"):
            return
        try:
            self.end()
        finally:
            self.policy.stop()
            self.fleet.stop(drain=False)
            self.patch.undo()

    def end(self) -> None:
        self.raise_limits()
        wanted = {name for name, request in self.asked.items() if self.fits(request)}
        until_s = time.monotonic() + END_S
        while not wanted <= self.heard.ends.keys() or self.fleet.groups():
            assert time.monotonic() < until_s, f"{wanted - self.heard.ends.keys()} wait, {self.fleet.groups()}"
            self.go_on()
            time.sleep(0.01)
        for name in self.asked.keys() - wanted:  # too few ranks are left
            self.cancelled.add(name)
            self.fleet.cancel(name)
        self.heard.wait(list(self.asked))
        for request in self.asked.values():
            self.compare(request)
        self.fleet.check()
        assert self.fleet.capacity(DEGREES) == dict.fromkeys(self.ranks, self.capacity)
        assert self.lost or self.fleet.status().totals.recomputed_tokens == 0

    def compare(self, request: Request) -> None:
        got, end = self.heard.tokens[request.id], self.heard.ends[request.id]
        assert end.finish == "length" or (end.finish == "cancelled" and request.id in self.cancelled), end
        assert not got or same_unless_close(plain(self.name), request.prompt, got)
        if end.finish == "length":
            assert len(got) == request.max_tokens
            assert self.lost or self.prefilled[request.id] == len(request.prompt)

    # -- what there is

    @property
    def ranks(self) -> list[str]:
        return [instance.name for instance in self.fleet.status().instances]

    @property
    def most_blocks(self) -> int:
        """Of the largest instance that the ranks could be."""
        return max(blocks for degree, blocks in self.capacity.items() if degree <= len(self.ranks))

    def any_rank(self, number: int) -> str:
        return self.ranks[number % len(self.ranks)]

    def any_request(self, number: int) -> Request | None:
        return list(self.asked.values())[number % len(self.asked)] if self.asked else None

    def blocks_of(self, request: Request) -> int:
        instance = next(iter(self.fleet._dispatcher.instances.values()))
        return blocks_of(instance.kv_format, len(request.prompt) + request.max_tokens)

    def fits(self, request: Request) -> bool:
        return self.blocks_of(request) <= self.most_blocks

    # -- requests

    def submit(self, tokens: int, answer: int) -> None:
        """Ask for an answer, of so many tokens with the prompt; who fits is refused only where limits were lowered."""
        number = next(self.numbers)
        (prompt,) = prompts([tokens - answer], architectures.VOCAB, seed=number)
        request = Request(prompt, answer, id=f"request-{number}")
        self.asked[request.id] = request
        try:
            self.fleet.submit(request, self.heard)
        except (Overloaded, CapacityError):
            del self.asked[request.id]
            assert self.lowered or self.lost or not self.fits(request)

    @rule(prompt=st.integers(1, SHORT), answer=st.integers(1, MOST))
    def submit_short(self, prompt: int, answer: int) -> None:
        self.submit(prompt + answer, answer)

    @rule(answer=st.integers(1, MOST), degree=st.sampled_from([4, 2]), share=st.floats(0.0, 1.0))
    def submit_long(self, answer: int, degree: int, share: float) -> None:
        """One that needs so many ranks, if that many hold more than half of them."""
        low, high = (self.capacity[d] * ENGINE["block_tokens"] for d in (degree // 2, degree))
        low, high = min(low, LONGEST - 1), min(high, LONGEST)
        self.submit(low + 1 + int(share * max(0, high - low - 1)), answer)

    @rule(lengths=st.lists(st.integers(1, SHORT), min_size=4, max_size=8))
    def submit_several(self, lengths: list[int]) -> None:
        for length in lengths:
            self.submit(length + MOST, MOST)

    @rule(number=st.integers(0, 59))
    def cancel(self, number: int) -> None:
        request = self.any_request(number)
        if request is not None:
            self.cancelled.add(request.id)
            self.fleet.cancel(request.id)

    # -- what happens to ranks

    @rule(number=st.integers(0, 11), pages=st.integers(0, KV_PAGES))
    def resize(self, number: int, pages: int) -> None:
        self.lowered = True
        with suppress(*REFUSALS):  # below what others were allotted there
            self.resize_to(self.any_rank(number), pages * PAGE)

    @rule()
    def raise_limits(self) -> None:
        for rank in self.ranks:
            self.resize_to(rank, None)

    def resize_to(self, rank: str, nbytes: int | None) -> None:
        place = self.fleet.look(rank).status.places[0].name
        self.fleet.apply(rank, ResizeKV(place, nbytes))

    @rule(number=st.integers(0, 11), often=st.integers(0, 3))
    def kill(self, number: int, often: int = 3) -> None:
        """Seldom: else few are left to share layers."""
        if len(self.ranks) > 1 and often == 3:
            self.lost = True
            self.fleet.kill(self.any_rank(number))

    # -- the policy

    @rule(ticks=st.integers(1, 3))
    def tick(self, ticks: int) -> None:
        for _ in range(ticks):
            self.go_on()

    def go_on(self) -> None:
        """Let the policy look once, and do what it asks for."""
        self.policy.tick()
        changes: Any = self.policy._changes
        while not changes.empty():
            asked = changes.get()
            if asked is True:
                with suppress(*REFUSALS):
                    self.policy._measure()
                self.policy._measuring = False
            else:
                with suppress(*REFUSALS):
                    self.policy.change(asked)
                self.policy._changing = self.policy._changing[1:]

    @rule(number=st.integers(0, 59), tokens=st.integers(1, MOST))
    def go_on_until_tokens_came(self, number: int, tokens: int) -> None:
        """Or for a while: a limit that was lowered, or another request, may keep it from them."""
        request, until_s = self.any_request(number), time.monotonic() + SOON_S
        while request is not None and request.id not in self.heard.ends and time.monotonic() < until_s:
            if len(self.heard.tokens.get(request.id, ())) >= min(tokens, request.max_tokens):
                return
            self.go_on()
            time.sleep(0.01)

    @invariant()
    def books(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.check()
