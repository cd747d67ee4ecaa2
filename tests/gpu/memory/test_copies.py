"""Copies between host memory and a GPU: what is page-locked, who waits for whom, what lives how long."""

from __future__ import annotations

import gc
import logging
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import elastic
from elastic import CapacityError
from elastic.memory import copy_engine, host_store
from elastic.memory.checksum import digest
from elastic.memory.copy_engine import CopyBatch, StreamCopyEngine, ThreadHandle
from elastic.memory.host_store import HostStore, HostTensor
from elastic.memory.pinned.page_lock import is_locked
from elastic.memory.pinned.staging_ring import StagingRing, staging_bytes
from elastic.memory.rate_limit import RateLimiter
from support.architectures import build, prompt

pytestmark = pytest.mark.cuda
GPU = torch.device("cuda:0")


def keep(store: HostStore, source: torch.Tensor, **options: Any) -> HostTensor:
    return store.keep(source, digest(source), **options)


@pytest.fixture
def engine() -> Iterator[StreamCopyEngine]:
    engine = StreamCopyEngine(GPU)
    yield engine
    engine.close()


@pytest.fixture
def streamed(wrapped: Any, tmp_path: Path) -> Any:
    """streamed(checkpoint=): a model on the GPU, all of whose layers are released; with their weights in files."""

    def release(checkpoint: bool = True) -> Any:
        model = build("llama-gqa", device=GPU)
        model.save_pretrained(tmp_path)
        options = {"checkpoint": tmp_path} if checkpoint else {}
        wrapped(model, places=[elastic.Place("cuda:0", GPU, 1 << 30)], **options)
        model.elastic.release([0, 1, 2])
        return model

    return release


@pytest.fixture
def stays_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory that goes too early is a violation then, and not the end of the process."""
    maps, real = [], mmap.mmap

    def mapped(*args: Any, **kwargs: Any) -> mmap.mmap:
        maps.append(real(*args, **kwargs))
        return maps[-1]

    monkeypatch.setattr(mmap, "mmap", mapped)


def inputs() -> dict[str, torch.Tensor]:
    return {name: tensor.to(GPU) for name, tensor in prompt(2).items()}


def logits(model: Any) -> torch.Tensor:
    result: torch.Tensor = model(**inputs()).logits.cpu()
    return result


def call_until_it_fails(model: Any) -> None:
    while True:
        model(**inputs(), use_cache=False)


# -- page-locked memory


def test_a_refused_page_lock_leaves_no_error_for_the_next_kernel(
    simulator: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    store, ones = HostStore(), torch.ones(4, device=GPU)
    simulator.fail("cuMemHostRegister")
    with caplog.at_level(logging.WARNING):
        kept = keep(store, torch.rand(1000), lock=True)
    assert (ones + 1).tolist() == [2.0] * 4
    assert not is_locked(kept.tensor)
    assert "page-lock" in caplog.text


@pytest.mark.usefixtures("stays_mapped")
def test_host_memory_outlives_the_copies_from_it(simulator: ModuleType, engine: StreamCopyEngine) -> None:
    store, source, target = HostStore(), torch.rand(1 << 12), torch.empty(1 << 12, device=GPU)
    kept = keep(store, source, lock=True)
    assert is_locked(kept.tensor)
    engine.start([(target, kept.tensor)])
    del kept
    gc.collect()
    torch.cuda.synchronize()
    assert torch.equal(target.cpu(), source)


def test_host_memory_goes_when_its_copies_are_done(simulator: ModuleType, engine: StreamCopyEngine) -> None:
    store, target = HostStore(), torch.empty(1 << 12, device=GPU)
    kept = keep(store, torch.rand(1 << 12), lock=True)
    other = keep(store, torch.rand(1 << 12), lock=True)
    copy = engine.start([(target, kept.tensor)])
    del kept
    copy.finish()
    unlocked = simulator.count("cuMemHostUnregister")
    engine.start([(target, other.tensor)])
    gc.collect()
    assert simulator.count("cuMemHostUnregister") == unlocked + 1


@pytest.mark.usefixtures("stays_mapped")
def test_weights_are_written_while_their_layer_is_fetched_ahead(simulator: ModuleType, streamed: Any) -> None:
    model = streamed(checkpoint=False)
    model(**inputs())  # and at its end the first layer is on its way again
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.copy_(torch.zeros(weight.shape))
    gc.collect()
    torch.cuda.synchronize()
    plain = build("llama-gqa", device=GPU)
    plain.model.layers[0].mlp.up_proj.weight.data.zero_()
    assert torch.equal(logits(model), logits(plain))


# -- copies that fail or do not count any more


@pytest.mark.parametrize("locked", [True, False])
def test_an_engine_that_is_closed_has_copied_all(locked: bool, simulator: ModuleType) -> None:
    engine, target = StreamCopyEngine(GPU), torch.empty(1 << 16, device=GPU)
    kept = keep(HostStore(), torch.ones(1 << 16), lock=locked)
    assert is_locked(kept.tensor) == locked
    torch.cuda.synchronize()
    engine.start([(target, kept.tensor)])
    engine.close()
    del kept
    gc.collect()
    with torch.cuda.stream(torch.cuda.Stream(GPU)):
        assert set(target.tolist()) == {1.0}


def test_after_a_failed_start_nothing_is_written_any_more(simulator: ModuleType, engine: StreamCopyEngine) -> None:
    kept = keep(HostStore(), torch.ones(64), lock=True)
    target = torch.empty(64, device=GPU)
    with pytest.raises(RuntimeError, match="size"):
        engine.start([(target, kept.tensor), (torch.empty(3, device=GPU), kept.tensor[:2])])
    kept.tensor.fill_(7)
    torch.cuda.synchronize()
    assert set(target.tolist()) == {1.0}


def test_a_batch_that_is_given_up_writes_no_more(simulator: ModuleType, engine: StreamCopyEngine) -> None:
    kept, target = keep(HostStore(), torch.ones(64), lock=True), torch.empty(64, device=GPU)
    batch = CopyBatch()
    batch.handles.append(engine.copy([(target, kept.tensor)], RateLimiter()))
    batch.discard()
    kept.tensor.fill_(7)
    torch.cuda.synchronize()
    assert set(target.tolist()) == {1.0}


# -- memory that is not page-locked


@pytest.mark.parametrize("slot_bytes", [256, 1 << 14])
def test_bytes_of_any_layout_pass_through_the_ring(
    slot_bytes: int, engine: StreamCopyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StagingRing, "SLOT_BYTES", slot_bytes)
    shapes: list[tuple[int, ...]] = [(33, 7), (5,), (2, 20, 40), (30, 40), (0,), ()]
    sources = [torch.rand(shape) for shape in shapes]
    targets = [torch.empty_strided(s.shape, s.stride(), device=GPU) for s in sources[:-2]]
    targets[2] = torch.empty(2, 40, 20, device=GPU).transpose(1, 2)  # stored in another order
    targets[3] = torch.empty(30, 64, device=GPU)[:, :40]  # with gaps
    targets += [torch.empty(0, device=GPU), torch.empty((), device=GPU)]
    for _ in range(3):
        engine.start(list(zip(targets, sources, strict=True))).finish()
    assert all(torch.equal(t.cpu(), s) for t, s in zip(targets, sources, strict=True))


def test_a_copy_that_counts_no_more_is_not_read_to_its_end(
    engine: StreamCopyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StagingRing, "SLOT_BYTES", 1 << 10)
    begun, go_on, read, real = threading.Event(), threading.Event(), [], copy_engine.copy

    def slowly(target: torch.Tensor, source: torch.Tensor) -> None:
        begun.set()
        assert go_on.wait(30)
        read.append(target)
        real(target, source)

    monkeypatch.setattr(copy_engine, "copy", slowly)
    copy = engine.start([(torch.empty(1 << 12, device=GPU), torch.rand(1 << 12))])
    assert isinstance(copy, ThreadHandle)
    assert begun.wait(30)
    copy.cancelled.set()
    go_on.set()
    copy.discard()
    assert len(read) == 2, "the piece that was being read, and its way to the device"


def test_a_checkpoint_is_streamed_without_pageable_copies(simulator: ModuleType, streamed: Any) -> None:
    names = ("pageable_h2d", "pageable_d2h", "stream_sync", "device_sync")
    waits = {}
    for checkpoint in (False, True):
        model = streamed(checkpoint)
        given = inputs()
        model(**given)
        before = {name: simulator.count(name) for name in names}
        result = model(**given)
        waits[checkpoint] = {name: simulator.count(name) - before[name] for name in names}
        assert torch.equal(result.logits.cpu(), logits(build("llama-gqa", device=GPU)))
        elastic.unwrap(model)
    assert waits[True] == waits[False]
    assert waits[True]["pageable_h2d"] == waits[True]["pageable_d2h"] == 0


def test_the_memory_for_reading_ahead_is_bounded_shown_and_given_back(streamed: Any) -> None:
    model = streamed()
    assert staging_bytes() == 0
    model(**inputs())
    assert model.elastic.status().host.staging_bytes == staging_bytes() == 32 << 20
    elastic.unwrap(model)
    assert staging_bytes() == 0
    assert not any(thread.name.startswith("elastic-read") for thread in threading.enumerate())


def test_one_layer_computes_while_the_next_is_read(streamed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = streamed()
    computed, real = threading.Event(), copy_engine.copy

    def read(target: torch.Tensor, source: torch.Tensor) -> None:
        if source.data_ptr() in second:
            assert computed.wait(30), "the first layer waits until the second is read"
        real(target, source)

    first, second = (
        {kept.tensor.data_ptr() for kept in model.elastic.weights.layers[i].host_copies.values()} for i in (0, 1)
    )
    second -= first  # norms that are equal are held once
    monkeypatch.setattr(copy_engine, "copy", read)
    model.model.layers[0].mlp.register_forward_hook(lambda *_: computed.set())
    assert torch.equal(logits(model), logits(build("llama-gqa", device=GPU)))


@pytest.mark.parametrize("nth", [1, 9, 20])
def test_a_checkpoint_that_cannot_be_read_fails_one_forward_and_no_other(
    nth: int, streamed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, left, real = streamed(), nth, copy_engine.copy
    expected = logits(build("llama-gqa", device=GPU))

    def failing(target: torch.Tensor, source: torch.Tensor) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise OSError("the disk is gone")
        real(target, source)

    monkeypatch.setattr(copy_engine, "copy", failing)
    with pytest.raises(OSError, match="disk is gone"):
        call_until_it_fails(model)
    assert model.elastic.kv.used_bytes == 0
    assert torch.equal(logits(model), expected)
    model.elastic.check()


def test_host_memory_that_is_short_fails_one_forward_in_words(streamed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = streamed()
    with monkeypatch.context() as patched:

        def refuse(file: int, nbytes: int) -> None:
            raise OSError(12, "Cannot allocate memory")

        patched.setattr("elastic.memory.pinned.page_lock.mmap", SimpleNamespace(mmap=refuse))
        with pytest.raises(CapacityError, match=r"host memory is short.*restore") as caught:
            model(**inputs())
    assert caught.value.requested_bytes == 32 << 20
    assert 0 < caught.value.free_bytes <= caught.value.total_bytes
    assert torch.equal(logits(model), logits(build("llama-gqa", device=GPU)))


def test_a_refused_ring_is_slower_and_no_error(
    simulator: ModuleType, streamed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = streamed()
    simulator.fail("cuMemHostRegister")
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits(model), logits(build("llama-gqa", device=GPU)))
    assert "slower" in caplog.text


# -- the host store


def test_what_was_written_on_another_stream_is_kept(simulator: ModuleType, wrapped: Any) -> None:
    model = wrapped(build("llama-gqa", device=GPU))
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.cuda.stream(torch.cuda.Stream(GPU)):
        weight.data.fill_(3.0)
    model.elastic.release(0)
    assert set(model.elastic.weights.layers[0].host_copies["mlp.up_proj.weight"].tensor.flatten().tolist()) == {3.0}


def test_what_was_written_on_another_stream_is_digested(simulator: ModuleType, wrapped: Any) -> None:
    model = wrapped(build("llama-gqa", device=GPU))
    weight = model.model.layers[0].mlp.up_proj.weight
    expected = digest(torch.full_like(weight, 3.0, device="cpu"))
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream(GPU)):
        weight.data.fill_(3.0)
    assert model.elastic.weights.layers[0].measure()["mlp.up_proj.weight"] == expected


def test_what_is_kept_is_there_on_return(simulator: ModuleType) -> None:
    """The device writes page-locked memory when its stream gets there."""
    source = torch.arange(1 << 16, device=GPU)
    kept = HostStore().keep(source, 0, lock=True)
    assert is_locked(kept.tensor)
    assert torch.equal(kept.tensor, torch.arange(1 << 16))


def test_equal_weights_are_found_on_the_device_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_store, "_COMPARED_BYTES", 1 << 10)
    store, source, compared, real = HostStore(), torch.rand(64, 64, device=GPU), [], torch.equal
    kept = keep(store, source, lock=True)

    def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
        compared.append((one.device.type, other.device.type, one.nbytes))
        return real(one, other)

    monkeypatch.setattr(torch, "equal", equal)
    assert keep(store, source.clone(), lock=True) is kept
    assert compared == [("cuda", "cuda", 1 << 10)] * 16
