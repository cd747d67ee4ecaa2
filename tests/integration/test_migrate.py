"""Layers, and modules of them, move to another place under a running model (CoCoServe; laws 1, 3, 4, 5, 8)."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch

import elastic
from elastic import CapacityError, ConfigError, StateError
from elastic.memory import places
from support.architectures import CONFIGS, build, prompt
from support.child_process import wait_for_the_janitor
from support.faulty_backend import CALLS, FaultyBackend
from support.wrapped_model import PAGE, assert_same_bits, bits, modules_of, small, written_while_copied

ROOMY = 64 << 20


def two_places(budget: int = ROOMY) -> list[elastic.Place]:
    return [small(ROOMY, "cpu#a"), small(budget, "cpu#b")]


def owners(rt: Any, place: int) -> dict[str, int]:
    """What its weights have, and others but the KV cache."""
    return {owner: size for owner, size in rt.status().places[place].owners.items() if owner != "kv"}


@pytest.mark.parametrize("moves", [6, pytest.param(60, marks=pytest.mark.long)])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_logits_are_bit_equal_wherever_the_weights_are(architecture: str, moves: int, wrapped: Any) -> None:
    model, choose = build(architecture), random.Random(architecture)
    before, expected = bits(model), model(**prompt(2)).logits
    rt = wrapped(model, two_places()).elastic
    at_first = owners(rt, 0)
    modules = [name for layer in range(3) for name in modules_of(model, layer)]
    for _ in range(moves):
        rt.migrate(choose.choice(modules), choose.choice(["cpu#a", "cpu#b"]))
        assert torch.equal(model(**prompt(2)).logits, expected)
        rt.check()
    assert_same_bits(model, before)
    rt.migrate(range(rt.status().layers), "cpu#a")
    assert owners(rt, 0) == at_first
    assert not any(owner.startswith("layer") for owner in owners(rt, 1))
    rt.migrate(choose.choice(modules), "cpu#b")
    elastic.unwrap(model)
    assert_same_bits(model, before)
    assert torch.equal(model(**prompt(2)).logits, expected)


@pytest.mark.parametrize("variant", ["int8", "int4", "2:4"])
def test_a_layer_migrates_in_its_variant_and_is_swapped_where_it_is(variant: str, wrapped: Any) -> None:
    model, choose = build("llama-gqa"), random.Random(0)
    before, plain = bits(model), model(**prompt(2)).logits
    rt = wrapped(model, two_places(), variants=("int8", "int4", "2:4")).elastic
    rt.swap(1, variant)
    quantized = model(**prompt(2)).logits
    modules = modules_of(model, 1)
    for _ in range(8):
        rt.migrate(choose.choice(modules), choose.choice(["cpu#a", "cpu#b"]))
        assert torch.equal(model(**prompt(2)).logits, quantized)
        if choose.random() < 0.4:
            rt.restore(1)
            assert torch.equal(model(**prompt(2)).logits, plain)
            rt.migrate(choose.choice(modules), choose.choice(["cpu#a", "cpu#b"]))
            rt.swap(1, variant)
            assert torch.equal(model(**prompt(2)).logits, quantized)
        rt.check()
    assert_same_bits(model, before)


def test_a_layer_whose_only_packed_module_leaves_is_in_full_as_it_lies(wrapped: Any) -> None:
    """Else it could hold more pages than counted for its full weights, so that others found no room to return."""
    model = build("mistral-sliding")
    expected = model(**prompt()).logits
    rt = wrapped(model, two_places(), variants=("int8",)).elastic
    module = "self_attn.o_proj"
    rt.apply([elastic.Swap((2,), "int8", (f"{module}.weight",))])
    rt.migrate(f"model.layers.2.{module}", "cpu#b")
    layer = rt.weights.layers[2]
    assert layer.precision is layer.full
    assert layer.held_pages == layer.pages_in(layer.full) == layer.pages
    rt.swap(2, "int8")
    rt.restore(2)
    assert layer.precision is layer.full
    assert torch.equal(model(**prompt()).logits, expected)
    rt.migrate(2, "cpu#a")
    assert torch.equal(model(**prompt()).logits, expected)
    rt.check()


def test_pages_go_with_the_weights(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, two_places()).elastic
    held, capacity = owners(rt, 0)["layer:1"], [kv.capacity_bytes for kv in rt.status().kv]
    step = rt.plan(elastic.Migrate((1,), "cpu#b"))[0]
    change = rt.migrate(1, "cpu#b")
    assert (change.status, change.layers, change.retained_bytes) == ("applied", (1,), 0)
    assert change.moved_bytes == step.moved_bytes
    assert change.released_bytes == step.released_pages == 0  # as many were taken as given
    assert "layer:1" not in owners(rt, 0)
    assert owners(rt, 1)["layer:1"] == held
    assert [kv.capacity_bytes for kv in rt.status().kv] == [capacity[0] + held, capacity[1] - held]
    assert rt.status().residencies["model.layers.1"] == (elastic.Residency("cpu#b", "float32"),)
    assert rt.migrate(1, "cpu#b").layers == ()
    assert rt.migrate("model.layers.1.mlp", "cpu#b").layers == ()


def test_a_module_takes_its_pages_and_no_more_than_two_others(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, two_places()).elastic
    held, owned = owners(rt, 0)["layer:2"], sum(p.nbytes for p in model.model.layers[2].mlp.parameters())
    rt.migrate("model.layers.2.mlp", "cpu#b")
    here, there = owners(rt, 0)["layer:2"], owners(rt, 1)["layer:2"]
    assert there < owned + 2 * PAGE
    assert held <= here + there <= held + 2 * PAGE
    assert [(where.place, where.part) for where in rt.status().residencies["model.layers.2"]] == [
        ("cpu#a", ""),
        ("cpu#b", "mlp"),
    ]
    rt.migrate("model.layers.2.mlp", "cpu#a")
    assert (owners(rt, 0)["layer:2"], len(rt.status().residencies["model.layers.2"])) == (held, 1)


def test_a_released_layer_arrives_resident_and_is_released_there(wrapped: Any) -> None:
    model = build("llama-gqa")
    expected = model(**prompt()).logits
    rt = wrapped(model, two_places()).elastic
    rt.release([0, 1])
    rt.migrate(0, "cpu#b")
    assert [where[0].place for where in rt.status().residencies.values()] == ["cpu#b", "host", "cpu#a"]
    rt.release(0)
    assert torch.equal(model(**prompt()).logits, expected)
    rt.check()
    rt.restore()
    assert [where[0].place for where in rt.status().residencies.values()] == ["cpu#b", "cpu#a", "cpu#a"]
    assert torch.equal(model(**prompt()).logits, expected)


def test_what_cannot_be_done_is_said_and_nothing_changes(wrapped: Any) -> None:
    model = build("llama-gqa")
    expected = model(**prompt()).logits
    rt = wrapped(model, two_places(8 * PAGE)).elastic
    with pytest.raises(ConfigError, match=r"'cpu#c' is none of this model's.*cpu#a.*cpu#b"):
        rt.migrate(0, "cpu#c")
    with pytest.raises(ConfigError, match=r"no weights of its own under 'mlp\.nothing'"):
        rt.migrate("model.layers.0.mlp.nothing", "cpu#b")
    with pytest.raises(CapacityError, match="cpu#b has no room"):
        rt.migrate([0, 1, 2], "cpu#b")
    with pytest.raises(CapacityError, match="cpu#b has no room"):
        rt.plan(elastic.Migrate((0, 1, 2), "cpu#b"))
    rt.release(1)
    with pytest.raises(StateError, match="host memory; restore it"):
        rt.migrate("model.layers.1.self_attn.q_proj", "cpu#b")
    rt.migrate("model.layers.0.self_attn.q_proj", "cpu#b")
    with pytest.raises(StateError, match=r"model\.layers\.0\.self_attn\.q_proj is at cpu#b, apart from its layer"):
        rt.release(0)
    assert torch.equal(model(**prompt()).logits, expected)


def test_pages_that_a_tensor_outside_shows_are_retained(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, two_places()).elastic
    layer = model.model.layers[1]
    views = {name: layer.get_submodule(name).weight.detach() for name in ("self_attn.q_proj", "mlp.up_proj")}
    copies = {name: view.clone() for name, view in views.items()}
    held = owners(rt, 0)["layer:1"]
    for module, retained in (("model.layers.1.mlp.up_proj", "mlp.up_proj"), ("model.layers.1", "self_attn.q_proj")):
        change = rt.migrate(module, "cpu#b")
        assert change.retained_bytes >= copies[retained].nbytes // PAGE * PAGE
        assert all(torch.equal(views[name], copy) for name, copy in copies.items())
        rt.check()
    assert owners(rt, 0)["retained"] >= copies["self_attn.q_proj"].nbytes
    views.clear()
    gc.collect()
    wait_for_the_janitor()
    assert not owners(rt, 0).keys() & {"retained", "layer:1"}
    assert owners(rt, 1)["layer:1"] == held
    rt.check()


def test_weights_written_on_their_way_are_not_lost(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, two_places()).elastic
    refused = pytest.raises(StateError, match=r"model\.layers\.1 were written while they were on their way")
    with written_while_copied(model.model.layers[1].mlp.up_proj.weight), refused:
        rt.migrate(1, "cpu#b")
    changed = bits(model)
    assert "layer:1" not in owners(rt, 1)
    rt.migrate(1, "cpu#b")
    assert_same_bits(model, changed)


@pytest.mark.parametrize("module", ["model.layers.0", "model.layers.0.mlp"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("nth", [1, 2])
def test_a_driver_that_fails_leaves_the_weights_where_they_were(
    module: str, call: str, nth: int, monkeypatch: Any, wrapped: Any
) -> None:
    make = places.make_backend
    monkeypatch.setattr(places, "make_backend", lambda place: FaultyBackend(make(place)))
    model = wrapped(build("llama-gqa"), two_places())
    rt, expected = model.elastic, model(**prompt()).logits
    rt.kv.trim()
    before, ranges = rt.status().residencies, len(rt.pools[1].backend.reserved)
    for pool in rt.pools:
        pool.backend.fail(call, nth)
    try:
        rt.migrate(module, "cpu#b")
    except CapacityError:
        assert rt.status().residencies == before
        assert len(rt.pools[1].backend.reserved) == ranges
    for pool in rt.pools:
        pool.backend.disarm()
    assert torch.equal(model(**prompt()).logits, expected)
    rt.check()
    rt.migrate(module, "cpu#b")
    rt.migrate(0, "cpu#a")
    assert (rt.status().residencies, torch.equal(model(**prompt()).logits, expected)) == (before, True)


def test_two_models_lend_each_other_places(wrapped: Any) -> None:
    first, second = build("llama-gqa"), build("gpt2")
    expected = [model(**prompt()).logits for model in (first, second)]
    a, b = two_places()
    one, two = wrapped(first, [a, b]).elastic, wrapped(second, [b, a]).elastic
    for rt, place in ((one, "cpu#b"), (two, "cpu#a"), (one, "cpu#a"), (two, "cpu#b")):
        rt.migrate([0, 2], place)
        rt.migrate([1], place)
        for model, logits in zip((first, second), expected, strict=True):
            assert torch.equal(model(**prompt()).logits, logits)
            model.elastic.check()
    elastic.unwrap(first)
    assert torch.equal(second(**prompt()).logits, expected[1])
    two.check()


def test_a_model_is_spread_over_places_in_their_order(wrapped: Any) -> None:
    model = build("llama-gqa")
    before, expected = bits(model), model(**prompt(2), use_cache=False).logits
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    rest = sum(t.nbytes for t in [*model.parameters(), *model.buffers()]) - 3 * layer
    first = small(rest + 2 * layer + layer // 2 + 6 * PAGE, "cpu#a")
    rt = wrapped(model, [first, small(ROOMY, "cpu#b")], placement="auto").elastic
    assert [where[0].place for where in rt.status().residencies.values()] == ["cpu#a", "cpu#a", "cpu#b"]
    assert torch.equal(model(**prompt(2), use_cache=False).logits, expected)
    rt.migrate(1, "cpu#b")
    rt.check()
    elastic.unwrap(model)
    assert_same_bits(model, before)


def test_a_placement_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"placement='best' is not known.*'as_loaded', 'auto'"):
        elastic.wrap(build("llama-gqa"), placement="best")


def test_a_model_dispatched_by_accelerate_migrates(wrapped: Any) -> None:
    from accelerate import dispatch_model

    model = build("llama-gqa")
    before, expected = bits(model), model(**prompt(2)).logits
    names = [
        "model.embed_tokens",
        "model.norm",
        "model.rotary_emb",
        "lm_head",
        *(f"model.layers.{i}" for i in range(3)),
    ]
    dispatch_model(model, dict.fromkeys(names, "cpu"), force_hooks=True)
    rt = wrapped(model, two_places()).elastic
    assert len(rt.weights.layers[0].layer.unpaged.accelerate_hooks) > 0
    for target in (1, "model.layers.0.mlp", [0, 1, 2]):
        rt.migrate(target, "cpu#b")
        assert {a.execution_device for unit in rt.weights.layers for a in unit.layer.unpaged.accelerate_hooks} == {
            "cpu"
        }
        assert torch.equal(model(**prompt(2)).logits, expected)
    elastic.unwrap(model)
    assert_same_bits(model, before)
    assert torch.equal(model(**prompt(2)).logits, expected)
