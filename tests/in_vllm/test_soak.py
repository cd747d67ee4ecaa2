"""Random actions under a rolling load: no wrong token, no preemption, no page lost."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import pytest

import elastic.vllm
from support.vllm_engine.engine import (
    LONG_TEXTS,
    TEXTS,
    come_back,
    coordinator,
    counted_preemptions,
    elastic_engine,
    plain_engine,
    run,
    sector_bytes,
)

LENGTHS = (8, 40, 120, 200)
LIVE = 16
PROMPTS = [*TEXTS, *LONG_TEXTS]


class Load:
    """Requests that come as others end, some of which are aborted, and some of which begin alike."""

    def __init__(self, llm: Any, plain: list[list[int]], chance: random.Random) -> None:
        self._engine = llm.llm_engine
        self._plain = plain
        self._chance = chance
        self.live: dict[str, tuple[int, int]] = {}  # request -> text, length
        self.mixed: set[str] = set()
        """Requests of which packed layers computed some."""
        self.ended = self.compared = self.wrong = self.shared = self._count = 0

    def refill(self, *, packed: bool) -> None:
        """Have as many requests live as may; `packed`: whether a layer is."""
        from vllm import SamplingParams

        while len(self.live) < LIVE:
            text, name = self._chance.randrange(len(PROMPTS)), f"q{self._count}"
            length = self._chance.choice(LENGTHS if text < len(TEXTS) else LENGTHS[:-1])
            sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
            self._engine.add_request(name, {"prompt": PROMPTS[text]}, sampling)
            self.live[name] = text, length
            self._count += 1
        if packed:
            self.mixed.update(self.live)

    def abort_one(self) -> None:
        name = self._chance.choice(sorted(self.live))
        del self.live[name]
        self._engine.abort_request([name])

    def step(self) -> None:
        for output in self._engine.step():
            if output.finished and output.request_id in self.live:
                text, length = self.live.pop(output.request_id)
                tokens = list(output.outputs[0].token_ids)
                self.ended += 1
                self.shared += output.num_cached_tokens > 0
                if output.request_id in self.mixed:
                    assert len(tokens) == length
                    continue
                self.compared += 1
                self.wrong += tokens != self._plain[text][:length]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """Tokens of vLLM without elastic, for each of the prompts."""
    with plain_engine() as llm:
        return run(llm, [LENGTHS[-1]] * len(TEXTS) + [LENGTHS[-2]] * len(LONG_TEXTS), texts=PROMPTS)


def act(llm: Any, rt: Any, chance: random.Random) -> str:
    """Do one action; return its name and status."""
    what = chance.choices(("release", "restore", "resize", "swap"), (6, 12, 12, 1))[0]
    layers = chance.sample(range(12), chance.randint(1, 5))
    if what == "release":
        result = rt.release(layers)
    elif what == "restore":
        result = rt.restore()
    elif what == "swap":
        result = rt.swap(layers, "int4")
    else:
        result = rt.kv.resize(chance.choice([2, 3, 5, 8]) * sector_bytes(llm) if chance.random() < 0.7 else "max")
    return f"{what} {result.status}"


@pytest.mark.parametrize("prefix_caching", [False, True], ids=["", "prefixes"])
@pytest.mark.parametrize("seconds", [10, pytest.param(600, marks=pytest.mark.long)])
def test_soak(plain: list[list[int]], seconds: int, prefix_caching: bool) -> None:
    chance, done = random.Random(7), Counter[str]()
    with elastic_engine("20MiB", enable_prefix_caching=prefix_caching) as llm:
        rt, load = elastic.vllm.runtime(llm), Load(llm, plain, chance)
        deadline = time.monotonic() + seconds
        with counted_preemptions(llm) as preempted:
            while time.monotonic() < deadline:
                if chance.random() < 0.2:
                    done[act(llm, rt, chance)] += 1
                load.refill(packed="int4" in rt.form())
                if chance.random() < 0.02:
                    load.abort_one()
                load.step()
                coordinator(llm).capacity.check()
            while load.live:
                load.step()
        rt.kv.resize("max")
        rt.restore()
        come_back(rt)
        rt.check()
        moved = coordinator(llm).moved_blocks
        print(f"{load.ended} requests, {load.compared} compared, {load.shared} shared, {dict(done)}, {moved} moved")
        assert (load.wrong, preempted) == (0, [])
        assert {"release applied", "restore applied", "swap applied"} <= set(done)
        assert load.ended > load.compared > LIVE, "some were computed by packed layers, some were not"
        assert moved > 0
        assert bool(load.shared) == prefix_caching
        assert sum(done.values()) >= 2 * seconds
