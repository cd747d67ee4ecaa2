"""Kernels and copies that are still queued when their pages are wanted elsewhere, and who waits for them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import elastic
from elastic.hooks.forward_gate import ForwardGate
from elastic.kvcache.layers.elastic_layer import ElasticLayer
from elastic.kvcache.manager import KVMemory
from elastic.kvcache.storage.layout import TOKEN_MAJOR
from elastic.kvcache.storage.pool import KVPool
from elastic.kvcache.transfer import KVTransfer
from elastic.memory.backends import streams
from elastic.memory.backends.cuda import CudaBackend
from elastic.memory.copy_engine import StreamCopyEngine
from elastic.memory.pages.background import janitor
from elastic.memory.pages.page_pool import PagePool
from elastic.memory.rate_limit import RateLimiter
from elastic.types import ResizeKV
from support.architectures import build, prompt
from support.child_process import wait_for_the_janitor
from support.wrapped_model import assert_same_bits, bits

pytestmark = pytest.mark.cuda
DEVICE = torch.device("cuda:0")
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
TOKENS = 8
"""In a page."""


def new_memory(pages: int = 64) -> tuple[KVMemory, KVPool]:
    janitor.start()
    backend = CudaBackend(DEVICE)
    pool = PagePool("cuda:0#test", backend, pages * backend.page_bytes, ready_pages=0)
    kv = KVPool(pool, pages * backend.page_bytes, idle_share=1.0, ready_share=0)
    return KVMemory([(kv, TOKEN_MAJOR)], 1 << 16), kv


def append(layer: ElasticLayer, tokens: int, kv: KVPool) -> tuple[torch.Tensor, torch.Tensor]:
    dim = kv.pool.page_bytes // TOKENS // 4
    return layer.update(*torch.ones(2, 1, 1, tokens, dim, device=DEVICE).unbind())


@pytest.mark.parametrize("side", [False, True])
def test_a_retained_page_is_unmapped_when_what_reads_it_is_over(
    side: bool, wrapped: Any, simulator: ModuleType
) -> None:
    model = build("llama-gqa", device="cuda:0")
    rt = wrapped(model).elastic
    model(**prompt(2, device="cuda:0"))
    kept = [parameter.detach() for parameter in model.model.layers[0].parameters()]
    expected = float(sum((weight * 2).sum() for weight in kept))
    rt.release([0])
    assert sum(place.owners.get("retained", 0) for place in rt.status().places)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream(DEVICE) if side else torch.cuda.current_stream(DEVICE)):
        total = sum((weight * 2).sum() for weight in kept)
        del kept
        gc.collect()
        wait_for_the_janitor()
        assert float(total) == expected
    assert not sum(place.owners.get("retained", 0) for place in rt.status().places)


def test_a_window_slides_on_without_waiting_for_the_device(simulator: ModuleType) -> None:
    memory, kv = new_memory()
    layer = ElasticLayer(memory, sliding_window=TOKENS + 1)
    append(layer, 2 * TOKENS, kv)
    torch.cuda.synchronize()
    waits = [simulator.count(name) for name in ("device_sync", "stream_sync", "event_sync")]
    seen = []
    for _ in range(6 * TOKENS):
        keys, _ = append(layer, 1, kv)
        seen.append(keys.sum())
        del keys
    assert [simulator.count(name) for name in ("device_sync", "stream_sync", "event_sync")] == waits
    assert [float(total) for total in seen] == [float(TOKENS + 1) * kv.pool.page_bytes / TOKENS / 4] * len(seen)
    for _ in range(2 * TOKENS + 2):  # with the host as slow as the device
        append(layer, 1, kv)
        torch.cuda.current_stream().synchronize()
    assert simulator.count("device_sync") == waits[0]
    assert layer.pages <= 2 * 3
    del layer
    kv.close()
    kv.pool.close()


def test_a_window_that_was_moved_back_keeps_what_it_reads_again(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, kv = new_memory()
    layer = ElasticLayer(memory)
    append(layer, 4 * TOKENS, kv)
    store = layer.held().lease.store  # type: ignore[union-attr]
    store.keep(2 * TOKENS, 4 * TOKENS)
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda.Event, "query", lambda event: False)
        assert not store.slide()
    store.keep(0, 4 * TOKENS)
    again = layer.views()[0].sum()
    store.keep(3 * TOKENS, 4 * TOKENS)
    store.slide()
    assert float(again) == 4 * kv.pool.page_bytes / 4
    torch.cuda.synchronize()
    store.slide()
    assert layer.pages == 2
    layer.give_up()
    kv.close()
    kv.pool.close()


def test_a_cache_that_changes_streams_is_ordered_and_nobody_waits(wrapped: Any, simulator: ModuleType) -> None:
    model, inputs = build("llama-gqa", device="cuda:0"), prompt(2, device="cuda:0")
    tokens = model.generate(**inputs, **GREEDY)
    wrapped(model)
    streams = [torch.cuda.default_stream(DEVICE), torch.cuda.Stream(DEVICE), torch.cuda.Stream(DEVICE)]
    model(**inputs)
    torch.cuda.synchronize()
    waits, ids, cache = simulator.count("device_sync"), [], None
    mask, last = inputs["attention_mask"], inputs["input_ids"]
    for i in range(6):
        before = streams[(i - 1) % 3] if i else torch.cuda.default_stream(DEVICE)
        with torch.cuda.stream(streams[i % 3]):
            streams[i % 3].wait_stream(before)  # of what the caller gives; the cache sees to its own
            out = model(last, attention_mask=mask, past_key_values=cache)
            cache, last = out.past_key_values, out.logits[:, -1:].argmax(-1)
            mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
            ids.append(last)
    torch.cuda.current_stream().wait_stream(streams[2])
    assert simulator.count("device_sync") == waits
    assert torch.equal(torch.cat(ids, 1), tokens[:, -6:])


def test_idle_stores_on_another_stream_are_ordered_after_their_last_user(simulator: ModuleType) -> None:
    memory, kv = new_memory()
    layer, side = ElasticLayer(memory), torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(side):
        total = append(layer, 2 * TOKENS, kv)[0].sum()
    layer.give_up()
    waits = simulator.count("device_sync")
    layer = ElasticLayer(memory)
    again = append(layer, 2 * TOKENS, kv)[0].mul_(3).sum()
    assert simulator.count("device_sync") == waits
    side.synchronize()
    assert float(total) == 2 * kv.pool.page_bytes / 4
    assert float(again) == 6 * kv.pool.page_bytes / 4
    layer.give_up()
    kv.close()
    kv.pool.close()


def test_no_commit_and_no_forward_pass_waits_for_the_device(
    wrapped: Any, simulator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    exclusive = ForwardGate.exclusive

    @contextmanager
    def counted(gate: ForwardGate) -> Iterator[float]:
        with exclusive(gate) as waited_s:
            before = simulator.count("device_sync")
            try:
                yield waited_s
            finally:
                waits.append(simulator.count("device_sync") - before)

    def forward() -> torch.Tensor:
        before = simulator.count("device_sync")
        logits = model(**inputs).logits
        waits.append(simulator.count("device_sync") - before)
        return logits

    monkeypatch.setattr(ForwardGate, "exclusive", counted)
    places = [elastic.Place(f"cuda:0#{label}", DEVICE, 1 << 30) for label in "ab"]
    model, inputs = build("llama-gqa", device="cuda:0"), prompt(2, device="cuda:0")
    expected = model(**inputs).logits
    rt = wrapped(model, places, variants=["int8"]).elastic
    for action in (
        lambda: rt.swap([0], "int8"),
        lambda: rt.restore([0]),
        lambda: rt.release([1]),
        lambda: rt.restore([1]),
        lambda: rt.migrate([2], "cuda:0#b"),
        lambda: rt.migrate([2], "cuda:0#a"),
        lambda: rt.apply([ResizeKV("cuda:0#a", 64 << 20)]),
        lambda: rt.kv.resize("max"),
    ):
        action()
        forward()
    monkeypatch.setattr("elastic.actions.swap.SwapHandler.commit", fail)
    with pytest.raises(elastic.StateError, match="refused"):
        rt.swap([0], "int8")
    monkeypatch.undo()
    assert torch.equal(forward(), expected)
    assert len(waits) >= 18
    assert not any(waits)


def fail(handler: Any, prepared: Any) -> None:
    raise elastic.StateError("refused")


def test_pages_go_to_torch_when_it_has_run_out_of_memory(
    wrapped: Any, simulator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = build("llama-gqa", device="cuda:0"), prompt(2, device="cuda:0")
    expected = model(**inputs).logits
    wrapped(model)
    model.generate(**inputs, **GREEDY)  # its cache is idle now
    assert sum(kv.idle_bytes for kv in model.elastic.status().kv)
    act = model.model.layers[1].mlp.act_fn
    with monkeypatch.context() as patched:
        patched.setattr(act, "forward", lambda x: x + torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE))
        with pytest.raises(torch.OutOfMemoryError) as error:
            model(**inputs)
    assert "Elastic has now given back" in error.value.__notes__[0]
    status = model.elastic.status()
    assert not any([*(kv.idle_bytes for kv in status.kv), *(place.parked_bytes for place in status.places)])
    assert torch.equal(model(**inputs).logits, expected)


def test_a_view_of_a_cache_that_is_gone_keeps_its_pages_until_what_reads_it_is_over(simulator: ModuleType) -> None:
    memory, kv = new_memory()
    layer, side = ElasticLayer(memory), torch.cuda.Stream(DEVICE)
    keys, _ = append(layer, 2 * TOKENS, kv)
    del layer, _
    gc.collect()
    assert kv.status().retained_bytes
    torch.cuda.synchronize()
    with torch.cuda.stream(side):  # of which Elastic does not know
        total = keys.sum()
        del keys
    wait_for_the_janitor()
    wait_for_the_janitor()
    assert not kv.status().retained_bytes
    kv.trim()
    side.synchronize()
    assert float(total) == 2 * kv.pool.page_bytes / 4
    kv.close()
    kv.pool.close()


def test_what_unwrap_copies_out_on_a_stream_of_its_callers_is_there(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_used", {})  # torch deals out the same 32 again and again
    model, inputs = build("llama-gqa", device="cuda:0"), prompt(2, device="cuda:0")
    before, expected = bits(model), model(**inputs).logits
    rt = elastic.wrap(model, places=["cuda:0=256MiB"], variants=["int8"]).elastic
    rt.swap([0], "int8")
    rt.release([1])
    cache = model(**inputs, use_cache=True).past_key_values
    held = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    torch.cuda.synchronize()
    side = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(side):  # of which Elastic does not know
        elastic.unwrap(model)
    side.synchronize()
    assert_same_bits(model, before)
    assert torch.equal(model(**inputs).logits, expected)
    for layer, (keys, values) in zip(cache.layers, held, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)


def test_beams_that_are_reordered_while_they_are_copied_elsewhere_wait_for_the_copy(simulator: ModuleType) -> None:
    """And the next copy waits for them: what it reads is all of the new order."""
    _, there = new_memory()
    here = KVPool(PagePool("cuda:0#here", CudaBackend(DEVICE), 64 << 21, ready_pages=0), 64 << 21)
    memory = KVMemory([(here, TOKEN_MAJOR), (there, TOKEN_MAJOR)], 1 << 16, [here])
    layer = ElasticLayer(memory, 0)
    rows = torch.arange(2 * 2 * 40 * 8, device=DEVICE, dtype=torch.float32).view(2, 2, 40, 8)
    layer.update(rows, -rows)
    engine, swapped = StreamCopyEngine(DEVICE), torch.tensor([1, 0], device=DEVICE)

    class Reordering(StreamCopyEngine):
        """Beams are reordered between the issue of a copy and its end."""

        def __init__(self) -> None: ...

        def copy(self, *args: Any) -> Any:
            handle = engine.copy(*args)
            finish = handle.finish

            def reorder_and_finish() -> None:
                layer.reorder_cache(swapped)
                finish()

            return SimpleNamespace(event=handle.event, finish=reorder_and_finish)

    transfer = KVTransfer(memory, there)
    transfer.sync(layer, lambda source: Reordering(), RateLimiter())
    transfer.sync(layer, lambda source: engine, RateLimiter())
    transfer.cut_over(layer)
    assert layer.is_on(there)
    assert torch.equal(layer.keys, rows.flip(0))
    assert torch.equal(layer.values, -rows.flip(0))
    assert simulator.violations() == []
    transfer.finish()
    layer.give_up()
    engine.close()
    for pool in (here, there):
        pool.close()
        pool.pool.close()
