"""An engine whose process is killed in the middle of its steps: another goes on from its memory, token by token."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

import support
from elastic import StateError
from elastic.engines.base import Output, Request
from elastic.engines.core.kv_state import KVDirectory, KVReport, SequenceKV
from elastic.engines.core.step import SequenceState
from elastic.memory.backends.shared_file import OpenFile, share
from support import architectures
from support.architectures import in_turn
from support.child_process import Forked
from support.cluster.engine_group import EngineGroup, engine_groups
from support.processes import wait_until
from support.serving.generations import Collector, Continuation, prompts
from support.serving.tracked_engine import TrackedEngine

LENGTHS = [3, 17, 70, 140]
MOST = 60
CHILD = """
    import os, pickle, signal, sys
    sys.path[:0] = PATH
    import elastic
    from elastic.engines.base import Request
    from elastic.engines.continuous import ContinuousEngine
    from support import architectures
    from support.serving.generations import prompts
    from support.wrapped_model import small

    def send(what):
        pickle.dump(what, out)
        out.flush()

    out = os.fdopen(os.dup(1), "wb")
    model = architectures.build(NAME)
    elastic.wrap(model, places=small(4 << 20, "cpu#child"))
    engine = ContinuousEngine(model, block_tokens=8, max_batch_tokens=32, share_prefixes=False)
    outputs = []

    def step(report):
        told = list(outputs)
        outputs.clear()
        send((told, report))

    engine.reports.on_step = step
    engine.start()
    send(engine.reports.kv_source())
    for i, prompt in enumerate(prompts(LENGTHS, architectures.VOCAB)):
        engine.submit(Request(prompt, MOST, id=f"r{i}"), outputs.append)
    signal.pause()
"""


class Killed:
    """What a fleet knows of an engine in another process: what it had told when it was killed."""

    def __init__(self, name: str) -> None:
        path = [os.path.dirname(os.path.dirname(support.__file__)), *filter(None, sys.path)]
        facts = f"NAME, LENGTHS, MOST, PATH = {name!r}, {LENGTHS}, {MOST}, {path}\n"
        self.process = Forked(facts + textwrap.dedent(CHILD))
        self.source = self._next()
        self.directory = KVDirectory(self.source)
        self.file: OpenFile = OpenFile(self.source.file)
        self.tokens: dict[str, list[int]] = {f"r{i}": [] for i in range(len(LENGTHS))}

    def hear(self, steps: int) -> None:
        for _ in range(steps):
            outputs, report = self._next()
            self.directory.apply(report)
            for output in outputs:
                assert output.finish is None
                self.tokens[output.request] += output.tokens

    def kill(self) -> None:
        """Kill it, and hear what it had said."""
        self.process.send_signal(signal.SIGKILL)
        assert self.process.wait() == -signal.SIGKILL
        with suppress(EOFError, pickle.UnpicklingError):
            while True:
                self.hear(1)

    def close(self) -> None:
        self.process.close()
        self.file.close()

    def _next(self) -> Any:
        return pickle.load(self.process.stdout)


@pytest.fixture
def killed(request: Any) -> Iterator[Killed]:
    """An engine that goes on for some steps, and is killed in the next."""
    name, steps = request.param
    made = Killed(name)
    try:
        made.hear(steps)
        made.kill()
        yield made
    finally:
        made.close()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [("llama-gqa", 3), ("gemma3", 25)], indirect=True, ids=str)
def test_what_a_killed_engine_had_computed_is_not_computed_again(killed: Killed, request: Any) -> None:
    name = request.node.callspec.params["killed"][0]
    engine, heard = TrackedEngine(architectures.build(name), share_prefixes=False), Collector()
    expected_computed = 0
    try:
        for i, prompt in enumerate(prompts(LENGTHS, architectures.VOCAB)):
            asked, so_far = Request(prompt, MOST, id=f"r{i}"), tuple(killed.tokens[f"r{i}"])
            state = SequenceState(asked.id, asked, 0, 0, so_far)
            found = killed.directory.of(asked.id, len(prompt) + len(so_far))
            kv = () if found is None else (found,)
            assert kv or not so_far, "what has tokens has blocks"
            file = share(killed.file.descriptor)
            source = replace(killed.source, file=file, sectors=killed.directory.sectors_of(kv))
            taken = engine.engine.adopt([state], heard, kv=kv, source=source)
            assert taken == (kv[0].computed if kv else 0)
            expected_computed += len(prompt) + MOST - 1 - taken
        heard.wait(sorted(killed.tokens))
        for i, prompt in enumerate(prompts(LENGTHS, architectures.VOCAB)):
            tokens = killed.tokens[f"r{i}"] + heard.tokens[f"r{i}"]
            assert tokens == Continuation(architectures.plain(name), prompt, MOST)
        assert engine.computed == expected_computed
    finally:
        engine.close()


class KilledHome:
    """A home in a group that stands still in the middle of steps, and was given up: what it told, and its tokens."""

    def __init__(self, ranks: EngineGroup) -> None:
        self.heard, self.gone, self.lock = Collector(), False, threading.Lock()
        self.tracked, self.moving = ranks.tracked["a"], True
        ranks["a"].reports.on_step = self.hear
        for i, prompt in enumerate(prompts(LENGTHS, architectures.VOCAB)):
            ranks["a"].submit(Request(prompt, MOST, id=f"r{i}"), self.listen)
        self.heard.wait_for_tokens("r0", 2)
        for layers, guest in (((1,), "b"), ((2,), "c"), ((0,), "b"), ((0,), "a")):  # while steps are in flight
            ranks.move("a", layers, guest)
        self.heard.wait_for_tokens("r3", 6)
        self.tracked.only(2)
        self.moving = False
        self.tracked.engine._loop.post(self.resume)
        wait_until(lambda: self.tracked._more._waiters)  # type: ignore[attr-defined]
        with self.lock:
            self.gone = True
        ranks.lose("a")

    def listen(self, output: Output) -> None:
        """Begin no step while a request has few tokens left and layers still move: else it may end before."""
        self.heard(output)
        self.tracked.engine._loop.paused |= self.moving and len(self.heard.tokens[output.request]) >= MOST - 20

    def resume(self) -> None:
        self.tracked.engine._loop.paused = False

    def hear(self, report: KVReport | None) -> None:
        with self.lock:
            if not self.gone:
                self.tracked._hear(report)
                self.tokens = {name: list(tokens) for name, tokens in self.heard.tokens.items()}

    def state(self, number: int) -> tuple[SequenceState, SequenceKV]:
        name, prompt = f"r{number}", prompts(LENGTHS, architectures.VOCAB)[number]
        asked, so_far = Request(prompt, MOST, id=name), self.tokens[name]
        kv = self.tracked.directory.of(name, len(prompt) + len(so_far))
        assert kv is not None
        assert kv.computed == len(prompt) + len(so_far) - 1
        return SequenceState(name, asked, 0, 0, tuple(so_far)), kv


@pytest.mark.parametrize(("cut", "cohorts"), in_turn([("llama-gqa", 1), ("gemma3", 1), ("llama-gqa", 2)], [1, 2]))
def test_what_a_killed_home_and_its_guests_have_is_adopted_layer_by_layer(cut: tuple[str, int], cohorts: int) -> None:
    architecture, shards = cut
    with engine_groups() as make:
        ranks = make("abc", architecture, wrap={"shards": shards}, cohorts=cohorts)
        for guest in "bc":
            ranks.join("a", guest)
        killed = KilledHome(ranks)
        epoch, heard = killed.tracked.directory.epoch, Collector()
        for guest in "bc":
            ranks[guest].stages.close("a", keep=True)
        with pytest.raises(StateError, match=f"of epoch {epoch}, not {epoch - 1}"):
            ranks["b"].stages.kept("a", epoch - 1)
        kept = [ranks[guest].stages.kept("a", epoch) for guest in "bc"]
        ranks["b"].stages.free_kept()  # somebody knows of it now
        before = {rank: ranks.tracked[rank].computed for rank in "bc"}
        for number in range(len(LENGTHS)):
            state, kv = killed.state(number)
            source = killed.tracked.sources_of([kv])
            source = replace(source, others=tuple(each.with_blocks_of([kv]) for each in kept))
            rank = "bc"[number % 2]
            assert ranks[rank].adopt([state], heard, kv=[kv], source=source) == kv.computed
        heard.wait([f"r{number}" for number in range(len(LENGTHS))])
        for number, prompt in enumerate(prompts(LENGTHS, architectures.VOCAB)):
            got = killed.tokens[f"r{number}"] + heard.tokens[f"r{number}"]
            assert got == Continuation(architectures.plain(architecture), prompt, MOST)
        computed = sum(ranks.tracked[rank].computed - before[rank] for rank in "bc")
        assert computed == sum(MOST - len(tokens) for tokens in killed.tokens.values())
        for guest in "bc":
            ranks[guest].check()
            ranks[guest].stages.close("a")
            with pytest.raises(StateError, match="nothing that was computed for 'a' is kept"):
                ranks[guest].stages.kept("a", epoch)
            assert ranks[guest].runtime.kv.used_bytes == 0


def test_layers_of_a_killed_home_that_nobody_has_are_computed_anew() -> None:
    with engine_groups() as make:
        ranks = make("abc")
        for guest in "bc":
            ranks.join("a", guest)
        killed, heard = KilledHome(ranks), Collector()
        for guest in "bc":
            ranks[guest].stages.close("a", keep=True)
        kept = ranks["c"].stages.kept("a", killed.tracked.directory.epoch)
        ranks["b"].stages.free_kept()
        assert ranks["b"].runtime.kv.used_bytes == 0
        with pytest.raises(StateError, match="not prepared"):
            ranks["b"].stages.kept("a", killed.tracked.directory.epoch)
        state, kv = killed.state(0)
        source = replace(killed.tracked.sources_of([kv]), others=(kept.with_blocks_of([kv]),))
        assert ranks["c"].adopt([state], heard, kv=[kv], source=source) == 0
        heard.wait(["r0"])
        (prompt,) = prompts(LENGTHS, architectures.VOCAB)[:1]
        assert killed.tokens["r0"] + heard.tokens["r0"] == Continuation(killed.tracked.model, prompt, MOST)
