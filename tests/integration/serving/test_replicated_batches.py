"""Requests of a running batch are shared out between replicas; the same tokens, whatever comes and goes meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic
from elastic import CapacityError
from elastic.engines.base import Request
from elastic.engines.continuous import ContinuousEngine
from elastic.engines.executor.attention import BlockAttention
from elastic.hooks.replicas.load_balance import ThroughputEstimator
from laws.machine_process import run_machine
from support import architectures
from support.lossless_variant import HALF, exact
from support.serving.generations import SERVED, Collector, Continuation, continuation, prompts, same_unless_close, serve
from support.wrapped_model import PAGE, small

LENGTHS = [1, 7, 8, 9, 40, 70, 130]
MACHINE = Path(__file__).parents[2] / "laws" / "replica_machine.py"


@pytest.fixture
def engines() -> Iterator[Any]:
    """engine(model, wrap options), started, at three places; stopped and unwrapped when the test ends."""
    made: list[ContinuousEngine] = []

    def engine(model: Any, *, budget: int = 8 << 20, wrap: Any = None, **options: Any) -> ContinuousEngine:
        if getattr(model, "elastic", None) is None:
            places = [small(budget if label == "b" else 8 << 20, f"cpu#{label}") for label in "abc"]
            elastic.wrap(model, places=places, **(wrap or {}))
        made.append(ContinuousEngine(model, **{"block_tokens": 8, "max_batch_tokens": 64, **options}))
        made[-1].start()
        return made[-1]

    yield engine
    for each in made:
        each.stop(drain=False)
        if each.runtime.state.value != "closed":
            each.runtime.check()
            elastic.unwrap(each._model)


def at(rt: Any, place: str) -> list[int]:
    """The layers that have a replica there."""
    return [i for i, there in enumerate(rt.status().residencies.values()) if place in [r.place for r in there[1:]]]


def owners(rt: Any, place: int) -> dict[str, int]:
    return {owner: size for owner, size in rt.status().places[place].owners.items() if size and owner != "kv"}


def right(model: Any, request: Request, got: list[int], expected: list[int] | Continuation) -> bool:
    return got == expected or same_unless_close(model, request.prompt, got)


@pytest.mark.parametrize("name", sorted(SERVED))
def test_replicas_come_and_go_while_requests_of_all_lengths_are_served(name: str, engines: Any) -> None:
    model, choose = architectures.build(name), random.Random(name)
    asked = prompts(LENGTHS, architectures.VOCAB)
    engine = engines(model)
    rt, heard, requests = engine.runtime, Collector(), [Request(p, 12) for p in asked]
    rt.replicate([0, 2], "cpu#b")
    for request in requests:
        engine.submit(request, heard)
    for tokens in (1, 2, 4, 6, 8, 10):
        heard.wait_for_tokens(requests[0].id, tokens)
        place = choose.choice(["cpu#b", "cpu#c"])
        there = at(rt, place)
        if there and choose.random() < 0.5:
            rt.evict(choose.sample(there, choose.randint(1, len(there))), place)
        else:
            rt.replicate(choose.sample(range(3), choose.randint(1, 3)), place)
        assert [pool.used_bytes for pool in rt.status().kv][1:] == [0, 0], "no KV leaves its place"
    heard.wait([request.id for request in requests])
    assert {end.finish for end in heard.ends.values()} == {"length"}
    assert any(len(parts) > 1 for parts in rt.passes())
    for place in ("cpu#b", "cpu#c"):
        if at(rt, place):
            rt.evict(at(rt, place), place)
    assert (owners(rt, 1), owners(rt, 2)) == ({}, {})
    plain = architectures.build(name)
    for request in requests:
        assert len(heard.tokens[request.id]) == 12
        assert same_unless_close(plain, request.prompt, heard.tokens[request.id])


def test_one_request_goes_to_the_best_place_and_several_are_shared_out(engines: Any, monkeypatch: Any) -> None:
    model = architectures.build("llama-gqa")
    asked = prompts([12, 12, 12], architectures.VOCAB)
    expected = [continuation(model, p, 12) for p in asked]
    engine = engines(model)
    rt = engine.runtime
    rt.replicate(range(3), "cpu#b")
    rt.replicate(range(3), "cpu#c")
    monkeypatch.setattr(ThroughputEstimator, "best_alone", lambda self, places, present=None: len(rt.passes()) % 3)
    alone = Request(asked[0], 12)
    assert serve(engine, [alone]).tokens[alone.id] == expected[0]
    assert all(len(parts) == 1 for parts in rt.passes())
    assert {parts[0].place for parts in rt.passes()} >= {"cpu#b", "cpu#c"}
    requests = [Request(p, 12) for p in asked]
    heard = serve(engine, requests)
    assert [heard.tokens[r.id] for r in requests] == expected
    shared = [[(p.place, p.rows, p.layers) for p in parts] for parts in rt.passes()]
    assert [("cpu#a", 1, 3), ("cpu#b", 1, 3), ("cpu#c", 1, 3)] in shared  # the first may end a step before the others


def test_places_attend_at_the_same_time(engines: Any, monkeypatch: Any) -> None:
    model = architectures.build("gemma3")
    asked = prompts([70, 30], architectures.VOCAB)
    expected = [continuation(model, p, 12) for p in asked]
    engine = engines(model)
    engine.runtime.replicate(range(3), "cpu#b")
    both, real, met, sizes = threading.Barrier(2), BlockAttention.attend, [], [0]
    model.register_forward_pre_hook(lambda m, a, k: sizes.append(len(k["paged_cache"].new_tokens())), with_kwargs=True)

    def attend(*args: Any) -> torch.Tensor:
        if sizes[-1] == 2:
            both.wait(timeout=60)  # breaks, and fails the requests, if one place waits for the other
            met.append(threading.get_ident())
        return real(*args)

    monkeypatch.setattr(BlockAttention, "attend", attend)
    requests = [Request(p, 12) for p in asked]
    heard = serve(engine, requests)
    assert all(right(model, r, heard.tokens[r.id], e) for r, e in zip(requests, expected, strict=True))
    assert len(set(met)) == 2


def test_requests_that_share_a_beginning_are_computed_at_several_places(engines: Any) -> None:
    model = architectures.build("llama-gqa")
    common = prompts([64], architectures.VOCAB)[0]
    asked = [common + tail for tail in prompts([5, 9, 12], architectures.VOCAB, seed=2)]
    expected = [continuation(model, p, 8) for p in asked]
    engine = engines(model)
    engine.runtime.replicate(range(3), "cpu#b")
    serve(engine, [Request(common, 4)])
    requests = [Request(p, 8) for p in asked]
    heard = serve(engine, requests)
    assert [heard.tokens[r.id] for r in requests] == expected


def test_an_engine_begins_and_ends_with_replicas_that_are_there(engines: Any) -> None:
    model = architectures.build("gemma3")
    elastic.wrap(model, places=[small(8 << 20, f"cpu#{label}") for label in "ab"])
    asked = prompts([30, 9], architectures.VOCAB)
    expected = [continuation(model, p, 8) for p in asked]
    model.elastic.replicate([0, 1], "cpu#b")
    engine = engines(model)
    requests = [Request(p, 8) for p in asked]
    heard = serve(engine, requests)
    engine.stop()
    assert all(right(model, r, heard.tokens[r.id], e) for r, e in zip(requests, expected, strict=True))
    assert model.elastic.replicated == (0, 1)
    assert torch.is_tensor(model(torch.tensor([[3, 4], [5, 6]])).logits)  # shares out rows again


def test_a_replica_finds_no_room_and_is_added_when_there_is_some(engines: Any) -> None:
    model = architectures.build("llama-gqa")
    prompt = prompts([30], architectures.VOCAB)[0]
    expected = Continuation(architectures.plain("llama-gqa"), prompt, 60)
    engine = engines(model, budget=12 * PAGE)
    heard, requests = Collector(), [Request(prompt, 60) for _ in range(2)]
    for request in requests:
        engine.submit(request, heard)
    heard.wait_for_tokens(requests[0].id, 10)
    with pytest.raises(CapacityError, match="cpu#b has no room"):
        engine.runtime.replicate(range(3), "cpu#b")
    assert engine.runtime.replicate(range(3), "cpu#c").layers == (0, 1, 2)
    heard.wait([request.id for request in requests])
    assert [heard.tokens[r.id] for r in requests] == [expected] * 2


def test_a_replica_that_fails_ends_the_requests_in_its_batch_and_no_other(engines: Any, monkeypatch: Any) -> None:
    model = architectures.build("llama-gqa")
    asked = prompts([12, 20], architectures.VOCAB)
    expected = [continuation(model, p, 8) for p in asked]
    engine = engines(model)
    engine.runtime.replicate(range(3), "cpu#b")
    replica = engine.runtime.forward.interceptors[1][-1]._group.replicas[1]["cpu#b"].copy.module.mlp
    with monkeypatch.context() as patch:
        patch.setattr(replica, "forward", lambda *args: (_ for _ in ()).throw(ValueError("broken")))
        requests = [Request(p, 8) for p in asked]
        heard = serve(engine, requests)
    assert {(heard.ends[r.id].finish, heard.ends[r.id].error) for r in requests} == {("failed", "broken")}
    assert engine.runtime.kv.used_bytes == 0
    requests = [Request(p, 8) for p in asked]
    heard = serve(engine, requests)
    assert [heard.tokens[r.id] for r in requests] == expected


def test_replicas_are_in_the_variant_of_layers_that_were_swapped_while_serving(engines: Any) -> None:
    model = exact(architectures.build("llama-gqa"))
    asked = prompts([30, 8, 17], architectures.VOCAB)
    expected = [Continuation(exact(architectures.build("llama-gqa")), p, 80) for p in asked]
    engine = engines(model, wrap={"variants": [HALF]})
    rt, heard, requests = engine.runtime, Collector(), [Request(p, 80) for p in asked]
    for request in requests:
        engine.submit(request, heard)
    steps = [
        lambda: rt.swap([0, 2], "half"),
        lambda: rt.replicate([0, 1, 2], "cpu#b"),
        lambda: rt.evict([0], "cpu#b"),
        lambda: rt.restore([0]),
        lambda: rt.migrate(0, "cpu#c", kv=False),
        lambda: rt.replicate([0], "cpu#b"),
    ]
    for i, step in enumerate(steps):
        heard.wait_for_tokens(requests[0].id, 5 + 5 * i)
        step()
    heard.wait([request.id for request in requests])
    assert [right(model, r, heard.tokens[r.id], e) for r, e in zip(requests, expected, strict=True)] == [True] * 3


@pytest.mark.parametrize("variant", ["int4", "2:4"])
def test_replicas_of_packed_layers_serve(variant: str, engines: Any) -> None:
    model = architectures.build("llama-gqa")
    engine = engines(model, wrap={"variants": (variant,)})
    engine.runtime.swap([0, 1], variant)
    engine.runtime.replicate(range(3), "cpu#b")
    requests = [Request(p, 20) for p in prompts(LENGTHS, architectures.VOCAB)]
    heard = serve(engine, requests)
    assert any(len(parts) > 1 for parts in engine.runtime.passes())
    engine.runtime.evict(range(3), "cpu#b")
    for request in requests:
        assert same_unless_close(model, request.prompt, heard.tokens[request.id], close=1e-2)


def test_the_model_generates_beside_its_engine_with_replicas(engines: Any) -> None:
    model = architectures.build("llama-gqa")
    asked = prompts([20, 20, 20], architectures.VOCAB)
    expected = [Continuation(architectures.plain("llama-gqa"), p, 30) for p in asked]
    engine = engines(model)
    engine.runtime.replicate(range(3), "cpu#b")
    heard, requests = Collector(), [Request(p, 30) for p in asked]
    for request in requests:
        engine.submit(request, heard)
    ids = torch.tensor(asked)
    out = model.generate(ids, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert out[:, 20:].tolist() == expected
    heard.wait([request.id for request in requests])
    assert [heard.tokens[r.id] for r in requests] == expected


def test_nothing_is_left_when_engine_and_replicas_are_gone(engines: Any) -> None:
    model = architectures.build("llama-gqa")
    before = threading.active_count()
    engine = engines(model)
    rt = engine.runtime
    held, capacity = [owners(rt, i) for i in range(3)], [kv.capacity_bytes for kv in rt.status().kv]
    rt.replicate(range(3), "cpu#b")
    serve(engine, [Request(p, 20) for p in prompts([50] * 10, architectures.VOCAB)])
    rt.evict(range(3), "cpu#b")
    engine.stop()
    rt.kv.trim()
    assert [owners(rt, i) for i in range(3)] == held
    assert [kv.capacity_bytes for kv in rt.status().kv] == capacity
    elastic.unwrap(model)
    assert threading.active_count() <= before


@pytest.mark.cuda
@pytest.mark.parametrize("there", ["cuda:0#b", "cpu"])
def test_replicas_serve_on_a_gpu_and_beside_it(there: str, wrapped: Any) -> None:
    model = architectures.build("llama-gqa", device="cuda:0")
    places = [elastic.Place(name, torch.device(name.split("#")[0]), 1 << 30) for name in ("cuda:0#a", there)]
    wrapped(model, places)
    model.elastic.replicate([0, 2], there)
    with ContinuousEngine(model, block_tokens=8, max_batch_tokens=64) as engine:
        requests = [Request(p, 20) for p in prompts(LENGTHS, architectures.VOCAB)]
        heard = serve(engine, requests)
    for request in requests:
        assert len(heard.tokens[request.id]) == 20
        assert same_unless_close(model, request.prompt, heard.tokens[request.id], close=1e-2)


def test_the_laws_hold_while_an_engine_serves_with_replicas() -> None:
    run_machine(MACHINE, "--examples", "4", "--steps", "20", timeout=240)


@pytest.mark.long
def test_the_laws_hold_while_an_engine_serves_with_replicas_for_long() -> None:
    run_machine(MACHINE, "--examples", "60", "--random", timeout=1800)
