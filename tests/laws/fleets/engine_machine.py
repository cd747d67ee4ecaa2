"""Engines of one process whose layers come and go among them while requests run, as a state machine.

What is drawn never depends on threads: numbers choose among what there is.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from elastic import CapacityError, Overloaded
from elastic.engines.base import Request
from support import architectures
from support.cluster.engine_group import EngineGroup
from support.serving.generations import Collector, continuation, prompts

ARCHITECTURES = ["llama-gqa", "gemma3", "mistral-sliding", "qwen3-moe", "gpt2", "gpt-oss"]
PROMPTS = prompts([3, 17, 33, 60], architectures.VOCAB, 7)
MOST, LAYERS = 40, 3
NUMBER = st.integers(0, 59)
PATIENCE_S = 0.5


@cache
def plain(architecture: str, prompt: int) -> list[int]:
    return continuation(architectures.build(architecture), PROMPTS[prompt], MOST)


class EngineMachine(RuleBasedStateMachine):
    """Every request gets the plain model's tokens; books agree at every rank; a killed rank's work is not lost."""

    group: EngineGroup

    @initialize(architecture=st.sampled_from(ARCHITECTURES), ranks=st.sampled_from(["ab", "abc"]), small=st.booleans())
    def start(self, architecture: str, ranks: str, small: bool) -> None:
        self.architecture, self.ranks = architecture, ranks
        self.group = EngineGroup(ranks, architecture, nbytes=1 << 20 if small else 4 << 20, max_batch_tokens=24)
        self.joined: list[tuple[str, str]] = []
        self.heard = {home: Collector() for home in ranks}
        self.sent: dict[str, dict[str, tuple[int, int]]] = {home: {} for home in ranks}
        self.cancelled: set[str] = set()

    def teardown(self) -> None:
        if not hasattr(self, "group"):
            return
        try:
            self.end()
        finally:
            self.group.close()

    def end(self) -> None:
        for home in self.ranks:
            self.group[home].runtime.kv.resize("max")
        for home in self.ranks:
            with suppress(CapacityError):  # layers have no room while so many requests live
                self.gather(home)
                self.group.part(home)
            self.group[home].ranks.set_cap(None)
        for home, sent in self.sent.items():
            heard = self.heard[home]
            heard.wait(list(sent), 60)
            for request, (prompt, tokens) in sent.items():
                expected, finish = plain(self.architecture, prompt)[:tokens], heard.ends[request].finish
                told = heard.tokens.get(request, [])
                if finish == "cancelled" and request in self.cancelled:
                    assert told == expected[: len(told)]
                else:
                    assert (finish, told) == ("length", expected), heard.ends[request]
        self.group.check()

    def helpers(self, home: str) -> list[str]:
        return [helper for known, helper in self.joined if known == home]

    # -- requests

    @rule(home=NUMBER, prompt=NUMBER, tokens=st.integers(1, MOST))
    def submit(self, home: int, prompt: int, tokens: int) -> None:
        name, prompt = self.ranks[home % len(self.ranks)], prompt % len(PROMPTS)
        request = Request(PROMPTS[prompt], tokens, id=f"q{sum(map(len, self.sent.values()))}")
        with suppress(Overloaded, CapacityError):
            self.group[name].submit(request, self.heard[name])
            self.sent[name][request.id] = prompt, tokens

    @rule(homes=st.lists(NUMBER, min_size=3, max_size=8))
    def burst(self, homes: list[int]) -> None:
        for number in homes:
            self.submit(number, number // 3, MOST)

    @rule(number=NUMBER)
    def cancel(self, number: int) -> None:
        live = [(home, request) for home, sent in self.sent.items() for request in sent]
        if live:
            home, request = live[number % len(live)]
            self.cancelled.add(request)
            self.group[home].cancel(request)

    @rule()
    def wait(self) -> None:
        time.sleep(0.02)

    # -- layers

    @rule(home=NUMBER, helper=NUMBER)
    def join(self, home: int, helper: int) -> None:
        name = self.ranks[home % len(self.ranks)]
        others = [rank for rank in self.ranks if rank != name and (name, rank) not in self.joined]
        engine = self.group[name]
        if others and not engine._loop.scheduler.sequences:  # else the cap might be reached late
            other, cap = others[helper % len(others)], engine._memory.cap.sectors
            with suppress(CapacityError):
                self.group.join(name, other, self.group.sectors_alone(name) // 2 if cap is None else cap)
                self.joined.append((name, other))

    @rule(
        home=NUMBER,
        copy=NUMBER,
        layers=st.sets(st.integers(0, LAYERS - 1), min_size=1),
        to=NUMBER,
        rounds=st.integers(1, 3),
        hurried=st.booleans(),
        cancelled=st.lists(NUMBER, max_size=2),
        meanwhile=st.lists(st.tuples(NUMBER, st.integers(1, MOST)), max_size=3),
    )
    def flip(
        self,
        home: int,
        copy: int,
        layers: set[int],
        to: int,
        rounds: int,
        hurried: bool,
        cancelled: list[int],
        meanwhile: list[tuple[int, int]],
    ) -> None:
        """Requests are cancelled as it begins, and others begin before it ends."""
        name = self.ranks[home % len(self.ranks)]
        path = self.group[name].path
        shards = [copy % path.copies * LAYERS + layer for layer in sorted(layers)]
        owner = path.ranks[shards[0]]
        targets = [rank for rank in (name, *self.helpers(name)) if rank != owner]
        if not targets:
            return
        same = [shard for shard in shards if path.ranks[shard] == owner]
        for number in cancelled:
            self.cancel(number)
        left = list(meanwhile)

        def submit() -> None:
            while left:
                self.submit(home, *left.pop())
                time.sleep(0.01)  # for their first steps

        with suppress(CapacityError):
            self.group.move(name, same, targets[to % len(targets)], rounds=rounds, meanwhile=submit, hurried=hurried)

    @rule(home=NUMBER)
    def set_copies(self, home: int) -> None:
        """One copy of the layers, or two, where all of them are at the same ranks."""
        name = self.ranks[home % len(self.ranks)]
        path = self.group[name].path
        if path.alike and self.helpers(name):
            self.group[name].cohorts.set_copies(3 - path.copies)

    def gather(self, home: str) -> None:
        """Have all layers be at their home, in one copy."""
        path = self.group[home].path
        for copy in range(path.copies):
            shards = range(copy * LAYERS, (copy + 1) * LAYERS)
            if away := [shard for shard in shards if path.ranks[shard] != home]:
                self.group.move_all(home, dict.fromkeys(away, home))
        if path.copies > 1:
            self.group[home].cohorts.set_copies(1)

    @rule(home=NUMBER)
    def part(self, home: int) -> None:
        name = self.ranks[home % len(self.ranks)]
        if self.helpers(name):
            with suppress(CapacityError):
                self.gather(name)
                self.group.part(name)
                self.joined = [pair for pair in self.joined if pair[0] != name]

    @rule(home=NUMBER, cohorts=st.integers(1, 3))
    def set_cohorts(self, home: int, cohorts: int) -> None:
        engine = self.group[self.ranks[home % len(self.ranks)]]
        if engine.path.copies == 1:
            engine.cohorts.set_cohorts(cohorts)

    # -- memory

    @rule(rank=NUMBER, nbytes=st.sampled_from([1 << 16, 1 << 17, "max"]))
    def resize(self, rank: int, nbytes: Any) -> None:
        self.group[self.ranks[rank % len(self.ranks)]].runtime.kv.resize(nbytes)

    @rule(home=NUMBER, sectors=st.integers(6, 40))
    def set_cap(self, home: int, sectors: int) -> None:
        name = self.ranks[home % len(self.ranks)]
        engine, helpers = self.group[name], self.helpers(name)
        before = engine._memory.cap.sectors
        if before is None or not helpers:
            return
        with suppress(CapacityError):
            if sectors > before:
                self.allot(name, helpers, sectors)
                engine.ranks.set_cap(sectors)
                return
            engine.ranks.set_cap(sectors)
            until_s = time.monotonic() + PATIENCE_S
            while not engine.ranks.cap_reached():
                if time.monotonic() > until_s:
                    engine.ranks.set_cap(before)
                    return
                time.sleep(0.005)
            self.compare(name)  # so that they know what came free
            self.allot(name, helpers, sectors)

    def allot(self, home: str, helpers: list[str], sectors: int) -> None:
        for helper in helpers:
            self.group[helper].stages.of(home).memory.allot(sectors)

    # -- losses

    @rule(home=NUMBER, which=NUMBER, readable=st.booleans())
    def lose(self, home: int, which: int, readable: bool) -> None:
        name = self.ranks[home % len(self.ranks)]
        engine = self.group[name]
        if not engine.path.helpers:
            return
        helper = engine.path.helpers[which % len(engine.path.helpers)]
        stage, log = self.group[helper].stages.by_home[name], self.group.logs.pop((name, helper))
        close = stage.memory.close
        if readable:
            stage.memory.close = lambda: None  # type: ignore[method-assign]
        log.close()
        self.group[helper].stages.close(name)
        source = self.group[helper].reports.kv_source()
        assert source is not None
        engine.recovery.recover(helper, lambda layers: None, {helper: source} if readable else None)
        stage.memory.close = close  # type: ignore[method-assign]
        close()
        for other in self.helpers(name):
            self.group.logs.pop((name, other), None)
            self.group[other].stages.close(name)
        self.joined = [pair for pair in self.joined if pair[0] != name]
        assert engine.path.helpers == ()

    # -- books

    @rule(home=NUMBER)
    def check(self, home: int) -> None:
        self.group.check()
        self.compare(self.ranks[home % len(self.ranks)])

    def compare(self, home: str) -> None:
        """Between two steps, compare what a home has with what its helpers have for it."""
        engine = self.group[home]
        engine._loop.between_steps(partial(self.compare_now, home))

    def compare_now(self, home: str) -> None:
        engine = self.group[home]
        engine._loop.settle_intact()
        engine._home.flush()
        if engine.path.helpers:
            engine._home.remove(engine._loop.scheduler.take_removed())
        for helper, link in engine._home.links.items():
            stage, until_s = self.group[helper].stages.by_home[home], time.monotonic() + 20
            while stage._handled < link.sent:
                assert time.monotonic() < until_s
                time.sleep(0.001)
            assert set(stage.memory.mapped_sectors) == set(engine._memory.mapped_sectors)
            assert len(stage.memory.mapped_sectors) <= stage.memory.allotted
            assert set(stage.memory.layers) == {shard % LAYERS for shard in engine.path.shards_of(helper)}
            told = dict(stage._runner.sequences())
            assert self.computed_by(helper, home).items() <= told.items()
            if engine.path.copies == 1:  # else also some that have gone by another copy
                assert told.keys() == self.computed_by(helper, home).keys()
        assert set(engine._memory.layers) == {shard % LAYERS for shard in engine.path.shards_of(home)}
        if engine.path.copies == 1:  # of several nothing is told
            self.compare_told(home)

    def computed_by(self, rank: str, home: str) -> dict[str, Any]:
        """Sequences of a home that go by a rank."""
        engine = self.group[home]
        path, scheduler = engine.path, engine._loop.scheduler
        by = [rank in path.ranks[copy * LAYERS : (copy + 1) * LAYERS] for copy in range(path.copies)]
        live = [sequence for sequence in scheduler.begun if by[sequence.cohort.copy]]
        known = dict(engine._runner.sequences())
        return {sequence.id: known[sequence.id] for sequence in live if sequence.id in known}

    def compare_told(self, home: str) -> None:
        """Whoever goes on when its process is killed finds what is computed, in the layers that it computes itself."""
        engine, tracked = self.group[home], self.group.tracked[home]
        engine._loop._tell(always=True)
        assert tracked.directory.epoch == engine.path.epoch
        for sequence in engine._loop.scheduler.sequences.values():
            kv = tracked.directory.of(sequence.id, len(sequence.tokens))
            if kv is None:
                windows = [window for window in engine.kv_format.windows if window is not None]
                assert not sequence.computed or (sequence.in_prompt and len(sequence.tokens) > min(windows))
                continue
            assert replace(kv, decoding=sequence.kv().decoding) == sequence.kv()
            for sector in tracked.directory.sectors_of([kv]):
                group = engine._memory.groups[sector.group]
                assert (sector.layers, sector.pages) == (group.layers, group.pages_of(sector.sector))
