"""Layers are at several places, each of which computes some rows of the batch (CoCoServe; laws 1 to 6)."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import pickle
import random
import threading
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    RoFormerConfig,
    RoFormerForCausalLM,
)

import elastic
from elastic import CapacityError, ConfigError, StateError
from elastic.hooks.replicas import dispatcher
from elastic.hooks.replicas.load_balance import ThroughputEstimator
from elastic.kvcache.layers.split import RowSplitLayer
from elastic.memory import copy_engine, places
from elastic.weights import batch_context
from support.architectures import CONFIGS, SMALL, build, in_turn, prompt
from support.child_process import in_fork, wait_for_the_janitor
from support.faulty_backend import CALLS, FaultyBackend
from support.wrapped_model import PAGE, assert_same_bits, bits, small, written_while_copied

ROOMY = 64 << 20
STEPS = 6


def three_places(budget: int = ROOMY) -> list[elastic.Place]:
    return [small(ROOMY, "cpu#a"), small(budget, "cpu#b"), small(ROOMY, "cpu#c")]


def replicable(architecture: str) -> list[int]:
    return [3] if architecture == "qwen3-next" else [0, 1, 2]


def owners(rt: Any, place: int) -> dict[str, int]:
    """What its weights have, and others but the KV cache."""
    return {owner: size for owner, size in rt.status().places[place].owners.items() if owner != "kv"}


def change_at_random(rt: Any, choose: random.Random, layers: list[int]) -> None:
    """Add or take away a replica of some layers."""
    place = choose.choice(["cpu#b", "cpu#c"])
    where = list(rt.status().residencies.values())
    there = [i for i in layers if place in [residency.place for residency in where[i]]]
    if there and choose.random() < 0.5:
        rt.evict(choose.sample(there, choose.randint(1, len(there))), place)
    else:
        rt.replicate(choose.sample(layers, choose.randint(1, len(layers))), place)


def decode(
    model: Any, inputs: dict[str, torch.Tensor], tokens: torch.Tensor, between: Any = lambda: None
) -> torch.Tensor:
    """Logits of the prompt's last token and of each of `tokens`, [batch, 1 + tokens, vocab]."""
    mask, found = inputs["attention_mask"], model(**inputs)
    logits, cache = [found.logits[:, -1]], found.past_key_values
    for step in range(tokens.shape[1]):
        between()
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        positions = mask.sum(dim=1, keepdim=True) - 1
        found = model(
            tokens[:, step : step + 1], attention_mask=mask, past_key_values=cache, **positioned(model, positions)
        )
        logits.append(found.logits[:, -1])
    return torch.stack(logits, dim=1)


def in_float64(model: Any) -> Any:
    other = copy.deepcopy(model).double()
    if "experts" in str(other):
        other.set_experts_implementation("eager")  # the stock kernel knows no float64
    return other


def positioned(model: Any, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    return {} if type(model).__name__ == "BloomForCausalLM" else {"position_ids": positions}


SPLIT = sorted(CONFIGS.keys() - {"gemma4"})
"""Architectures whose layers are computed at several places; Gemma 4's hand each other keys and values."""


@pytest.mark.parametrize(("architecture", "batch"), in_turn(SPLIT, [3, 8, 1]))
@torch.no_grad()
def test_replicas_come_and_go_in_mid_generation(architecture: str, batch: int, wrapped: Any) -> None:
    model, choose = build(architecture), random.Random(f"{architecture} {batch}")
    inputs, before = prompt(batch, length=28), bits(model)
    if architecture in ("bloom", "gemma2"):  # their plain models give NaN for padding in float64
        inputs["attention_mask"].fill_(1)
    tokens = torch.randint(3, 96, (batch, STEPS), generator=torch.Generator().manual_seed(5))
    exact = decode(in_float64(model), inputs, tokens)
    plain = decode(model, inputs, tokens)
    rt = wrapped(model, three_places()).elastic
    layers = replicable(architecture)
    rt.replicate(layers, "cpu#b")
    logits = decode(model, inputs, tokens, lambda: change_at_random(rt, choose, layers))
    error, bound = (logits - exact).abs().max(), 2 * (plain - exact).abs().max()
    assert error <= bound
    top = exact.topk(2).values
    clear = top[..., 0] - top[..., 1] > bound
    assert torch.equal(logits.argmax(-1)[clear], exact.argmax(-1)[clear])
    assert len(rt.passes()) > 0 or batch == 1
    assert_same_bits(model, before)
    elastic.unwrap(model)
    assert_same_bits(model, before)


@pytest.mark.parametrize("architecture", SPLIT)
@torch.no_grad()
def test_one_row_is_computed_at_the_best_place_alone(architecture: str, monkeypatch: Any, wrapped: Any) -> None:
    """And goes to another one in mid-generation, its KV with it, where that has become better."""
    model, best, layers = build(architecture), itertools.cycle([1, 2, 0]), replicable(architecture)
    inputs = prompt(1, length=28)
    tokens = torch.randint(3, 96, (1, STEPS), generator=torch.Generator().manual_seed(5))
    plain = decode(model, inputs, tokens)
    rt = wrapped(model, three_places()).elastic
    rt.replicate(layers, "cpu#b")
    rt.replicate(layers, "cpu#c")
    monkeypatch.setattr(ThroughputEstimator, "best_alone", lambda self, places, present=None: next(best))
    monkeypatch.setattr(dispatcher, "LOOK_EVERY", 2)
    logits = decode(model, inputs, tokens)
    assert (logits - plain).abs().max() < 1e-4
    seen = rt.passes()
    assert all(len(parts) == 1 for parts in seen)
    assert {parts[0].place for parts in seen} >= {"cpu#b", "cpu#c"}
    rt.check()


@torch.no_grad()
def test_the_thread_of_a_place_keeps_nothing_of_a_batch(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"), three_places())
    rt = model.elastic
    rt.replicate([0, 1], "cpu#b")
    model(**prompt(4))
    (worker,) = rt._executor.runner.handlers[elastic.Replicate]._workers.values()
    kept: list[object] = []
    worker.put(lambda: kept.append(batch_context.thread.share)).result()
    assert kept == [None]


@torch.no_grad()
def test_a_row_finds_out_which_place_is_best(wrapped: Any) -> None:
    """Its first generations try the places; it stays where it is, unless another is clearly faster."""
    model = build("llama-gqa")
    rt = wrapped(model, three_places()).elastic
    rt.replicate([0, 1, 2], "cpu#b")
    tried = []
    for _ in range(2):
        before = len(rt.passes())
        decode(model, prompt(1), torch.ones(1, STEPS, dtype=torch.long))
        tried.append({parts[0].place for parts in rt.passes()[before:]})
    assert tried == [{"cpu#a"}, {"cpu#b"}]


@torch.no_grad()
def test_a_forward_that_fails_in_a_layers_place_is_forgotten(monkeypatch: Any, wrapped: Any) -> None:
    model = build("llama-gqa")
    expected = model(**prompt(1)).logits
    rt = wrapped(model, three_places()).elastic
    rt.replicate([1, 2], "cpu#b")
    monkeypatch.setattr(ThroughputEstimator, "best_alone", lambda self, places, present=None: 1)
    fails = model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**prompt(1))
    fails.remove()
    rt.evict([1, 2], "cpu#b")
    assert torch.equal(model(**prompt(1)).logits, expected)


def test_a_layers_dispatcher_goes_as_it_came(wrapped: Any) -> None:
    model = build("llama-gqa")
    expected = model(**prompt(1)).logits
    wrapped(model, three_places())
    assert all("forward" in layer.__dict__ for layer in model.model.layers)
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    elastic.unwrap(model)
    assert not any("forward" in layer.__dict__ for layer in model.model.layers)
    assert torch.equal(other(**prompt(1)).logits, expected)
    wrapped(other, three_places())
    elastic.unwrap(other)
    assert torch.equal(other(**prompt(1)).logits, expected)


@torch.no_grad()
def test_passes_ask_the_dispatcher_from_the_first_replica_on(wrapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    begin = dispatcher.ReplicaDispatcher.begin_forward

    def note(self: Any, *, whole: bool) -> None:
        asked.append(self.replicated)
        begin(self, whole=whole)

    monkeypatch.setattr(dispatcher.ReplicaDispatcher, "begin_forward", note)
    model = build("llama-gqa")
    rt = wrapped(model, three_places()).elastic
    model(**prompt(2))
    assert not asked
    rt.replicate([1], "cpu#b")
    cache = model(**prompt(2)).past_key_values
    rt.evict([1], "cpu#b")
    model(prompt(2)["input_ids"][:, :1], past_key_values=cache)
    assert asked == [(1,), ()]  # after the last replica too: rows of caches are joined then
    assert not any(isinstance(layer, RowSplitLayer) for layer in cache.layers)


class Acting(LogitsProcessor):
    """Changes the replicas between two steps of `generate`."""

    def __init__(self, rt: Any, layers: list[int], seed: int) -> None:
        self.rt, self.layers, self.choose = rt, layers, random.Random(seed)
        self.there = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.choose.random() < 0.4:
            act = self.rt.evict if self.there else self.rt.replicate
            act(self.layers, "cpu#b")
            self.there = not self.there
        return scores


@pytest.mark.parametrize(
    ("architecture", "options"),
    in_turn(
        ["llama-gqa", "qwen2-sliding", "bloom", "mixtral"],
        [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 3}],
    ),
)
def test_generate_writes_the_same_with_replicas(architecture: str, options: dict[str, int], wrapped: Any) -> None:
    model = build(architecture)
    inputs = prompt(1 if "prompt_lookup_num_tokens" in options else 3)
    wanted: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, **options}
    expected = model.generate(**inputs, **wanted)
    rt = wrapped(model, three_places()).elastic
    acting = LogitsProcessorList([Acting(rt, [0, 1], 3)])
    assert torch.equal(model.generate(**inputs, **wanted, logits_processor=acting), expected)
    rt.check()


def test_a_copy_takes_its_pages_and_gives_them_back(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, three_places()).elastic
    held, capacity = owners(rt, 0)["layer:1"], [kv.capacity_bytes for kv in rt.status().kv]
    step = rt.plan(elastic.types.Replicate((1,), "cpu#b"))[0]
    change = rt.replicate(1, "cpu#b")
    assert (change.status, change.layers, change.released_bytes) == ("applied", (1,), -held)
    assert (change.moved_bytes, change.released_bytes) == (step.moved_bytes, step.released_pages * PAGE)
    assert owners(rt, 1) == {"layer:1": held}
    assert [kv.capacity_bytes for kv in rt.status().kv] == [capacity[0], capacity[1] - held, capacity[2]]
    assert [r.place for r in rt.status().residencies["model.layers.1"]] == ["cpu#a", "cpu#b"]
    assert rt.replicated == (1,)
    assert rt.replicate(1, "cpu#b").layers == ()
    model(**prompt(3))
    step = rt.plan(elastic.types.Evict((1,), "cpu#b"))[0]
    change = rt.evict(1, "cpu#b")
    assert (change.layers, change.released_bytes, step.released_pages * PAGE) == ((1,), held, held)
    assert owners(rt, 1) == {}
    gc.collect()
    assert [kv.capacity_bytes for kv in rt.status().kv] == capacity
    assert [event.ok for event in rt.events()] == [True] * 3
    assert rt.replicated == ()


@pytest.mark.parametrize("variant", ["int8", "int4", "2:4"])
def test_a_replica_is_in_the_variant_of_its_layer(variant: str, wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, three_places(), variants=("int8", "int4", "2:4")).elastic
    rt.swap(1, variant)
    rt.swap("model.layers.2.mlp", variant)
    rt.migrate("model.layers.0.mlp", "cpu#c")
    expected = model(**prompt(4)).logits
    rt.replicate([0, 1, 2], "cpu#b")
    assert [r.variant for r in rt.status().residencies["model.layers.1"]] == [variant] * 2
    logits = model(**prompt(4)).logits
    assert len(rt.passes()[-1]) == 2
    assert torch.allclose(logits, expected, atol=1e-4)


def test_what_cannot_be_done_is_said_and_nothing_changes(wrapped: Any) -> None:
    model = build("llama-gqa")
    expected = model(**prompt(3)).logits
    rt = wrapped(model, three_places(8 * PAGE), variants=("int8",)).elastic
    with pytest.raises(ConfigError, match=r"'cpu#d' is none of this model's"):
        rt.replicate(0, "cpu#d")
    with pytest.raises(StateError, match="is at cpu#a itself"):
        rt.replicate(0, "cpu#a")
    with pytest.raises(CapacityError, match="cpu#b has no room"):
        rt.replicate([0, 1, 2], "cpu#b")
    with pytest.raises(CapacityError, match="cpu#b has no room"):
        rt.plan(elastic.types.Replicate((0, 1, 2), "cpu#b"))
    with pytest.raises(StateError, match=r"has no replica at cpu#b; it has replicas at no place"):
        rt.evict(0, "cpu#b")
    rt.release(1)
    with pytest.raises(StateError, match="host memory; restore it"):
        rt.replicate(1, "cpu#c")
    rt.restore(1)
    rt.replicate([0, 1], "cpu#c")
    for act in (
        lambda: rt.swap(1, "int8"),
        lambda: rt.release(1),
        lambda: rt.migrate(1, "cpu#c"),
        lambda: rt.migrate("model.layers.1.mlp", "cpu#b"),
    ):
        with pytest.raises(
            StateError, match=r"model.layers.1 has a replica at cpu#c; evict it first: rt.evict\(1, 'cpu#c'\)"
        ):
            act()
    assert rt.restore().layers == ()  # nothing is to be restored, so nothing is refused
    assert torch.allclose(model(**prompt(3)).logits, expected, atol=1e-5)
    assert len(rt.passes()) == 1
    rt.evict([0, 1], "cpu#c")
    rt.swap(1, "int8")


def test_layers_with_another_state_are_refused(wrapped: Any) -> None:
    rt = wrapped(build("qwen3-next"), three_places()).elastic
    with pytest.raises(ConfigError, match="no KV cache of rows"):
        rt.replicate([2, 3], "cpu#b")
    assert rt.replicate(3, "cpu#b").layers == (3,)


def test_layers_with_adapters_are_refused(wrapped: Any) -> None:
    model = build("llama-gqa")
    projection = model.model.layers[1].mlp.up_proj
    adapted = torch.nn.Module()
    adapted.base_layer, adapted.lora = projection, torch.nn.Linear(32, 48, bias=False).requires_grad_(False)
    adapted.forward = lambda hidden: projection(hidden) + adapted.lora(hidden)
    model.model.layers[1].mlp.up_proj = adapted
    rt = wrapped(model, three_places()).elastic
    with pytest.raises(ConfigError, match=r"or adapters \(mlp\.up_proj\.lora\.weight\): a copy would not follow"):
        rt.replicate(1, "cpu#b")


@torch.no_grad()
def test_a_cache_of_another_batch_is_refused(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, three_places()).elastic
    rt.replicate([0, 1], "cpu#b")
    cache = model(**prompt(4)).past_key_values
    for batch in (2, 3, 5):
        with pytest.raises(ConfigError, match="a cache belongs to one batch"):
            model(torch.full((batch, 1), 7), past_key_values=cache)
    assert model(torch.full((4, 1), 7), past_key_values=cache).logits.shape[0] == 4


def test_a_forward_method_of_another_library_is_refused(wrapped: Any) -> None:
    model = build("llama-gqa")
    layer = model.model.layers[1].mlp
    layer.forward = layer.forward
    rt = wrapped(model, three_places()).elastic
    with pytest.raises(ConfigError, match="mlp has a forward method of its own"):
        rt.replicate([0, 1], "cpu#b")
    assert owners(rt, 1) == {}
    del layer.forward


@pytest.mark.parametrize("architecture", ["llama-gqa", "falcon", "bloom", "qwen3-moe"])
@torch.no_grad()
def test_what_layers_return_is_right_where_it_is_asked_for(architecture: str, wrapped: Any) -> None:
    model = build(architecture)
    model.set_attn_implementation("eager")
    wanted: dict[str, Any] = {"output_hidden_states": True, "output_attentions": True}
    if architecture == "qwen3-moe":
        wanted["output_router_logits"] = True
    names = ["logits", "hidden_states", "attentions", *(["router_logits"] if "moe" in architecture else [])]
    inputs, token = prompt(3), torch.full((3, 1), 7)
    expected = model(**inputs, **wanted)
    after = model(token, past_key_values=model(**inputs).past_key_values, **wanted)
    rt = wrapped(model, three_places()).elastic
    rt.replicate([1, 2], "cpu#b")
    cache = model(**inputs).past_key_values
    assert len(rt.passes()) == 1
    for found, right in ((model(**inputs, **wanted), expected), (model(token, past_key_values=cache, **wanted), after)):
        for name in names:
            ours, theirs = found[name], right[name]
            pairs = [(ours, theirs)] if name == "logits" else list(zip(ours, theirs, strict=True))
            assert pairs
            assert all(torch.allclose(a, b, atol=1e-4) for a, b in pairs)
    assert len(rt.passes()) == 1  # one place has computed all rows
    model(token, past_key_values=cache)
    assert len(rt.passes()) == 2
    model.config.output_hidden_states = True
    assert len(model(**inputs).hidden_states) == 4


@torch.no_grad()
def test_other_ways_to_call_a_model_with_replicas(wrapped: Any) -> None:
    model = build("llama-gqa")
    inputs = prompt(3)
    expected = model(**inputs).logits
    hidden, rotary = torch.randn(3, 5, 32), None
    rotary = model.model.rotary_emb(hidden, torch.arange(5)[None])
    layer = model.model.layers[1](hidden, position_embeddings=rotary)
    rt = wrapped(model, three_places()).elastic
    rt.replicate([0, 1], "cpu#b")
    assert torch.allclose(model(**inputs, use_cache=False).logits, expected, atol=1e-5)
    assert len(rt.passes()) == 1
    assert torch.equal(model.model.layers[1](hidden, position_embeddings=rotary), layer)
    stock = DynamicCache(config=model.config)
    stock.update(torch.zeros(3, 2, 0, 8), torch.zeros(3, 2, 0, 8), 0)  # somebody else's by now
    assert torch.allclose(model(**inputs, past_key_values=stock).logits, expected, atol=1e-5)
    with torch.inference_mode():
        assert torch.allclose(model(**inputs).logits, expected, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = model(**inputs).logits
    rt.evict([0, 1], "cpu#b")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(model(**inputs).logits, narrow, atol=0.05)
    cache = DynamicCache()  # makes its layers as they come
    rt.replicate([1, 2], "cpu#b")
    assert torch.allclose(model(**inputs, past_key_values=cache).logits, expected, atol=1e-5)
    assert [isinstance(layer, RowSplitLayer) for layer in cache.layers] == [False, True, True]


def test_adapters_that_come_after_wrap_are_noticed(wrapped: Any) -> None:
    peft = pytest.importorskip("peft")
    model = build("llama-gqa")
    rt = wrapped(model, three_places()).elastic
    rt.replicate([0, 1], "cpu#b")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config).eval().requires_grad_(False)
    with pytest.raises(StateError, match=r"modules of layers 0 to 1 were replaced .*; evict their replicas"):
        adapted(**prompt(3))
    rt.evict([0, 1], "cpu#b")
    expected = adapted(**prompt(3)).logits
    for refused in (lambda: rt.replicate(0, "cpu#b"), lambda: rt.drop(0)):
        with pytest.raises(ConfigError, match=r"or adapters \(self_attn\.q_proj\.lora_A"):
            refused()
    adapted.merge_and_unload()
    rt.replicate([0, 1], "cpu#b")
    assert torch.allclose(model(**prompt(3)).logits, expected, atol=1e-5)


def test_gradients_and_written_weights_are_refused(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, three_places()).elastic
    rt.replicate([0, 1], "cpu#b")
    embeddings = torch.randn(3, 5, 32, requires_grad=True)
    with pytest.raises(StateError, match="have replicas, which are not differentiated"):
        model(inputs_embeds=embeddings, use_cache=False)
    model.load_state_dict({name: 2 * tensor for name, tensor in bits(model).items()})
    with pytest.raises(StateError, match="written after they were replicated; evict"):
        model(**prompt(3))
    rt.replicate(2, "cpu#b")  # lays the runs anew, and they are as old as before
    with pytest.raises(StateError, match="written after they were replicated; evict"):
        model(**prompt(3))
    rt.evict([0, 1, 2], "cpu#b")
    expected = model(**prompt(3)).logits
    rt.replicate([0, 1], "cpu#b")
    assert torch.allclose(model(**prompt(3)).logits, expected, atol=1e-5)


def test_weights_written_on_their_way_are_not_lost(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, three_places()).elastic
    refused = pytest.raises(StateError, match=r"model\.layers\.1 were written while they were on their way")
    with written_while_copied(model.model.layers[1].mlp.up_proj.weight), refused:
        rt.replicate(1, "cpu#b")
    assert owners(rt, 1) == {}
    assert rt.replicated == ()


@pytest.mark.parametrize("fails", ["replica", "layer", "model"])
@torch.no_grad()
def test_a_forward_that_fails_anywhere_fails_as_a_whole(fails: str, monkeypatch: Any, wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, three_places()).elastic
    rt.replicate([0, 1, 2], "cpu#b")
    cache = model(**prompt(3)).past_key_values
    expected = model(torch.full((3, 1), 7), past_key_values=copy.deepcopy(cache)).logits
    failing = {
        "replica": rt.forward.interceptors[1][-1]._group.replicas[1]["cpu#b"].copy.module.mlp,
        "layer": model.model.layers[1].mlp,
        "model": model.model.norm,
    }[fails]
    with monkeypatch.context() as patch:
        patch.setattr(failing, "forward", lambda *args: (_ for _ in ()).throw(ValueError("broken")))
        with pytest.raises(ValueError, match="broken"):
            model(torch.full((3, 1), 7), past_key_values=cache)
    assert [layer.get_seq_length() for layer in cache.layers] == [24] * 3
    assert [part.layer.get_seq_length() for layer in cache.layers for part in layer.parts] == [24] * 6
    assert torch.equal(model(torch.full((3, 1), 7), past_key_values=cache).logits, expected)
    rt.evict([0, 1, 2], "cpu#b")
    rt.check()


def test_a_model_that_leaves_layers_out_is_told_so(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, three_places()).elastic
    rt.replicate([1, 2], "cpu#b")
    layers = model.model.layers
    model.model.layers = layers[:2]
    with pytest.raises(StateError, match="left out layers in the middle"):
        model(**prompt(3))
    model.model.layers = layers
    model(**prompt(3))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("nth", [1, 2])
def test_a_driver_that_fails_leaves_things_as_they_were(call: str, nth: int, monkeypatch: Any, wrapped: Any) -> None:
    make = places.make_backend
    monkeypatch.setattr(places, "make_backend", lambda place: FaultyBackend(make(place)))
    model = wrapped(build("llama-gqa"), three_places())
    rt, expected = model.elastic, model(**prompt(3)).logits
    for act in (rt.replicate, rt.evict):
        rt.kv.trim()
        before = rt.status().residencies
        for pool in rt.pools:
            pool.backend.fail(call, nth)
        try:
            act([0, 1], "cpu#b")
        except CapacityError:
            assert rt.status().residencies == before
            for pool in rt.pools:
                pool.backend.disarm()
            act([0, 1], "cpu#b")
        for pool in rt.pools:
            pool.backend.disarm()
        assert torch.allclose(model(**prompt(3)).logits, expected, atol=1e-5)
        rt.check()


@torch.no_grad()
def test_rows_that_find_no_room_stay_and_the_generation_goes_on(wrapped: Any) -> None:
    model = build("llama-gqa")
    inputs, tokens = prompt(3), torch.randint(3, 96, (3, STEPS), generator=torch.Generator().manual_seed(5))
    expected = decode(model, inputs, tokens)
    rt = wrapped(model, three_places()).elastic
    rt.replicate([0, 1], "cpu#b")
    acts = iter(
        [
            lambda: rt.evict([0, 1], "cpu#b"),
            lambda: rt.kv.resize(0, place="cpu#b"),
            lambda: rt.replicate([0, 1], "cpu#b"),
        ]
    )
    held = []

    def act() -> None:
        next(acts, lambda: None)()
        held.append([pool.used_bytes > 0 for pool in rt.status().kv])

    assert torch.allclose(decode(model, inputs, tokens, act), expected, atol=1e-5)
    assert held[-1] == [True, False, False]  # under the new limit nothing may begin at the other place
    assert any(both[1] for both in held[:2])


@pytest.mark.parametrize("nth", [1, 2])  # a layer is one copy: its bytes lie side by side
def test_a_copy_that_fails_leaves_nothing(nth: int, monkeypatch: Any, wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, three_places()).elastic
    expected, real, done = model(**prompt(3)).logits, copy_engine.copy, []

    def fail_once(target: torch.Tensor, source: torch.Tensor) -> None:
        done.append(target.nbytes)
        if len(done) == nth:
            raise CapacityError("injected", requested_bytes=0, free_bytes=0, total_bytes=0)
        real(target, source)

    capacity = [kv.capacity_bytes for kv in rt.status().kv]
    monkeypatch.setattr(copy_engine, "copy", fail_once)
    with pytest.raises(CapacityError, match="injected"):
        rt.replicate([0, 1], "cpu#b")
    done.clear()
    gc.collect()
    assert (owners(rt, 1), rt.replicated) == ({}, ())
    assert [kv.capacity_bytes for kv in rt.status().kv] == capacity
    assert torch.equal(model(**prompt(3)).logits, expected)
    done += [0] * nth
    rt.replicate([0, 1], "cpu#b")
    assert torch.allclose(model(**prompt(3)).logits, expected, atol=1e-5)


def test_an_action_that_fails_beside_an_eviction_undoes_it(monkeypatch: Any, wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, three_places()).elastic
    rt.replicate([0, 1], "cpu#b")
    held = owners(rt, 1)
    release = elastic.Release((2,))
    monkeypatch.setattr(rt._executor.runner.handler(release), "commit", lambda prepared: 1 / 0)
    for action in (elastic.types.Evict((0, 1), "cpu#b"), elastic.types.Replicate((0, 1), "cpu#c")):
        with pytest.raises(ZeroDivisionError):
            rt.apply([action, release])
        assert (owners(rt, 1), owners(rt, 2), rt.replicated) == (held, {}, (0, 1))
        model(**prompt(3))
        assert len(rt.passes()[-1]) == 2
        rt.check()


def test_a_model_that_is_dropped_takes_its_replicas_along() -> None:
    model = elastic.wrap(build("llama-gqa"), places=three_places())
    model.elastic.replicate([0, 1, 2], "cpu#b")
    model(**prompt(3))
    assert places._open
    del model
    gc.collect()
    wait_for_the_janitor()
    assert not places._open


def test_a_replica_shares_no_bytes_with_its_layer_and_calls_no_hook(wrapped: Any) -> None:
    model = build("llama-gqa")
    called: list[int] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, output: called.append(output.shape[0]))
    rt = wrapped(model, three_places()).elastic
    expected = model(**prompt(4)).logits
    rt.replicate([0, 1, 2], "cpu#b")
    called.clear()
    model(**prompt(4))
    assert called == [2, 2, 2]  # the rows of the own place
    own = {p.data_ptr() for p in model.parameters()}
    skeleton = rt.forward.interceptors[1][-1]._group.replicas[1]["cpu#b"].copy.module
    assert not own & {p.data_ptr() for p in skeleton.parameters()}
    assert [name for name, _ in skeleton.named_parameters()] == [n for n, _ in model.model.layers[1].named_parameters()]
    assert len(list(model.modules())) == len(list(build("llama-gqa").modules()))
    assert torch.allclose(model(**prompt(4)).logits, expected, atol=1e-5)


def test_places_on_a_cpu_divide_the_threads() -> None:
    in_fork(
        """
        sys.path.insert(0, "tests")
        import torch
        torch.set_num_threads(4)
        from support.architectures import build, prompt
        from support.wrapped_model import small
        import elastic

        model, seen = build("llama-gqa"), []
        for layer in model.model.layers:
            layer.mlp.act_fn.register_forward_hook(lambda *args: seen.append(torch.get_num_threads()))
        elastic.wrap(model, places=[small(32 << 20, name) for name in ("cpu#a", "cpu#b")])
        model.elastic.replicate([1, 2], "cpu#b")
        replica = model.elastic.forward.interceptors[1][-1]._group.replicas[0]["cpu#b"].copy.module
        theirs = []
        replica.mlp.act_fn.register_forward_hook(lambda *args: theirs.append(torch.get_num_threads()))
        model(**prompt(4))
        assert (seen, theirs, torch.get_num_threads()) == ([4, 2, 2], [2], 4), (seen, theirs, torch.get_num_threads())
        elastic.unwrap(model)
        """
    )


def test_threads_and_memory_go_with_the_replicas(wrapped: Any) -> None:
    model = build("llama-gqa")
    before = threading.active_count()
    rt = wrapped(model, three_places()).elastic
    threads = torch.get_num_threads()
    rt.replicate([0, 1], "cpu#b")
    rt.replicate([1, 2], "cpu#c")
    cache = model(**prompt(3)).past_key_values
    names = {thread.name.rsplit("_", 1)[0] for thread in threading.enumerate()}
    assert {"elastic-replicas-cpu#b", "elastic-replicas-cpu#c"} <= names
    assert torch.get_num_threads() == threads
    keys = [layer.keys.clone() for layer in cache.layers]
    elastic.unwrap(model)
    assert [type(layer).__name__ for layer in cache.layers] == ["DynamicLayer"] * 3
    assert all(torch.equal(layer.keys, held) for layer, held in zip(cache.layers, keys, strict=True))
    assert threading.active_count() == before
    model(torch.full((3, 1), 7), past_key_values=cache)


def test_two_models_replicate_on_each_others_places(wrapped: Any) -> None:
    first, second = build("llama-gqa"), build("gpt2")
    expected = [model(**prompt(3)).logits for model in (first, second)]
    a, b, _ = three_places()
    wrapped(first, [a, b])
    wrapped(second, [b, a])
    first.elastic.replicate([0, 1, 2], "cpu#b")
    second.elastic.replicate([1, 2], "cpu#a")
    for model, logits in zip((first, second), expected, strict=True):
        assert torch.allclose(model(**prompt(3)).logits, logits, atol=1e-5)
        assert len(model.elastic.passes()) == 1
        model.elastic.check()
    elastic.unwrap(first)
    assert torch.allclose(second(**prompt(3)).logits, expected[1], atol=1e-5)


def test_generations_in_several_threads_while_replicas_come_and_go() -> None:
    in_fork(
        """
        sys.path.insert(0, "tests")
        import random, threading, torch
        torch.set_num_threads(1)
        from support.architectures import build, prompt
        from support.wrapped_model import small
        import elastic

        model = build("qwen2-sliding")
        options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
        inputs = [prompt(batch, seed=batch) for batch in (2, 3, 5)]
        expected = [model.generate(**each, **options) for each in inputs]
        elastic.wrap(model, places=[small(32 << 20, name) for name in ("cpu#a", "cpu#b", "cpu#c")])
        rt, wrong, stop = model.elastic, [], threading.Event()

        def generate(which):
            try:
                while not stop.is_set():
                    if not torch.equal(model.generate(**inputs[which], **options), expected[which]):
                        wrong.append(which)
            except BaseException as error:
                wrong.append(repr(error))

        writers = [threading.Thread(target=generate, args=(i,)) for i in range(3)]
        for writer in writers:
            writer.start()
        choose = random.Random(0)
        for _ in range(6):
            place = choose.choice(["cpu#b", "cpu#c"])
            where = list(rt.status().residencies.values())
            there = [i for i in range(3) if place in [r.place for r in where[i]]]
            rt.evict(there, place) if there else rt.replicate(choose.sample(range(3), 2), place)
            rt.check()
        stop.set()
        for writer in writers:
            writer.join()
        assert not wrong, wrong
        assert len(rt.passes()) > 0
        elastic.unwrap(model)
        """,
        timeout=120,
    )


@torch.no_grad()
def test_hidden_states_that_a_model_changes_between_layers_are_those_of_all_rows(wrapped: Any) -> None:
    """Qwen3-VL adds features of images behind its first layers: the rows at other places would go without."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    text = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, **heads}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32}
    config = Qwen3VLConfig(text_config={**text, "rope_parameters": rope}, vision_config=vision)
    model: Any = Qwen3VLForConditionalGeneration(config).eval().requires_grad_(False)
    decoder, seen = model.model.language_model, torch.zeros(4, 5, dtype=torch.bool)
    seen[:, 1:3] = True
    image = {"visual_pos_masks": seen, "deepstack_visual_embeds": [torch.randn(8, 32), torch.randn(8, 32)]}
    inputs = {"inputs_embeds": torch.randn(4, 5, 32), "attention_mask": torch.ones(4, 5, dtype=torch.long)}
    expected, plain = (decoder(**inputs, **more).last_hidden_state for more in (image, {}))
    rt = wrapped(model, three_places()).elastic
    rt.replicate([0, 1, 2], "cpu#b")
    assert torch.allclose(decoder(**inputs, **image).last_hidden_state, expected, atol=1e-5)
    assert not rt.passes()  # one place has computed all rows
    assert torch.allclose(decoder(**inputs).last_hidden_state, plain, atol=1e-5)
    assert len(rt.passes()) == 1


@torch.no_grad()
def test_hidden_states_that_others_change_between_layers_are_refused(wrapped: Any) -> None:
    """A hook that steers: it would be given, and change, the rows of one place alone."""
    model = build("llama-gqa")
    rt = wrapped(model, three_places()).elastic
    rt.replicate([0, 1, 2], "cpu#b")
    steering = model.model.layers[1].register_forward_hook(lambda module, args, output: output + 1)
    with pytest.raises(StateError, match="changed between layers 1 and 2, of the rows of one place alone; evict"):
        model(**prompt(3))
    rt.evict([0, 1, 2], "cpu#b")
    steered = model(**prompt(3)).logits
    steering.remove()
    assert not torch.equal(model(**prompt(3)).logits, steered)


@torch.no_grad()
def test_that_one_place_computes_all_rows_is_said_once(wrapped: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Not for each length of a text: a server would say it with every token."""
    model: Any = RoFormerForCausalLM(RoFormerConfig(**SMALL, is_decoder=True)).eval().requires_grad_(False)
    rt = wrapped(model, three_places()).elastic
    rt.replicate([0, 1], "cpu#b")
    with caplog.at_level(logging.WARNING, "elastic"):
        model.generate(**prompt(3), max_new_tokens=4, do_sample=False)
    assert [line for line in caplog.messages if "at one place" in line] == [
        "layers (0, 1) are computed at one place: it is not known which rows have sinusoidal_pos, a tensor of "
        "4 dimensions"
    ]
