"""Random actions under a rolling load: no wrong token, no preemption, no page lost. ELASTIC_SOAK_S=600 for long."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from typing import Any

import pytest

import elastic.vllm
from support.vllm_engine.engine import (
    TEXTS,
    coordinator,
    counted_preemptions,
    elastic_engine,
    sector_bytes,
)

SECONDS = float(os.environ.get("ELASTIC_SOAK_S", "20"))
LENGTHS = (8, 40, 120, 200)
LIVE = 16


class Load:
    """Requests that come as others end, some of which are aborted."""

    def __init__(self, llm: Any, reference: list[list[int]], chance: random.Random) -> None:
        self._engine = llm.llm_engine
        self._reference = reference
        self._chance = chance
        self.live: dict[str, tuple[int, int]] = {}  # request -> text, length
        self.ended = self.wrong = self._count = 0

    def refill(self) -> None:
        from vllm import SamplingParams

        while len(self.live) < LIVE:
            text, length, name = self._chance.randrange(len(TEXTS)), self._chance.choice(LENGTHS), f"q{self._count}"
            sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
            self._engine.add_request(name, {"prompt": TEXTS[text]}, sampling)
            self.live[name] = text, length
            self._count += 1

    def abort_one(self) -> None:
        name = self._chance.choice(sorted(self.live))
        del self.live[name]
        self._engine.abort_request([name])

    def step(self) -> None:
        for output in self._engine.step():
            if output.finished and output.request_id in self.live:
                text, length = self.live.pop(output.request_id)
                self.ended += 1
                self.wrong += list(output.outputs[0].token_ids) != self._reference[text][:length]


def act(llm: Any, rt: Any, chance: random.Random) -> str:
    """Do one lossless action; return its name and status."""
    what = chance.choice(("release", "restore", "resize", "resize"))
    if what == "release":
        result = rt.release(chance.sample(range(12), chance.randint(1, 5)))
    elif what == "restore":
        result = rt.restore()
    else:
        result = rt.kv.resize(chance.choice([2, 3, 5, 8]) * sector_bytes(llm) if chance.random() < 0.7 else "max")
    return f"{what} {result.status}"


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_soak(reference: list[list[int]], prefix_caching: bool) -> None:
    chance, done = random.Random(7), Counter[str]()
    with elastic_engine("20MiB", enable_prefix_caching=prefix_caching) as llm:
        rt, load = elastic.vllm.runtime(llm), Load(llm, reference, chance)
        deadline = time.monotonic() + SECONDS / 2
        with counted_preemptions(llm) as preempted:
            while time.monotonic() < deadline:
                load.refill()
                if chance.random() < 0.2:
                    done[act(llm, rt, chance)] += 1
                if chance.random() < 0.02:
                    load.abort_one()
                load.step()
                coordinator(llm).capacity.check()
            while load.live:
                load.step()
        rt.kv.resize("max")
        rt.restore()
        rt.check()
        print(f"{load.ended} requests, {load.wrong} wrong, {len(preempted)} preempted, {dict(done)}, moved", end=" ")
        print(coordinator(llm).moved_blocks)
        assert (load.wrong, preempted) == (0, [])
        assert load.ended > LIVE
        assert len(done) >= 4
