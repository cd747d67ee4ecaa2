"""Real clients that come and go over a real socket, while layers and the cache change under their requests."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

import elastic
from elastic.engines.base import Listener, Output, Request
from elastic.engines.continuous import ContinuousEngine
from support.lossless_variant import HALF, exact
from support.serving.generations import continuation, same_unless_close
from support.serving.live_server import MODEL_DIR, TOKENIZER, Live, body, empty, live, texts, until
from support.wrapped_model import small

CLIENTS = 64
MOST = 48
LINES = ("import os\n", "x = 1\n", "def f(a):\n")
PROMPTS = [f"# {name}\n" + line * 6 for name in ("one", "two", "three") for line in LINES]


@dataclass
class Books:
    """All that the engine was asked for, and what it told."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)

    def keep(self, engine: Any) -> None:
        submit = engine.submit

        def noted(request: Request, listener: Listener) -> None:
            def hear(output: Output) -> None:
                assert output.request not in self.ends, "news after the end"
                self.tokens[output.request].extend(output.tokens)
                if output.finish:
                    self.ends[output.request] = output.finish
                listener(output)

            self.prompts[request.id], self.tokens[request.id] = request.prompt, []
            submit(request, hear)

        engine.submit = noted


async def client(http: httpx.AsyncClient, seed: int, until_s: float, seen: Counter[str]) -> None:
    rng = random.Random(seed)
    while time.monotonic() < until_s:
        leave_after = rng.randrange(12) if rng.random() < 0.3 else None
        asked = body(rng.choice(PROMPTS), rng.choice([8, 24, MOST]), stream=True)
        pieces = 0
        async with http.stream("POST", "/v1/completions", json=asked) as response:
            assert response.status_code == 200
            if leave_after != 0:
                async for _ in texts(response):
                    pieces += 1
                    if pieces == leave_after:
                        break
        seen["left" if leave_after is not None else "read"] += 1


def disturb(runtime: Any, stop: threading.Event, did: Counter[str]) -> None:
    """Swaps, restores, releases and resizes, every few steps."""
    rng = random.Random(3)
    layers = runtime.status().layers
    while not stop.wait(rng.uniform(0.0, 0.06)):
        kind = rng.choice(["swap", "swap", "restore", "resize", "resize", "release"])
        some = rng.sample(range(layers), rng.randint(1, 4))
        if kind == "resize":
            size = int(runtime.kv.maximum_bytes * rng.uniform(0.4, 1.0))
            try:
                did[runtime.kv.resize(size).status] += 1
            except elastic.CapacityError:  # a layer that waited has taken pages meanwhile
                assert size > runtime.kv.maximum_bytes
                did["too late"] += 1
        elif kind == "swap":
            did[f"swap {runtime.swap(some, 'half').status}"] += 1
        elif kind == "restore":
            did[f"restore {runtime.restore(some).status}"] += 1
        else:
            did[f"release {runtime.release(some[:1]).status}"] += 1


def soak(server: Live, duration_s: float) -> tuple[Counter[str], Counter[str]]:
    seen: Counter[str] = Counter()
    did: Counter[str] = Counter()
    stop = threading.Event()
    disturber = threading.Thread(target=disturb, args=(server.engine.runtime, stop, did))

    async def everyone() -> None:
        end = time.monotonic() + duration_s
        async with httpx.AsyncClient(
            base_url=server.url, limits=httpx.Limits(max_connections=None), timeout=60
        ) as http:
            await asyncio.gather(*(client(http, seed, end, seen) for seed in range(CLIENTS)))

    disturber.start()
    try:
        asyncio.run(everyone())
    finally:
        stop.set()
        disturber.join()
    return seen, did


@pytest.mark.parametrize("duration_s", [6.0, pytest.param(600.0, marks=pytest.mark.long)])
def test_no_request_is_lost_repeated_or_changed(duration_s: float) -> None:
    model = exact(AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval().requires_grad_(False))
    alone = {ids: continuation(model, ids, MOST) for ids in (tuple(TOKENIZER.encode(p)) for p in PROMPTS)}
    elastic.wrap(model, places=[small(14 << 20, "cpu#soak")], variants=[HALF])
    runtime, books = model.elastic, Books()
    engine = ContinuousEngine(model, max_batch_tokens=128, block_tokens=8)
    before = {owner: size for owner, size in runtime.status().places[0].owners.items() if size}
    books.keep(engine)
    with live(engine) as server:
        seen, did = soak(server, duration_s)
        until(lambda: empty(engine))
        traffic = engine.counters.read()
    engine.stop()
    runtime.kv.resize(runtime.kv.maximum_bytes)
    assert runtime.restore().status == "applied"
    runtime.kv.trim()
    runtime.check()
    assert {owner: size for owner, size in runtime.status().places[0].owners.items() if size} == before
    elastic.unwrap(model)

    assert books.ends.keys() == books.prompts.keys()
    assert Counter(books.ends.values()) == {"length": traffic.completed, "cancelled": traffic.cancelled}
    assert (traffic.failed, traffic.rejected, traffic.preemptions) == (0, 0, 0)
    assert traffic.arrived == traffic.completed + traffic.cancelled == seen.total()
    assert traffic.completed >= seen["read"]
    for name, tokens in books.tokens.items():
        expected = alone[books.prompts[name]][: len(tokens)]
        assert tokens == expected or same_unless_close(model, books.prompts[name], tokens)
    assert sum(count for kind, count in did.items() if kind.startswith("swap")) > 3, did
