"""An engine whose process is killed in the middle of its steps: another goes on from its memory, token by token."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

import support
from elastic.engines.base import Request
from elastic.engines.core.kv_state import KVDirectory
from elastic.engines.core.step import SequenceState
from elastic.memory.backends.shared_file import OpenFile, open_shared
from support import architectures
from support.serving.generations import Collector, continuation, prompts
from support.serving.tracked_engine import TrackedEngine

LENGTHS = [3, 17, 70, 140]
MOST = 60
CHILD = """
    import os, pickle, sys
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

    engine.on_step = step
    engine.start()
    send(engine.kv_source())
    for i, prompt in enumerate(prompts(LENGTHS, architectures.VOCAB)):
        engine.submit(Request(prompt, MOST, id=f"r{i}"), outputs.append)
    sys.stdin.read()
"""


class Killed:
    """What a fleet knows of an engine in another process: what it had told when it was killed."""

    def __init__(self, name: str) -> None:
        facts = f"NAME, LENGTHS, MOST = {name!r}, {LENGTHS}, {MOST}\n"
        path = os.pathsep.join([os.path.dirname(os.path.dirname(support.__file__)), *filter(None, sys.path)])
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", facts + textwrap.dedent(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.source = self._next()
        self.directory = KVDirectory(self.source)
        self.file: OpenFile = open_shared(self.source.file)
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
        assert self.process.wait(60) == -signal.SIGKILL
        with suppress(EOFError, pickle.UnpicklingError):
            while True:
                self.hear(1)

    def close(self) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.wait(60)
        self.file.close()

    def _next(self) -> Any:
        assert self.process.stdout is not None
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
            file = killed.file.reshare()
            source = replace(killed.source, file=file, sectors=killed.directory.sectors_of(kv))
            taken = engine.engine.adopt([state], heard, kv=kv, source=source)
            assert taken == (kv[0].computed if kv else 0)
            expected_computed += len(prompt) + MOST - 1 - taken
        heard.wait(sorted(killed.tokens))
        for i, prompt in enumerate(prompts(LENGTHS, architectures.VOCAB)):
            tokens = killed.tokens[f"r{i}"] + heard.tokens[f"r{i}"]
            assert tokens == continuation(architectures.build(name), prompt, MOST)
        assert engine.computed == expected_computed
    finally:
        engine.close()
