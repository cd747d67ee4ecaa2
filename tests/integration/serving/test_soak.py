"""Real clients that come and go over a real socket, while layers and the cache change under their requests."""

from __future__ import annotations

import asyncio
import copy
import random
import threading
from collections import Counter
from typing import Any

import pytest

import elastic
from elastic.engines.continuous import ContinuousEngine
from integration.serving.soak_clients import MOST, PROMPTS, Books, everyone
from support.lossless_variant import HALF, exact
from support.processes import wait_until
from support.serving.generations import continuation, same_unless_close
from support.serving.live_server import TOKENIZER, Live, empty, live
from support.serving.live_server import model as served
from support.wrapped_model import small


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


def soak(server: Live, duration_s: float, clients: int) -> tuple[Counter[str], Counter[str]]:
    seen: Counter[str] = Counter()
    did: Counter[str] = Counter()
    stop = threading.Event()
    disturber = threading.Thread(target=disturb, args=(server.engine.runtime, stop, did))

    disturber.start()
    try:
        asyncio.run(everyone(server.url, duration_s, seen, clients))
    finally:
        stop.set()
        disturber.join()
    return seen, did


@pytest.mark.parametrize(("duration_s", "clients"), [(2.0, 24), pytest.param(600.0, 64, marks=pytest.mark.long)])
def test_no_request_is_lost_repeated_or_changed(duration_s: float, clients: int) -> None:
    model = exact(copy.deepcopy(served()))
    alone = {ids: continuation(model, ids, MOST) for ids in (tuple(TOKENIZER.encode(p)) for p in PROMPTS)}
    elastic.wrap(model, places=[small(14 << 20, "cpu#soak")], variants=[HALF])
    runtime, books = model.elastic, Books()
    engine = ContinuousEngine(model, max_batch_tokens=128, block_tokens=8)
    before = {owner: size for owner, size in runtime.status().places[0].owners.items() if size}
    books.keep(engine)
    with live(engine) as server:
        seen, did = soak(server, duration_s, clients)
        wait_until(lambda: empty(engine))
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
