"""A fleet's own process that is killed at a random point leaves nothing; one that stands still loses nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from elastic.assets import MODEL_DIR
from support.isolation.named_memory import NamedMemory
from support.processes import wait_until
from support.serving.generations import prompts, same_unless_close

PROMPTS = prompts([5, 40, 90, 200, 33, 64], 1000)
MARK = "ELASTIC_TEST_MARK"
"""An environment variable by which all that a fleet has started is found."""
FLEET = f"""
    import json, random, sys, threading
    from elastic.assets import MODEL_DIR
    from elastic.cluster.fleet.fleet import Fleet
    from elastic.engines.base import Request
    from support.serving.generations import Collector

    PROMPTS = {PROMPTS!r}

    if __name__ == "__main__":
        fleet = Fleet(str(MODEL_DIR), ranks=2, places=["cpu=48MiB"], engine={{"block_tokens": 16}}, policy="balance")
        with fleet:
            print("serving", flush=True)
            ending = threading.Event()
            threading.Thread(target=lambda: (sys.stdin.read(), ending.set()), daemon=True).start()
            heard, asked = Collector(), {{}}
            while not ending.is_set():
                batch = [Request(prompt, 100, ignore_eos=True) for prompt in PROMPTS]
                for request in batch:
                    asked[request.id] = request.prompt
                    fleet.submit(request, heard)
                heard.wait([request.id for request in batch])
            fleet.check()
        print(json.dumps([[heard.ends[name].finish, asked[name], heard.tokens[name]] for name in asked]))
"""


class Child:
    """A process with a fleet under load."""

    def __init__(self) -> None:
        self.mark, pipe = uuid.uuid4().hex, subprocess.PIPE
        self.named = NamedMemory()
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(FLEET)],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
            env=os.environ | {MARK: self.mark, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def wait_until_it_serves(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "serving\n"

    def alive(self) -> list[int]:
        """Return all processes of it that run; one that has ended and was not waited for does not."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def assert_nothing_is_left(self) -> None:
        wait_until(lambda: not self.alive(), "a process is left")
        assert self.named.left() == set()

    def end(self) -> tuple[str, str]:
        """Have it end in order; return what it says."""
        return self.process.communicate("", timeout=120)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_left_of_a_fleet_that_is_killed_at_any_point(seed: int) -> None:
    chance, child = random.Random(seed), Child()
    if seed % 4:  # else while it starts
        child.wait_until_it_serves()
    time.sleep(chance.uniform(0, 4))
    child.process.kill()
    child.process.communicate()
    child.assert_nothing_is_left()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_a_fleet_that_stands_still_loses_nothing(seed: int) -> None:
    chance, child = random.Random(1000 + seed), Child()
    child.wait_until_it_serves()
    for _ in range(3):
        time.sleep(chance.uniform(0, 1.5))
        child.process.send_signal(signal.SIGSTOP)
        time.sleep(chance.choice([0.1, 1.0, chance.uniform(2, 5)]))
        child.process.send_signal(signal.SIGCONT)
    said, errors = child.end()
    assert child.process.returncode == 0, errors
    child.assert_nothing_is_left()
    plain = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    answers = json.loads(said)
    assert len(answers) >= len(PROMPTS)
    for finish, prompt, tokens in answers:
        assert (finish, len(tokens)) == ("length", 100)
        assert same_unless_close(plain, prompt, tokens)
