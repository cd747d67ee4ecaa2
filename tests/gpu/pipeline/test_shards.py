"""Layers that are cut, on GPUs: at rest, their parts as they leave and return, and products with some of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.functional import linear, silu

import elastic
from support.architectures import build, prompt
from support.child_process import wait_for_the_janitor
from support.cluster.joined_runtimes import joined
from support.pipeline.wide_model import GPU_PAGE, LAYERS, SHARDS, wide
from support.wrapped_model import assert_same_bits, bits

pytestmark = pytest.mark.cuda
TWO_DEVICES = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="there is one CUDA device")
HERE, EVERY = "cuda:0", range(SHARDS * LAYERS)
STOPPING = ("device_sync", "pageable_h2d", "pageable_d2h")
"""Waits for a whole device, and copies that the host waits for."""
MATRICES = 3


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=["cuda:0#b", pytest.param("cuda:1", marks=TWO_DEVICES)])
def there(request: pytest.FixtureRequest) -> str:
    """The place of a peer: on the same device, or on another one."""
    return str(request.param)


def places(name: str) -> list[elastic.Place]:
    return [elastic.Place.parse(f"{name}=256MiB")]


def two(stack: ExitStack, wrapped: Any, there: str) -> tuple[Any, Any]:
    """Two equal models that are cut, each of which reads the other's weights."""
    model = wrapped(wide(HERE), places("cuda:0#a"), shards=SHARDS)
    peer = wrapped(wide(there.split("#")[0]), places(there), shards=SHARDS)
    joined(stack, a=model.elastic, b=peer.elastic)
    return model, peer


def held_pages(rt: Any, index: int) -> int:
    (pool,) = rt.pools
    return int(pool.pages_of(f"layer:{index}"))


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("architecture", ["llama-gqa", "phi3", "gpt2"])
def test_a_model_that_is_cut_is_as_ever_and_a_decode_step_stops_no_device(
    architecture: str, shards: int, wrapped: Any, simulator: ModuleType
) -> None:
    model, inputs = build(architecture, device=HERE), prompt(2, device=HERE)
    before, expected = bits(model), model(**inputs).logits
    wrapped(model, places(HERE), shards=shards)
    assert_same_bits(model, before)
    given = model(**inputs)
    torch.testing.assert_close(given.logits, expected, rtol=1e-4, atol=1e-4)
    token = given.logits[:, -1:].argmax(-1)
    mask = torch.cat((inputs["attention_mask"], torch.ones_like(token)), dim=1)
    longer = torch.cat((mask, torch.ones_like(token)), dim=1)
    model(input_ids=token, attention_mask=mask, past_key_values=given.past_key_values)
    wait_for_the_janitor()  # which creates pages ahead of time
    counts = {name: simulator.count(name) for name in simulator.PAGE_CALLS + STOPPING}
    model(input_ids=token, attention_mask=longer, past_key_values=given.past_key_values)
    assert {name: simulator.count(name) for name in counts} == counts
    elastic.unwrap(model)
    assert torch.equal(model(**inputs).logits, expected)


def test_parts_leave_and_return_by_whole_pages_while_what_reads_them_is_queued(
    stack: ExitStack, wrapped: Any, there: str, simulator: ModuleType
) -> None:
    model, peer = two(stack, wrapped, there)
    rt, inputs, before = model.elastic, prompt(2, device=HERE), bits(model)
    (pool,) = rt.pools
    assert rt.digests(shards=EVERY) == peer.elastic.digests(shards=EVERY)
    source, expected = peer.elastic.weights_source(range(LAYERS)), model(**inputs).logits.clone()
    whole, logits = held_pages(rt, 0), []
    for gone in ((3,), (1, 2), (0, 1, 2, 4, 7)):
        logits.append(model(**inputs).logits)  # queued, and not waited for
        wait_for_the_janitor()
        counts = {name: simulator.count(name) for name in ("device_sync", "memcpy", "cuMemCreate")}
        change = rt.drop(shards=gone)
        assert {name: simulator.count(name) for name in counts} == counts  # it waits for streams, and reads nothing
        pages = MATRICES * len(gone)
        assert (change.released_bytes, change.retained_bytes, change.moved_bytes) == (pages * GPU_PAGE, 0, 0)
        assert held_pages(rt, 0) == whole - MATRICES * sum(shard < SHARDS for shard in gone)
        wait_for_the_janitor()
        pool.give_back_unused()
        rt.check()
        rt.fetch((), source, shards=gone)
        logits.append(model(**inputs).logits)
    assert all(torch.equal(each, expected) for each in logits)
    assert_same_bits(model, before)


def test_the_last_part_takes_the_rest_of_a_layer_along_and_the_first_brings_it(
    stack: ExitStack, wrapped: Any, there: str
) -> None:
    model, peer = two(stack, wrapped, there)
    rt, inputs, expected = model.elastic, prompt(2, device=HERE), model(**prompt(2, device=HERE)).logits
    rt.digests(shards=EVERY)
    for shard in range(SHARDS):
        rt.drop(shards=(shard,))
    assert (held_pages(rt, 0), rt.form()[0]) == (0, "dropped")
    rt.kv.trim()
    for shard in (2, 0, 3, 1):
        rt.fetch((), peer.elastic.weights_source(shards=(shard,)), shards=(shard,))
        assert held_pages(rt, 0) == rt.shard_pages[0].pages(rt.shards_here[0])
    assert torch.equal(model(**inputs).logits, expected)


def product(rt: Any, parts: tuple[int, ...], hidden: torch.Tensor) -> torch.Tensor:
    """What parts of the network of layer 0 add, for hidden states [tokens, hidden size]."""
    tensors = rt.weights.part_tensors(0, parts)
    runs = zip(*(tensors[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down")), strict=True)
    return sum(linear(silu(linear(hidden, gate)) * linear(hidden, up), down) for gate, up, down in runs)  # type: ignore[return-value]


def test_products_of_parts_add_up_wherever_the_others_are(stack: ExitStack, wrapped: Any, there: str) -> None:
    model, peer = two(stack, wrapped, there)
    hidden = torch.randn(7, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    expected = wide().model.layers[0].mlp(hidden)
    ranks = {(0, 1): model, (2, 3): peer}
    found = []
    for own, at in ranks.items():
        rt, here = at.elastic, hidden.to(at.device)
        others = tuple({0, 1, 2, 3} - set(own))
        rt.digests(shards=EVERY)
        found.append(product(rt, (0, 2), here) + product(rt, (1, 3), here))
        found.append(product(rt, own, here) + product(rt, others, here))
        rt.drop(shards=others)  # what is queued still reads them
        rt.kv.trim()
    halves = [product(at.elastic, own, hidden.to(at.device)).cpu() for own, at in ranks.items()]
    for each in (*found, halves[0] + halves[1]):
        torch.testing.assert_close(each.cpu(), expected, rtol=1e-4, atol=1e-4)
    for own, at in ranks.items():
        back = tuple({0, 1, 2, 3} - set(own))
        at.elastic.fetch((), ranks[back].elastic.weights_source(shards=back), shards=back)


def test_a_forward_pass_beside_parts_that_come_and_go_has_all_weights_or_none(
    stack: ExitStack, wrapped: Any, there: str
) -> None:
    model, peer = two(stack, wrapped, there)
    rt, inputs, expected = model.elastic, prompt(2, device=HERE), model(**prompt(2, device=HERE)).logits
    rt.digests(shards=EVERY)
    found: list[bool] = []
    refused: list[str] = []
    over = threading.Event()

    def compute() -> None:
        with torch.cuda.stream(torch.cuda.Stream(HERE)):
            while not over.is_set():
                try:
                    found.append(torch.equal(model(**inputs).logits, expected))
                except elastic.StateError as error:
                    refused.append(str(error))

    thread = threading.Thread(target=compute)
    torch.cuda.synchronize()
    thread.start()
    try:
        for gone in ((1,), (2, 3), (0, 1, 4, 5)):
            rt.drop(shards=gone)
            rt.fetch((), peer.elastic.weights_source(shards=gone), shards=gone)
            seen = len(found)
            while thread.is_alive() and len(found) < seen + 2:
                pass
    finally:
        over.set()
        thread.join()
    assert found
    assert all(found)
    assert all("are dropped" in words for words in refused)
