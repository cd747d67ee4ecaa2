"""Engines between which requests move with their KV, and which end at once: the same tokens, nothing computed twice.

An engine that ends at once is one that nobody hears any more: it stands still where it would tell of its next step, as
a killed process does somewhere before. Others then go on from its memory file, by what it had told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from elastic import CapacityError, Overloaded
from elastic.engines.base import Output, Request, Sampling
from elastic.engines.core.kv_state import KVReport, SequenceKV
from elastic.engines.core.step import ScheduledChunk, SequenceState
from elastic.engines.sampling import answer_seed
from elastic.runtime import options as wrap_options
from support import architectures
from support.lossless_variant import HALF, exact
from support.serving.generations import Collector, prompts
from support.serving.tracked_engine import TrackedEngine
from support.weights.prepacked import any_layout, wide_llama

MOST = 24
PROMPTS = prompts([3, 17, 40], architectures.VOCAB)
PREPACKED = "prepacked llama"
"""Its products round otherwise than plain ones: it is compared with an engine that is prepacked too."""
MODELS = ("llama-gqa", "gemma3", PREPACKED)
OPTIONS: dict[str, Any] = {"block_tokens": 4, "max_batch_tokens": 24, "max_requests": 4, "wrap": {"variants": [HALF]}}
PLACE_BYTES = 1 << 20
PICK = st.integers(0, 30)
"""Of what there is then: what there is depends on how fast engines are, what is drawn may not."""


class Tokens(Collector):
    """The tokens of every answer, by request and index."""

    def __call__(self, output: Output) -> None:
        super().__call__(replace(output, request=f"{output.request}/{output.index}"))


def chosen(names: Iterable[str], pick: int) -> str | None:
    found = sorted(names)
    return found[pick % len(found)] if found else None


def asked(which: int, most: int, n: int, sampled: bool) -> Request:
    rule = Sampling(1.3, seed=7, frequency_penalty=0.1) if sampled else Sampling()
    return Request(PROMPTS[which], most, rule, n=n)


def model_of(name: str) -> Any:
    return exact(wide_llama() if name == PREPACKED else architectures.build(name))


def options_of(name: str) -> dict[str, Any]:
    return {**OPTIONS, "wrap": {**OPTIONS["wrap"], "prepack": name == PREPACKED}}


def packed_where_possible() -> Any:
    return patch.object(wrap_options, "prepacked_layout", any_layout)


@cache
def undisturbed(name: str, which: int, sampled: bool) -> list[list[int]]:
    """The tokens of three answers of an engine that has nothing else to do."""
    with packed_where_possible():
        alone, heard = TrackedEngine(model_of(name), **options_of(name)), Tokens()
    request = asked(which, MOST, 3, sampled)
    alone.engine.submit(request, heard)
    heard.wait([f"{request.id}/{i}" for i in range(3)])
    alone.close()
    return [heard.tokens[f"{request.id}/{i}"] for i in range(3)]


class Rank(TrackedEngine):
    """An engine as a fleet hears it: the outputs and the report of a step together, or nothing of it."""

    def __init__(self, machine: Handover, options: dict[str, Any]) -> None:
        self.machine = machine
        self.dead = False
        self.buried = threading.Event()
        self.outputs: list[Output] = []
        self.done: list[ScheduledChunk] = []
        with packed_where_possible():
            super().__init__(model_of(machine.name), PLACE_BYTES, **options)
        scheduler = self.engine._loop.scheduler
        self._schedule, self._update = scheduler.schedule, scheduler.update
        scheduler.schedule = self._watch_schedule  # type: ignore[method-assign]
        scheduler.update = self._watch_update  # type: ignore[method-assign]

    @property
    def kv(self) -> Any:
        return self.engine.runtime.kv

    def bury(self) -> None:
        """End what is left of it."""
        self.dead = True
        self.buried.set()
        self.close()

    def _watch_schedule(self) -> Any:
        step = self._schedule()
        for chunk in step.chunks if step is not None and not self.dead else ():
            have = self.machine.have.get(chunk.sequence, 0)
            if chunk.start < have:
                self.machine.wrong.append(f"{chunk.sequence}: token {chunk.start} again, there were {have}")
        return step

    def _watch_update(self, step: Any, result: Any) -> Any:
        self.done += step.chunks
        return self._update(step, result)

    def _hear(self, report: KVReport) -> None:
        with self.machine.lock:
            if not self.dead:
                self.machine.have.update((c.sequence, c.start + len(c.tokens)) for c in self.done)
                super()._hear(report)
                for output in self.outputs:
                    self.machine.heard(output)
                self.outputs, self.done = [], []
                return
        assert self.buried.wait(120)


@dataclass
class Held:
    """A request that was handed over."""

    states: tuple[SequenceState, ...]
    kv: tuple[SequenceKV, ...]


class Handover(RuleBasedStateMachine):
    """What a fleet does, without a fleet."""

    @initialize(name=st.sampled_from(MODELS), ranks=st.integers(2, 3), share=st.booleans(), cohorts=st.integers(1, 2))
    def begin(self, name: str, ranks: int, share: bool, cohorts: int) -> None:
        self.name = name
        self.lock = threading.RLock()
        self.heard = Tokens()
        self.have: dict[str, int] = {}  # tokens of a sequence whose KV must not be computed again
        self.wrong: list[str] = []
        self.asked: dict[str, tuple[int, bool, Request]] = {}
        self.seeds: dict[str, list[int]] = {}
        self.at: dict[str, Rank] = {}
        self.held: dict[str, Held] = {}
        self.receiving: dict[str, Rank] = {}
        self.cancelled: set[str] = set()
        self.options = {**options_of(name), "share_prefixes": share, "cohorts": cohorts}
        self.ranks = [Rank(self, self.options) for _ in range(ranks)]

    # -- what happens

    @rule(at=PICK, which=st.integers(0, 2), most=st.integers(1, MOST), n=st.integers(1, 3), sampled=st.booleans())
    def submit(self, at: int, which: int, most: int, n: int, sampled: bool) -> None:
        rank, request = self.rank(at), asked(which, most, n, sampled)
        try:
            rank.engine.submit(request, self.listener(rank))
        except (Overloaded, CapacityError):
            return
        self.asked[request.id] = which, sampled, request
        self.at[request.id] = rank

    @rule(pick=PICK, tokens=st.integers(1, 8))
    def wait_for_tokens(self, pick: int, tokens: int) -> None:
        request = chosen(self.running(), pick)
        if request is not None and request not in self.cancelled:
            self.at[request].kv.resize("max")
            self.heard.wait_for_tokens(f"{request}/0", min(tokens, self.asked[request][2].max_tokens))

    @rule(pick=PICK, to=PICK)
    def receive_a_round(self, pick: int, to: int) -> None:
        request = chosen(self.running(), pick)
        if request is not None:
            self.copy(request, self.target(to, request), self.at[request].engine.moves.locate(request))

    @rule(pick=PICK)
    def hand_over(self, pick: int) -> None:
        request = chosen(self.running(), pick)
        handed = None if request is None else self.at[request].engine.moves.hand_over(request)
        if request is not None and handed is not None:
            self.held[request] = Held(*handed)

    @rule(pick=PICK, to=PICK, rounds=st.booleans())
    def adopt(self, pick: int, to: int, rounds: bool) -> None:
        request = chosen(self.held, pick)
        if request is None:
            return
        source, target, held = self.at[request], self.target(to, request), self.held[request]
        if rounds and held.kv and not self.copy(request, target, held.kv):
            return
        self.begin_at(target, request, held.states, held.kv, None if rounds else source)
        del self.held[request]
        source.engine.moves.release(request)

    @rule(pick=PICK)
    def take_back(self, pick: int) -> None:
        request = chosen(self.held, pick)
        if request is not None:
            self.at[request].engine.moves.take_back(request)
            del self.held[request]

    @rule(pick=PICK)
    def give_up(self, pick: int) -> None:
        request = chosen(self.receiving, pick)
        if request is not None:
            self.receiving.pop(request).engine.moves.give_up(request)

    @rule(pick=PICK, index=st.sampled_from([None, 0, 1]))
    def cancel(self, pick: int, index: int | None) -> None:
        request = chosen(self.running(), pick)
        if request is not None:
            self.cancelled.add(request)
            self.at[request].engine.cancel(request, index)

    @rule(at=PICK, share=st.floats(0, 1))
    def resize(self, at: int, share: float) -> None:
        kv = self.rank(at).kv
        kv.resize(int(kv.maximum_bytes * share) // 4096 * 4096)

    @rule(at=PICK, layers=st.lists(st.integers(0, 2), unique=True))
    def swap(self, at: int, layers: list[int]) -> None:
        runtime = self.rank(at).engine.runtime
        if layers:
            runtime.swap(layers, "half")
        else:
            runtime.restore()

    @rule(at=PICK, to=PICK, replace_it=st.booleans())
    def end_at_once(self, at: int, to: int, replace_it: bool) -> None:
        dead = self.rank(at)
        with self.lock:
            dead.dead = True
        self.ranks.remove(dead)
        if replace_it or len(self.ranks) < 2:
            self.ranks.append(Rank(self, self.options))
        self.receiving = {request: rank for request, rank in self.receiving.items() if rank is not dead}
        for i, (request, rank) in enumerate(list(self.at.items())):
            if rank is dead:
                self.rescue(to + i, request)
        dead.bury()

    # -- how

    def listener(self, rank: Rank) -> Callable[[Output], None]:
        return lambda output: rank.outputs.append(output)  # the list is another one after each step

    def running(self) -> list[str]:
        return sorted(set(self.at) - set(self.held))

    def rank(self, pick: int) -> Rank:
        return self.ranks[pick % len(self.ranks)]

    def target(self, pick: int, request: str) -> Rank:
        """Pick an engine for a request to go to; another that has received of it gives it up."""
        others = [rank for rank in self.ranks if rank is not self.at[request]]
        target = others[pick % len(others)]
        if self.receiving.get(request, target) is not target:
            self.receiving.pop(request).engine.moves.give_up(request)
        return target

    def copy(self, request: str, target: Rank, kv: Sequence[SequenceKV]) -> bool:
        """Copy what is there to a target; return whether it had room."""
        states = self.held[request].states if request in self.held else self.begun(request)
        if not kv or not states:  # it has ended
            return False
        try:
            target.engine.moves.receive(states, kv, self.at[request].sources_of(kv))
        except (Overloaded, CapacityError):
            self.receiving.pop(request, None)
            return False
        self.receiving[request] = target
        return True

    def begun(self, request: str) -> tuple[SequenceState, ...]:
        """What a fleet knows of the answers of a request: their tokens that it has heard."""
        asked = self.asked[request][2]
        names = [request] if asked.n == 1 else [f"{request}[{i}]" for i in range(asked.n)]
        with self.lock:
            return tuple(
                SequenceState(
                    name, asked, i, self.seeds_of(request)[i], tuple(self.heard.tokens.get(f"{request}/{i}", ()))
                )
                for i, name in enumerate(names)
                if f"{request}/{i}" not in self.heard.ends
            )

    def seeds_of(self, request: str) -> list[int]:
        asked = self.asked[request][2]
        return self.seeds.setdefault(request, [answer_seed(asked, i) for i in range(asked.n)])

    def begin_at(
        self, target: Rank, request: str, states: Sequence[SequenceState], kv: Sequence[SequenceKV], file: Rank | None
    ) -> None:
        """Have a target go on with a request, with its KV if it has room for that; `file`: from there, now."""
        target.kv.resize("max")
        with self.lock:
            self.have.update((state.id, 0) for state in states)
            self.have.update((one.sequence, one.computed) for one in kv)
        self.at[request] = target
        self.receiving.pop(request, None)
        source = None if file is None else file.sources_of(kv)
        try:
            taken = target.engine.adopt(states, self.listener(target), kv=kv, source=source)
        except Overloaded:
            with self.lock:
                self.have.update((state.id, 0) for state in states)
            target.engine.adopt(states, self.listener(target))
        else:
            assert taken >= sum(one.computed for one in kv)

    def rescue(self, pick: int, request: str) -> None:
        """Have another engine go on with a request of one that has ended, from its memory."""
        dead = self.at[request]
        states = self.begun(request)
        if not states:
            del self.at[request]
            return
        self.held.pop(request, None)
        self.begin_at(self.target(pick, request), request, states, dead.mirrored(states), dead)
        if request in self.cancelled:  # it may not have heard it
            self.at[request].engine.cancel(request)

    # -- what always holds

    @invariant()
    def books(self) -> None:
        for rank in getattr(self, "ranks", ()):
            rank.engine.runtime.check()
            rank.engine.check()
        assert not getattr(self, "wrong", ())

    def teardown(self) -> None:
        if not hasattr(self, "ranks"):
            return
        for rank in self.ranks:
            rank.kv.resize("max")
        for request in sorted(self.held):
            self.at[request].engine.moves.take_back(request)
        for request, rank in self.receiving.items():
            rank.engine.moves.give_up(request)
        self.heard.wait([f"{name}/{i}" for name, (_, _, request) in self.asked.items() for i in range(request.n)])
        for name, (which, sampled, request) in self.asked.items():
            for i in range(request.n):
                got, end = self.heard.tokens[f"{name}/{i}"], self.heard.ends[f"{name}/{i}"].finish
                plain = undisturbed(self.name, which, sampled)[i][: request.max_tokens]
                assert end == "length" or (end == "cancelled" and name in self.cancelled)
                assert got == plain[: len(got)]
                assert end == "cancelled" or got == plain
        for rank in self.ranks:
            rank.close()
        assert not self.wrong
