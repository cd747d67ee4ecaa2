"""Weights that leave a GPU and come back from another one, while forward passes are queued and go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import elastic
from support.architectures import build, prompt
from support.cluster.joined_runtimes import joined
from support.wrapped_model import assert_same_bits, bits

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("no_violations")]
TWO_DEVICES = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="there is one CUDA device")
ALL = (0, 1, 2)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("there", ["cuda:0#b", pytest.param("cuda:1", marks=TWO_DEVICES)])
def test_layers_return_from_another_gpu_while_what_read_them_is_queued(
    stack: ExitStack, wrapped: Any, there: str
) -> None:
    model, inputs = build("llama-gqa", device="cuda:0"), prompt(2, device="cuda:0")
    before, expected = bits(model), model(**inputs).logits
    rt = wrapped(model, [elastic.Place.parse("cuda:0#a=256MiB")]).elastic
    other = build("llama-gqa", device=there.split("#")[0])
    peer = wrapped(other, [elastic.Place.parse(f"{there}=256MiB")]).elastic
    joined(stack, a=rt, b=peer)
    assert rt.digests(ALL) == peer.digests(ALL)
    source = peer.weights_source(ALL)
    for _ in range(2):
        first = model(**inputs).logits
        freed = rt.drop(ALL).released_bytes
        rt.kv.trim()
        assert rt.fetch(ALL, source).layers == ALL
        second = model(**inputs).logits
        assert torch.equal(first, expected)
        assert torch.equal(second, expected)
        assert freed
    rt.check()
    assert_same_bits(model, before)


def test_a_forward_pass_beside_drops_and_fetches_computes_with_all_weights_or_none(
    stack: ExitStack, wrapped: Any
) -> None:
    model, inputs = build("llama-gqa", device="cuda:0"), prompt(2, device="cuda:0")
    expected = model(**inputs).logits
    rt = wrapped(model, [elastic.Place.parse("cuda:0#a=256MiB")]).elastic
    peer = wrapped(build("llama-gqa", device="cuda:0"), [elastic.Place.parse("cuda:0#b=256MiB")]).elastic
    joined(stack, a=rt, b=peer)
    rt.digests(ALL)
    found: list[bool] = []
    refused: list[str] = []
    over = threading.Event()

    def compute() -> None:
        with torch.cuda.stream(torch.cuda.Stream("cuda:0")):
            while not over.is_set():
                try:
                    found.append(torch.equal(model(**inputs).logits, expected))
                except elastic.StateError as error:
                    refused.append(str(error))

    thread = threading.Thread(target=compute)
    torch.cuda.synchronize()
    thread.start()
    source = peer.weights_source((1, 2))
    for layers in ((1,), (2,), (1, 2)):
        rt.drop(layers)
        rt.fetch(layers, source)
        seen = len(found)
        while thread.is_alive() and len(found) < seen + 2:
            pass
    over.set()
    thread.join()
    assert found
    assert all(found)
    assert all("is dropped" in words for words in refused)


def test_dropped_layers_return_from_the_checkpoint(wrapped: Any, tmp_path: Path, simulator: ModuleType) -> None:
    model, inputs = build("llama-gqa", device="cuda:0"), prompt(2, device="cuda:0")
    model.save_pretrained(tmp_path)
    before, expected = bits(model), model(**inputs).logits
    rt = wrapped(model, [elastic.Place.parse("cuda:0=256MiB")], checkpoint=str(tmp_path)).elastic
    rt.digests(ALL)
    copied = simulator.count("memcpy")
    rt.drop(ALL)
    assert simulator.count("memcpy") == copied  # it reads nothing
    rt.restore(ALL)
    assert torch.equal(model(**inputs).logits, expected)
    assert_same_bits(model, before)


@pytest.mark.parametrize("variant", ["2:4", "ffn75"])
def test_a_pruned_variant_is_swapped_in_under_forward_passes(wrapped: Any, variant: str) -> None:
    model, inputs = build("llama-gqa", device="cuda:0"), prompt(2, device="cuda:0")
    before, expected = bits(model), model(**inputs).logits
    rt = wrapped(model, [elastic.Place.parse("cuda:0=256MiB")], variants=[variant]).elastic
    rt.swap(ALL, variant)
    pruned = model(**inputs).logits
    rt.restore(ALL)
    on_cpu = elastic.wrap(build("llama-gqa"), places=["cpu=64MiB"], variants=[variant])
    on_cpu.elastic.swap(ALL, variant)
    torch.testing.assert_close(pruned.cpu(), on_cpu(**prompt(2)).logits, rtol=1e-3, atol=1e-3)
    elastic.unwrap(on_cpu)
    side = torch.cuda.Stream("cuda:0")
    side.wait_stream(torch.cuda.current_stream("cuda:0"))
    logits = []
    for layers in ((1,), (0, 2), ALL):
        with torch.cuda.stream(side):
            rt.swap(layers, variant)
            swapped = model(**inputs).logits
            rt.restore(layers)
            logits.append(model(**inputs).logits)
        assert not torch.equal(swapped.cpu(), expected.cpu())
    side.synchronize()
    assert all(torch.equal(each, expected) for each in logits)
    assert not torch.equal(pruned, expected)
    assert_same_bits(model, before)
