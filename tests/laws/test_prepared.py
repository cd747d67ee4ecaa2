"""Random actions that are prepared, committed, rolled back, forgotten or done at once, with faults in between.

A held transaction changes nothing until its commit, and nothing after its end; its layers are nobody else's; the ledger
is right and the tokens are the plain model's throughout.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import elastic
from elastic import CapacityError, ConfigError, StateError
from elastic.actions.transactions import held
from elastic.memory import places
from elastic.types import Action, Migrate, Prepared, Release, Replicate, ResizeKV, Restore, Swap
from support.architectures import build, prompt
from support.faulty_backend import CALLS, FaultyBackend
from support.lossless_variant import HALF, exact

NAMES = ["cpu#prepared-a", "cpu#prepared-b"]
ROOMY, TIGHT = 4 << 20, 764 << 10
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
LAYERS = st.sets(st.integers(0, 2), min_size=1).map(lambda layers: tuple(sorted(layers)))
ACTIONS: st.SearchStrategy[Action] = st.one_of(
    st.builds(Swap, LAYERS, st.just("half")),
    st.builds(Restore, LAYERS),
    st.builds(Release, LAYERS),
    st.builds(Migrate, LAYERS, st.sampled_from(NAMES)),
    st.builds(Replicate, LAYERS, st.sampled_from(NAMES)),
    st.builds(ResizeKV, st.sampled_from(NAMES), st.integers(0, 300_000) | st.none()),
)
STEPS = st.sampled_from("ppccrwwaeg")
EXPECTED = (CapacityError, StateError, ConfigError)
done: Counter[str] = Counter()


@functools.cache
def plain_tokens() -> torch.Tensor:
    tokens: torch.Tensor = exact(build("llama-gqa")).generate(**prompt(), **OPTIONS)
    return tokens


def touched(actions: tuple[Action, ...]) -> set[Any]:
    return {t for a in actions for t in ([a.place] if isinstance(a, ResizeKV) else a.layers)}


class Transactions(RuleBasedStateMachine):
    @initialize(tight=st.booleans(), lean=st.booleans())
    def begin(self, tight: bool, lean: bool) -> None:
        model = exact(build("llama-gqa"))
        self.prompt, self.tokens = prompt(), plain_tokens()
        budgets = [TIGHT if tight else ROOMY, ROOMY]
        at = [elastic.Place(n, torch.device("cpu"), b, page_bytes=4096) for n, b in zip(NAMES, budgets, strict=True)]
        self.model = elastic.wrap(model, places=at, variants=[HALF])
        self.rt = self.model.elastic
        self.tight, self.fault = tight, False
        self.backends: list[Any] = [pool.pool.backend for pool in self.rt.kv.memory.pools]
        if lean:  # as under a policy: a buffer for absent layers only while there are any
            for streamer in self.rt.weights.streamers.values():
                streamer.least = 0
        self.clock = SimpleNamespace(now=0.0)
        held.time = SimpleNamespace(monotonic=lambda: self.clock.now, time=lambda: 1e9 + self.clock.now)  # type: ignore
        self.ids = itertools.count()
        self.held: dict[str, Prepared] = {}
        self.ended: dict[str, Any] = {}  # id -> the results, or None: it was rolled back

    @rule(actions=st.lists(ACTIONS, min_size=1, max_size=2), timeout_s=st.sampled_from([5.0, 60.0]))
    def prepare(self, actions: list[Action], timeout_s: float) -> None:
        before, name = self.rt.form(), f"t{next(self.ids)}"
        busy = self.touches_held(tuple(actions))
        try:
            told = self.rt.prepare(actions, id=name, timeout_s=timeout_s)
        except EXPECTED if not busy else (StateError, ConfigError):  # noqa: B030
            done["refused"] += 1
            with pytest.raises(ConfigError, match="no transaction"):
                self.rt.commit(name)
        else:
            assert not busy
            assert told.expires_s == pytest.approx(1e9 + self.clock.now + timeout_s)
            assert self.rt.prepare(actions, id=name) == told
            self.held[name] = told
            done["prepared"] += 1
        self.unless_deferred_ones_are_done(before)

    @rule(journey=st.lists(st.tuples(STEPS, ACTIONS, st.integers(0, 20)), min_size=8, max_size=8))
    def travel(self, journey: list[tuple[str, Action, int]]) -> None:
        """Several steps at once: hypothesis alone would end most examples after a few."""
        for step, action, which in journey:
            {
                "p": lambda action=action, which=which: self.make_way_and_prepare(action, which),
                "c": lambda which=which: self.commit(which),
                "r": lambda which=which: self.roll_back(which),
                "w": lambda: self.wait(30.0),
                "a": lambda action=action: self.apply(action),
                "e": self.evict,
                "g": self.generate,
            }[step]()
            self.laws()

    def make_way_and_prepare(self, action: Action, which: int) -> None:
        """End the held ones that are in the way; most would be refused otherwise."""
        while self.touches_held((action,)):
            self.commit(0) if which % 2 else self.roll_back(0)
        self.prepare([action], 20.0 if which % 3 else 60.0)

    @rule(which=st.integers(0, 20))
    def commit(self, which: int) -> None:
        if not self.held:
            return
        name = list(self.held)[which % len(self.held)]
        told = self.held.pop(name)
        before = self.rt.form()
        try:
            results = self.rt.commit(name)
        except EXPECTED:
            assert self.fault or self.tight, "a commit failed with no fault"
            self.unless_deferred_ones_are_done(before)
            self.ended[name] = None
            done["commits that failed"] += 1
            return
        self.ended[name] = results
        assert len(results) == len(told.steps)
        assert all(result.status == "applied" or hasattr(result, "limit_bytes") for result in results)
        done["committed"] += 1

    @rule(which=st.integers(0, 20))
    def roll_back(self, which: int) -> None:
        if not self.held:
            return
        self.disarm()  # what also fails in the undoing of something is beyond repair
        before, name = self.rt.form(), list(self.held)[which % len(self.held)]
        self.rt.rollback(name)
        del self.held[name]
        self.ended[name] = None
        self.unless_deferred_ones_are_done(before)
        done["rolled back"] += 1

    @rule(seconds=st.sampled_from([4.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.disarm()
        self.clock.now += seconds
        late = [name for name, told in self.held.items() if told.expires_s <= 1e9 + self.clock.now]
        for name in late:
            with pytest.raises(StateError, match=r"rolled back [(]nobody committed it in time"):
                self.rt.commit(name)
            del self.held[name]
            self.ended[name] = None
            done["expired"] += 1

    @rule(which=st.integers(0, 20))
    def ask_again(self, which: int) -> None:
        if not self.ended:
            return
        name = list(self.ended)[which % len(self.ended)]
        if self.ended[name] is None:
            self.rt.rollback(name)
            with pytest.raises(StateError, match="was rolled back"):
                self.rt.commit(name)
        else:
            assert self.rt.commit(name) == self.ended[name]
            with pytest.raises(StateError, match="was committed"):
                self.rt.rollback(name)

    @rule(action=ACTIONS)
    def apply(self, action: Action) -> None:
        busy = self.touches_held((action,))
        try:
            self.rt.apply([action])
        except EXPECTED if not busy else StateError:  # noqa: B030
            done["not applied"] += 1
        else:
            assert not busy
            done["applied"] += 1

    @rule()
    def evict(self) -> None:
        self.disarm()
        for layer in self.rt.replicated:
            if layer not in touched(tuple(s.action for told in self.held.values() for s in told.steps)):
                residencies = list(self.rt.status().residencies.values())[layer]
                for there in residencies[1:]:
                    self.rt.evict(layer, there.place)

    @rule(call=st.sampled_from(CALLS), nth=st.integers(1, 3), place=st.integers(0, 1), half_way=st.booleans())
    def arm(self, call: str, nth: int, place: int, half_way: bool) -> None:
        self.disarm()
        self.backends[place].fail(call, nth, half_way=half_way)
        self.fault = True

    @rule()
    def disarm(self) -> None:
        for backend in self.backends:
            backend.disarm()
        self.fault = False

    @rule()
    def generate(self) -> None:
        self.disarm()
        try:
            tokens = self.model.generate(**self.prompt, **OPTIONS)
        except CapacityError:  # a limit below what it needs
            return
        assert torch.equal(tokens, self.tokens)
        done["generated"] += 1

    @invariant()
    def laws(self) -> None:
        if not hasattr(self, "rt"):
            return
        self.rt.check()
        assert [told.id for told in self.rt.held] == list(self.held)
        for kv, place in zip(self.rt.status().kv, self.rt.status().places, strict=True):
            assert sum(place.owners.values()) + place.free_bytes == place.budget_bytes
            assert kv.capacity_bytes <= kv.limit_bytes

    def touches_held(self, actions: tuple[Action, ...]) -> bool:
        return any(touched(actions) & touched(tuple(s.action for s in told.steps)) for told in self.held.values())

    def unless_deferred_ones_are_done(self, before: tuple[str, ...]) -> None:
        if not self.tight:
            assert self.rt.form() == before

    def teardown(self) -> None:
        if not hasattr(self, "rt"):
            return
        self.disarm()
        still = list(self.held)
        if len(still) > 1:
            self.rt.rollback(still[0])
        self.evict_all()
        for kv in self.rt.status().kv:
            if kv.place not in touched(tuple(s.action for told in self.rt.held for s in told.steps)):
                self.rt.kv.resize("max", place=kv.place)
        self.generate()
        elastic.unwrap(self.model)
        assert torch.equal(self.model.generate(**self.prompt, **OPTIONS), self.tokens)
        assert not places._open
        assert [backend.created for backend in self.backends] == [0, 0]

    def evict_all(self) -> None:
        for told in self.rt.held:
            if any(isinstance(step.action, Replicate) for step in told.steps):
                self.rt.rollback(told.id)
                del self.held[told.id]
        self.evict()


@pytest.mark.slow
@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.long)], ids=["few", "many"])
def test_transactions_are_all_or_nothing_in_any_order(many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    make_backend = places.make_backend
    monkeypatch.setattr(places, "make_backend", lambda place: FaultyBackend(make_backend(place)))
    monkeypatch.setattr(held, "time", held.time)
    done.clear()
    run_state_machine_as_test(
        Transactions,
        settings=settings(
            max_examples=200 if many else 20,
            stateful_step_count=60,
            deadline=None,
            database=None,
            derandomize=not many,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(dict(done))
    for kind in ("prepared", "committed", "rolled back", "expired", "applied", "generated"):
        assert done[kind] >= 10, done
