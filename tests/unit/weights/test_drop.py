"""Layers whose weights leave the process and come back: laws 3, 4, 5 and 8."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import elastic
from elastic import ConfigError, Drop, StateError, Swap
from elastic.memory import copy_engine, host_store
from elastic.memory.checkpoint_file import Checkpoint
from elastic.types import DROPPED
from elastic.weights import batch_context, layer, parameter_slot
from elastic.weights.proxy.tensor import WeightProxy
from support.architectures import CONFIGS, build, prompt
from support.child_process import wait_for_the_janitor
from support.lossless_variant import HALF, exact
from support.wrapped_model import PAGE, assert_same_bits, bits, layers, small

OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


def saved(model: Any, path: Path) -> str:
    """A checkpoint with the parameters as the model has them, those of experts in one tensor."""
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, path / "model.safetensors")
    return str(path)


def system_bytes(pool: Any) -> int:
    """Bytes of memory that the system keeps for the pages of a place.

    Not what this process has mapped of them: a page may be mapped in a range and in the cache of page tables at once.
    """
    return os.fstat(pool.backend._file).st_blocks * 512


@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_layer_leaves_and_returns_from_the_checkpoint_bit_for_bit(
    architecture: str, wrapped: Any, tmp_path: Path
) -> None:
    model = build(architecture)
    before, expected = bits(model), model(**prompt(3)).logits
    rt = wrapped(model, checkpoint=saved(model, tmp_path)).elastic
    count, first = rt.status().layers, next(iter(rt.status().residencies))
    change = rt.drop(range(count))
    assert (change.layers, change.moved_bytes) == (tuple(range(count)), 0)
    assert rt.form() == ("dropped",) * count
    with pytest.raises(StateError, match=rf"{first} is dropped: .*rt\.restore\(0\)"):
        model(**prompt(3))
    rt.check()
    assert rt.restore().layers == tuple(range(count))
    assert not any(isinstance(parameter, WeightProxy) for parameter in model.parameters())
    assert torch.equal(model(**prompt(3)).logits, expected)
    assert_same_bits(model, before)


def test_a_model_whose_layers_are_about_to_be_dropped_is_not_unwrapped(wrapped: Any, tmp_path: Path) -> None:
    model = build("llama-gqa")
    before = bits(model)
    rt = wrapped(model, checkpoint=saved(model, tmp_path)).elastic
    begun, go_on = threading.Event(), threading.Event()
    rt._executor.call(lambda: (begun.set(), go_on.wait(30)))
    assert begun.wait(30)
    dropping = rt.drop([0], wait=False)
    threading.Timer(0.05, go_on.set).start()
    with pytest.raises(StateError, match=r"layers \(0,\) are dropped"):
        elastic.unwrap(model)
    assert dropping.result()[0].layers == (0,)
    rt.restore()
    elastic.unwrap(model)
    assert_same_bits(model, before)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("architecture", ["qwen3-moe", "mixtral"])
def test_experts_that_files_have_one_by_one_return_from_there(
    architecture: str, shards: int, wrapped: Any, tmp_path: Path
) -> None:
    model = build(architecture)
    before, expected = bits(model), model(**prompt(3)).logits
    model.save_pretrained(tmp_path)
    names = Checkpoint(tmp_path).names
    assert "model.layers.0.mlp.experts.down_proj" not in names
    rt = wrapped(model, checkpoint=str(tmp_path), shards=shards).elastic
    layers = rt.status().layers
    parts = range(1, layers * shards, 2)
    change = rt.drop(range(layers)) if shards == 1 else rt.drop(shards=parts)
    assert change.layers == tuple(range(layers))
    rt.restore()
    assert torch.equal(model(**prompt(3)).logits, expected)
    assert_same_bits(model, before)


def test_the_pages_of_dropped_layers_are_kv_capacity_and_leave_the_ledger(wrapped: Any) -> None:
    model = build("llama-gqa")
    peer = wrapped(build("llama-gqa"), small(4 << 20, "cpu#peer")).elastic
    rt = wrapped(model).elastic
    (place,) = rt.status().places
    pool = rt.kv.memory.pools[0].pool
    wait_for_the_janitor()  # it makes pages ready
    pool.give_back_unused()
    created, kept, capacity = pool.backend.created, system_bytes(pool), rt.kv.capacity_bytes
    assert kept == created * PAGE
    freed = sum(place.owners[f"layer:{index}"] for index in (0, 2))
    rt.digests((0, 2))
    (step,) = rt.plan(Drop((0, 2)))
    assert step.released_pages * PAGE == freed
    assert rt.drop([0, 2]).released_bytes == freed
    assert rt.kv.capacity_bytes == rt.kv.maximum_bytes == capacity + freed
    (place,) = rt.status().places
    assert {"layer:0", "layer:2", "retained"}.isdisjoint(place.owners)
    wait_for_the_janitor()
    pool.give_back_unused()
    assert pool.backend.created == created - freed // PAGE
    assert system_bytes(pool) == kept - freed, "the system has them again"
    assert rt.drop([0, 2]).layers == (), "they are dropped already"
    assert rt.fetch([0, 2], peer.weights_source([0, 2])).released_bytes == -freed
    assert rt.kv.capacity_bytes == rt.kv.maximum_bytes == capacity


def test_memory_to_stream_with_is_cache_until_a_layer_is_released(wrapped: Any, tmp_path: Path) -> None:
    model = build("llama-gqa")
    expected = model.generate(**prompt(), **OPTIONS)
    rt = wrapped(model, checkpoint=saved(model, tmp_path)).elastic
    streamer = rt.weights.streamers["cpu"]
    capacity = rt.kv.capacity_bytes + streamer.buffer_pages * PAGE
    rt.keep_no_prefetch_buffers()
    for _ in range(2):
        assert rt.kv.capacity_bytes == capacity
        assert (len(streamer.buffers), rt.status().places[0].owners.get("staging", 0)) == (0, 0)
        rt.drop([1])
        assert not streamer.buffers
        rt.restore()
        rt.release([1])
        assert len(streamer.buffers) == 1
        assert torch.equal(model.generate(**prompt(), **OPTIONS), expected)
        rt.restore()


def test_a_drop_reads_nothing_and_copies_nothing(wrapped: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a drop read or copied weights")

    model = build("llama-gqa")
    rt = wrapped(model, checkpoint=saved(model, tmp_path)).elastic
    rt.digests(range(3))
    buffers, host = len(rt.weights.streamers["cpu"].buffers), rt.status().host
    with monkeypatch.context() as patched:
        for module in (layer, parameter_slot, host_store):
            patched.setattr(module, "digest", refuse)
        patched.setattr(copy_engine, "copy", refuse)
        assert rt.drop(range(3)).layers == (0, 1, 2)
    assert rt.status().host == host
    assert len(rt.weights.streamers["cpu"].buffers) == buffers, "what cannot be called needs no buffer"
    assert rt.events()[-1].moved_bytes == 0
    rt.restore()


def write(model: Any) -> None:
    layers(model)[1].mlp.up_proj.weight.mul_(2)


def set_gradient(model: Any) -> None:
    parameter = layers(model)[1].mlp.up_proj.weight
    parameter.grad = torch.zeros_like(parameter)


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (write, "was written since the model was wrapped"),
        (lambda model: (write(model), model.elastic.release(1), model.elastic.restore()), "was written since"),
        (lambda model: model.elastic.release(1), r"is in host memory; restore it before it is dropped"),
        (lambda model: model.elastic.swap(1, "int4"), "is in variant 'int4'; restore it"),
        (lambda model: model.elastic.replicate(1, "cpu#b"), "has a replica at cpu#b; evict it first"),
        (lambda model: model.elastic.migrate(f"{layer_name(model)}.mlp", "cpu#b"), "apart from its layer"),
        (set_gradient, "has gradients"),
        (lambda model: model.elastic.weights.layers[1].digests.clear(), r"call rt\.digests\(1\) ahead"),
    ],
)
def test_what_could_not_come_back_or_is_not_alone_is_not_dropped(
    prepare: Callable[[Any], object], reason: str, wrapped: Any
) -> None:
    model = build("llama-gqa").requires_grad_(False)
    rt = wrapped(model, [small(4 << 20, f"cpu#{label}") for label in "ab"], variants=["int4"]).elastic
    rt.digests((0, 1))
    prepare(model)
    form, capacity, expected = rt.form(), rt.kv.capacity_bytes, model(**prompt()).logits
    with pytest.raises(StateError, match=reason):
        rt.apply([Drop((0, 1))])
    assert (rt.form(), rt.kv.capacity_bytes) == (form, capacity)
    assert torch.equal(model(**prompt()).logits, expected)
    layers(model)[1].mlp.up_proj.weight.grad = None


def layer_name(model: Any) -> str:
    return list(model.elastic.status().residencies)[1]


def test_a_layer_with_shared_parameters_is_not_dropped(wrapped: Any) -> None:
    model = build("llama-gqa")
    first, second = (block.mlp for block in model.model.layers[:2])
    second.up_proj.weight = first.up_proj.weight
    rt = wrapped(model).elastic
    with pytest.raises(ConfigError, match=r"used elsewhere too, or adapters \(mlp\.up_proj\.weight\)"):
        rt.drop(1)


def test_a_drop_that_is_rolled_back_or_cannot_be_committed_changes_nothing(wrapped: Any) -> None:
    model = build("llama-gqa")
    before, expected = bits(model), model(**prompt()).logits
    rt = wrapped(model, variants=["int4"]).elastic
    form, capacity = rt.form(), rt.kv.capacity_bytes
    rt.digests(range(3))
    rt.rollback(rt.prepare([Drop((0, 1))]).id)
    told = rt.prepare([Drop((0,)), Swap((2,), "int4")])
    weight = layers(model)[2].mlp.up_proj.weight
    weight.copy_(weight.clone())  # so that the swap cannot be committed, when the drop has been
    with pytest.raises(StateError, match="were written while"):
        rt.commit(told.id)
    assert (rt.form(), rt.kv.capacity_bytes) == (form, capacity)
    assert torch.equal(model(**prompt()).logits, expected)
    assert_same_bits(model, before)


def test_a_tensor_outside_keeps_the_pages_that_it_shows(wrapped: Any, tmp_path: Path) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, checkpoint=saved(model, tmp_path)).elastic
    view = layers(model)[1].mlp.up_proj.weight.detach()[:2]
    expected = view.clone()
    change = rt.drop(1)
    assert 0 < change.retained_bytes == rt.status().places[0].owners["retained"]
    assert torch.equal(view, expected)
    del view
    wait_for_the_janitor()
    assert "retained" not in rt.status().places[0].owners
    rt.restore()


def test_what_would_need_dropped_weights_is_refused_in_words(wrapped: Any, tmp_path: Path) -> None:
    model = build("llama-gqa")
    before = bits(model)
    rt = wrapped(model, checkpoint=saved(model, tmp_path)).elastic
    rt.drop(1)
    name = layer_name(model)
    weight = layers(model)[1].mlp.up_proj.weight
    assert (rt.dropped, rt.status().residencies[name][0].place) == ((1,), DROPPED)
    assert "which is dropped" in repr(weight)
    assert (weight.shape, weight.dtype, weight.numel()) == ((48, 32), torch.float32, 48 * 32)
    refused: list[Callable[[], object]] = [
        model.state_dict,
        lambda: copy.deepcopy(model),
        lambda: torch.save(model, tmp_path / "model.pt"),
        lambda: weight.copy_(torch.zeros(())),
        lambda: weight + 1,
        lambda: rt.release(1),
        lambda: rt.weights_source(1),
    ]
    for work in refused:
        with pytest.raises(StateError, match=f"{name} (is dropped|has no full weights)"):
            work()
    with pytest.raises(RuntimeError, match=f"{name} is dropped"):
        model.load_state_dict(before)
    with pytest.raises(StateError, match=r"layers \(1,\) are dropped; have them back first"):
        elastic.unwrap(model)
    assert rt.form()[1] == "dropped"
    rt.restore(1)
    assert_same_bits(model, before)


def test_a_dropped_layer_is_neither_migrated_nor_replicated(wrapped: Any, tmp_path: Path) -> None:
    model = build("llama-gqa")
    places = [small(4 << 20, f"cpu#{label}") for label in "ab"]
    rt = wrapped(model, places, checkpoint=saved(model, tmp_path)).elastic
    rt.drop(1)
    for verb in (rt.migrate, rt.replicate):
        with pytest.raises(StateError, match="is dropped"):
            verb(1, "cpu#b")
    rt.restore()


def test_a_generation_that_meets_a_dropped_layer_goes_on_when_it_is_back(wrapped: Any, tmp_path: Path) -> None:
    model = build("llama-gqa")
    expected = model.generate(**prompt(), **OPTIONS)
    rt = wrapped(model, checkpoint=saved(model, tmp_path)).elastic
    cache, tokens = elastic.ElasticCache(model), prompt()["input_ids"]
    logits = model(tokens, past_key_values=cache).logits
    while tokens.shape[1] < expected.shape[1]:
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
        rt.drop(2)
        with pytest.raises(StateError, match="is dropped"):
            model(tokens[:, -1:], past_key_values=cache)
        assert cache.get_seq_length() == tokens.shape[1] - 1
        rt.restore(2)
        logits = model(tokens[:, -1:], past_key_values=cache).logits
    assert torch.equal(tokens, expected)


def test_layers_that_a_thread_passes_over_are_neither_refused_nor_streamed(
    wrapped: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama-gqa")
    checkpoint = saved(model, tmp_path)
    skipped = [model.model.layers[index] for index in (0, 2)]
    for block in skipped:
        monkeypatch.setattr(block, "forward", lambda hidden, **kwargs: hidden)
    expected = model(**prompt()).logits
    rt = wrapped(model, checkpoint=checkpoint).elastic
    rt.drop(0)
    rt.release(2)
    monkeypatch.setattr(batch_context.thread, "plan", SimpleNamespace(layers={1}))
    assert torch.equal(model(**prompt()).logits, expected)
    assert all(buffer.layer is None for buffer in rt.weights.streamers["cpu"].buffers)
    monkeypatch.setattr(batch_context.thread, "plan", SimpleNamespace(layers={0, 1}))
    with pytest.raises(StateError, match="is dropped"):
        model(**prompt())
    monkeypatch.setattr(batch_context.thread, "plan", None)
    rt.restore()


def test_a_checkpoint_of_other_weights_brings_no_layer_back(wrapped: Any, tmp_path: Path) -> None:
    model = build("llama-gqa")
    peer = wrapped(build("llama-gqa"), small(4 << 20, "cpu#peer")).elastic
    rt = wrapped(model, checkpoint=saved(build("llama-gqa", seed=7), tmp_path)).elastic
    rt.drop(1)
    places = rt.status().places
    with pytest.raises(StateError, match=r"is not what it was when the layer was dropped"):
        rt.restore(1)
    assert rt.form()[1] == "dropped"
    assert rt.status().places[0].owners == places[0].owners, "the pages that it was read into are given back"
    rt.fetch(1, peer.weights_source(1))


def test_a_layer_that_nobody_here_has_is_not_restored(wrapped: Any) -> None:
    model = build("llama-gqa")
    peer = wrapped(build("llama-gqa"), small(4 << 20, "cpu#peer")).elastic
    rt = wrapped(model).elastic
    rt.drop(1)
    with pytest.raises(StateError, match=r"neither host memory nor a checkpoint has its weights; .*rt\.fetch\(1"):
        rt.restore()
    rt.fetch(1, peer.weights_source(1))


def test_a_dropped_layer_returns_in_a_variant_that_the_host_has(wrapped: Any) -> None:
    model = exact(build("llama-gqa"))
    before, expected = bits(model), model(**prompt()).logits
    rt = wrapped(model, variants=[HALF]).elastic
    rt.drop([0, 1])
    rt.swap(0, "half")
    assert rt.form()[:2] == ("half", "dropped")
    rt.restore([0, 1])
    assert torch.equal(model(**prompt()).logits, expected)
    assert_same_bits(model, before)


STEPS = st.tuples(
    st.sampled_from(["drop", "release", "restore", "fetch", "swap", "resize"]), st.sets(st.integers(0, 2), min_size=1)
)

FORM_AFTER = {"drop": "dropped", "release": "absent", "swap": "half", "restore": "float32", "fetch": "float32"}
REFUSED = {"drop": {"absent", "half"}, "release": {"dropped"}}
"""What cannot be done to a layer in some forms."""


@pytest.mark.parametrize("examples", [15, pytest.param(100, marks=pytest.mark.long)])
def test_whatever_is_done_to_layers_they_keep_their_bits(examples: int, wrapped: Any) -> None:
    model = exact(build("llama-gqa"))
    before, expected = bits(model), model(**prompt()).logits
    peer = wrapped(exact(build("llama-gqa")), small(2 << 20, "cpu#peer"), variants=[HALF]).elastic
    rt, source = wrapped(model, small(2 << 20), variants=[HALF]).elastic, peer.weights_source(range(3))
    weights = {owner: size for owner, size in rt.status().places[0].owners.items() if owner != "kv"}
    verbs: dict[str, Callable[[tuple[int, ...]], object]] = {
        "drop": rt.drop,
        "release": rt.release,
        "restore": rt.restore,
        "fetch": lambda layers: rt.fetch(layers, source),
        "swap": lambda layers: rt.swap(layers, "half"),
        "resize": lambda layers: rt.kv.resize(len(layers) * 32 * PAGE),
    }

    @settings(max_examples=examples)
    @given(steps=st.lists(STEPS, min_size=1, max_size=12))
    def check(steps: list[tuple[str, set[int]]]) -> None:
        for verb, chosen in steps:
            form = list(rt.form())
            refused = any(form[index] in REFUSED.get(verb, ()) for index in chosen)
            with pytest.raises(StateError) if refused else nullcontext():
                verbs[verb](tuple(chosen))
            for index in chosen if verb in FORM_AFTER and not refused else ():
                form[index] = FORM_AFTER[verb]
            assert rt.form() == tuple(form)
            rt.check()
            if "dropped" not in form:
                assert torch.equal(model(**prompt()).logits, expected)
        rt.restore()
        assert_same_bits(model, before)
        assert {o: size for o, size in rt.status().places[0].owners.items() if o != "kv"} == weights

    check()
