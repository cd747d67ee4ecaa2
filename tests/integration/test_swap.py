"""Layers are swapped to packed variants and back under a running model (MorphServe; laws 1, 2, 3, 5, 8)."""

from __future__ import annotations

import copy
import gc
import random
from typing import Any

import pytest
import torch
import transformers as t

import elastic
from elastic import CapacityError, ConfigError, StateError
from elastic.memory.host_store import host
from elastic.types import HOST
from elastic.weights.proxy.tensor import WeightProxy
from support.architectures import CONFIGS, build, prompt
from support.child_process import wait_for_the_janitor
from support.faulty_backend import CALLS, FaultyBackend
from support.static_quant import pack_static
from support.wrapped_model import PAGE, assert_same_bits, bits, layers, pickled, small, tight

VARIANTS = ("int8", "int4", "int3", "2:4")


def variants(model: Any) -> list[str]:
    return [where[0].variant for where in model.elastic.status().residencies.values()]


def static(architecture: str, chosen: dict[int, str]) -> Any:
    """The plain model with these layers quantized for good."""
    model = build(architecture)
    blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) >= 3)
    for index, variant in chosen.items():
        pack_static(blocks[index], variant)
    return model


@pytest.mark.parametrize("architecture", CONFIGS)
def test_logits_are_those_of_the_statically_quantized_model(architecture: str, wrapped: Any) -> None:
    model = build(architecture)
    before, expected = bits(model), model(**prompt(2)).logits
    rt = wrapped(model, variants=VARIANTS).elastic
    for chosen in ({0: "int8", 1: "int4", 2: "int3"}, {0: "2:4", 2: "int4"}):
        rt.restore()
        for index, variant in chosen.items():
            assert rt.swap(index, variant).layers == (index,)
        logits = model(**prompt(2)).logits
        assert torch.equal(logits, static(architecture, chosen)(**prompt(2)).logits)
        assert not torch.equal(logits, expected)
        assert_same_bits(model, before)
        rt.check()
    rt.restore()
    assert not any(isinstance(p, WeightProxy) for p in model.parameters())
    assert torch.equal(model(**prompt(2)).logits, expected)
    rt.swap([2, 0], "int4")
    elastic.unwrap(model)
    assert_same_bits(model, before)
    assert torch.equal(model(**prompt(2)).logits, expected)


@pytest.mark.parametrize("architecture", ["llama-gqa", "gpt2", "mixtral", "mistral-sliding"])
def test_every_step_of_a_generation_is_that_of_the_model_as_it_is_then(architecture: str, wrapped: Any) -> None:
    """The cache, and the position in it, are kept through swaps and restores in any order."""
    model, choose = build(architecture), random.Random(0)
    model.set_attn_implementation("eager")  # on which elastic caches change nothing
    wrapped(model, variants=VARIANTS)
    rt, state = model.elastic, dict.fromkeys(range(3), "float32")
    tokens = prompt(1, 40)["input_ids"]
    cache, expected_cache = elastic.ElasticCache(model), t.DynamicCache(config=model.config)
    fed = tokens
    for _ in range(10):
        for index in choose.sample(range(3), choose.randint(0, 3)):
            state[index] = choose.choice([*VARIANTS, "float32"])
            rt.restore(index) if state[index] == "float32" else rt.swap(index, state[index])
        assert variants(model) == list(state.values())
        reference = static(architecture, {i: v for i, v in state.items() if v != "float32"})
        reference.set_attn_implementation("eager")
        logits = model(fed, past_key_values=cache).logits
        assert torch.equal(logits, reference(fed, past_key_values=expected_cache).logits)
        fed = logits[:, -1:].argmax(-1)
    assert rt.kv.used_bytes > 0


def test_freed_pages_are_kv_capacity_at_once_and_return(wrapped: Any) -> None:
    rt = wrapped(build("llama-gqa"), variants=VARIANTS).elastic
    owners, capacity = rt.status().places[0].owners, rt.kv.capacity_bytes
    held = owners["layer:1"]
    for variant in ("int8", "int4", "2:4", "int3", "2:4", "int8"):
        step = rt.plan(elastic.Swap((1,), variant))[0]
        change = rt.swap(1, variant)
        now = rt.status().places[0].owners["layer:1"]
        assert change.released_bytes == held - now == step.released_pages * PAGE
        assert (change.status, step.status, change.moved_bytes) == ("applied", "applied", step.moved_bytes)
        held = now
        assert rt.kv.capacity_bytes == rt.kv.maximum_bytes == capacity + owners["layer:1"] - held
    assert rt.restore().released_bytes == held - owners["layer:1"]
    assert rt.kv.capacity_bytes == capacity
    assert rt.status().places[0].owners == owners


def test_parts_of_a_layer_can_be_swapped(wrapped: Any) -> None:
    model = build("llama-gqa")
    before, expected = bits(model), model(**prompt()).logits
    rt = wrapped(model, variants=VARIANTS).elastic
    change = rt.swap(["model.layers.1.mlp", "model.layers.2.self_attn.q_proj", "model.layers.0"], "int8")
    assert (change.status, sorted(change.layers)) == ("applied", [0, 1, 2])
    assert variants(model) == ["int8", "float32+int8", "float32+int8"]
    packed = {name for name, p in model.named_parameters() if isinstance(p, WeightProxy) and "layers.0" not in name}
    mlp = {f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert packed == mlp | {"model.layers.2.self_attn.q_proj.weight"}
    rt.swap("model.layers.1.self_attn", "int4")
    assert variants(model)[1] == "float32+int4+int8"
    assert not torch.equal(model(**prompt()).logits, expected)
    rt.check()
    rt.restore("model.layers.1.mlp")
    assert variants(model)[1] == "float32+int4"
    assert_same_bits(model, before)
    rt.restore()
    assert torch.equal(model(**prompt()).logits, expected)
    for wrong in ("model.layers.1.mlpx", "model.layers.1.mlp.", "model.layers.7", "lm_head"):
        with pytest.raises(ConfigError, match=wrong.replace(".", r"\.")):
            rt.swap(wrong, "int8")


def test_a_generation_that_has_run_out_of_kv_goes_on_after_a_swap(wrapped: Any) -> None:
    """All pages are taken: the layers go one after another through the staging reserve."""
    model = build("llama-gqa")
    rt = wrapped(model, tight(model, 21, variants=VARIANTS), kv_layout="token_major", variants=VARIANTS).elastic
    cache = elastic.ElasticCache(model)
    tokens, ran_out = prompt(length=150)["input_ids"], 0  # steps since then
    logits = model(tokens, past_key_values=cache).logits
    while ran_out < 12:
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
        ran_out += bool(ran_out)
        try:
            logits = model(tokens[:, -1:], past_key_values=cache).logits
        except CapacityError:
            ran_out += 1
            assert ran_out == 1, "the swap gave pages for a dozen tokens and more"
            assert cache.get_seq_length() == tokens.shape[1] - 1
            assert rt.plan(elastic.Swap((0, 1, 2), "int4"))[0].status == "applied"
            change = rt.swap([1, 0, 2], "int4")
            assert (change.status, sorted(change.layers)) == ("applied", [0, 1, 2])
            assert change.released_bytes > 0
            logits = model(tokens[:, -1:], past_key_values=cache).logits
    assert cache.get_seq_length() == tokens.shape[1]


def test_a_restore_waits_for_caches_and_completes_as_they_end(wrapped: Any) -> None:
    model = build("llama-gqa")
    expected = model(**prompt()).logits
    rt = wrapped(model, tight(model, 14, variants=VARIANTS), kv_layout="token_major", variants=VARIANTS).elastic
    rt.swap([0, 1, 2], "int4")
    cache = model(**prompt(length=180)).past_key_values
    result = rt.restore()
    assert result.status == "deferred"
    assert rt.kv.capacity_bytes < rt.kv.maximum_bytes, "new caches do not get what the layers wait for"
    assert rt.swap(result.deferred[0], "int3").status == "applied"  # ends the waiting of that layer
    model(torch.tensor([[5]]), past_key_values=cache)
    del cache
    gc.collect()
    wait_for_the_janitor()
    rt.apply(())  # after the retry that the end of the cache asked for
    assert variants(model) == ["int3" if i == result.deferred[0] else "float32" for i in range(3)]
    rt.restore()
    assert torch.equal(model(**prompt()).logits, expected)


def test_released_layers_are_swapped_in_and_swapped_ones_released(wrapped: Any) -> None:
    model = build("llama-gqa")
    before, expected = bits(model), model(**prompt()).logits
    rt = wrapped(model, variants=("int4",)).elastic
    reference = static("llama-gqa", {1: "int4"})
    rt.release([0, 1, 2])
    rt.swap(1, "int4")
    assert [where[0].place for where in rt.status().residencies.values()] == [HOST, "cpu", HOST]
    assert torch.equal(model(**prompt()).logits, reference(**prompt()).logits)
    rt.release(1)
    assert torch.equal(model(**prompt()).logits, expected)
    assert_same_bits(model, before)
    rt.swap([0, 1, 2], "int4")
    rt.restore()
    assert torch.equal(model(**prompt()).logits, expected)
    rt.check()


def test_what_a_swap_replaces_is_free_without_a_garbage_collection(wrapped: Any) -> None:
    rt = wrapped(build("qwen3-moe"), variants=VARIANTS).elastic
    gc.collect()
    gc.disable()
    try:
        for variant in VARIANTS:
            assert rt.swap([0, 1, 2], variant).retained_bytes == 0
        assert rt.restore().retained_bytes == 0
    finally:
        gc.enable()


def test_a_thousand_swaps_keep_every_bit(wrapped: Any) -> None:
    model, choose = build("llama-gqa"), random.Random(1)
    before = bits(model)
    rt = wrapped(model, variants=VARIANTS).elastic
    owners = rt.status().places[0].owners
    for _ in range(350):
        picked = choose.sample(range(3), choose.randint(1, 3))
        variant = choose.choice([*VARIANTS, None])
        rt.swap(picked, variant) if variant else rt.restore(picked)
    done = sum(len(event.action.layers) for event in rt.events())
    assert done > 500
    rt.restore()
    assert_same_bits(model, before)
    assert rt.status().places[0].owners == owners


def test_a_swapped_model_is_saved_copied_and_printed_as_if_it_were_whole(wrapped: Any, tmp_path: Any) -> None:
    model = build("llama-gqa")
    expected = model(**prompt()).logits
    model.save_pretrained(tmp_path / "plain")
    wrapped(model, variants=VARIANTS).elastic.swap([0, 2], "int4")
    model.save_pretrained(tmp_path / "swapped")
    plain, swapped = (tmp_path / kind / "model.safetensors" for kind in ("plain", "swapped"))
    assert plain.read_bytes() == swapped.read_bytes()
    for other in (copy.deepcopy(model), pickled(model)):
        assert not any(isinstance(p, WeightProxy) for p in other.parameters())
        assert torch.equal(other(**prompt()).logits, expected)
    weight = layers(model)[0].mlp.up_proj.weight
    assert "int4" in repr(weight)
    assert torch.equal(weight.sum(1), weight.source.value().sum(1)), "it computes as its dequantized value"
    assert not torch.equal(weight.sum(1), weight.detach().sum(1)), "and is read out as the full one"


def test_loading_weights_makes_variants_anew_and_is_refused_by_swapped_layers(wrapped: Any) -> None:
    model, other = build("llama-gqa"), build("llama-gqa", seed=7)
    rt = wrapped(model, variants=("int4",)).elastic
    rt.swap(1, "int4")
    with pytest.raises(RuntimeError, match=r"layers\.1.*in variant 'int4'.*restore it first"):
        model.load_state_dict(other.state_dict())
    rt.restore()
    model.load_state_dict(other.state_dict())
    rt.release(2)
    rt.swap([0, 1, 2], "int4")
    expected = copy.deepcopy(other)
    for layer in expected.model.layers:
        pack_static(layer, "int4")
    assert torch.equal(model(**prompt()).logits, expected(**prompt()).logits)
    rt.restore()
    assert_same_bits(model, bits(other))


@pytest.mark.parametrize("name", ["mlp.up_proj.weight", "input_layernorm.weight"])
@pytest.mark.parametrize("swapped", [False, True])
def test_weights_changed_behind_torchs_back_are_not_lost_by_a_swap(name: str, swapped: bool, wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"), variants=("int4",))
    rt, layer = model.elastic, layers(model)[1]
    if swapped and "norm" not in name:
        return  # refused: see the next test
    if swapped:
        rt.swap(1, "int4")
    parameter = layer.get_parameter(name)
    parameter.data += 1
    expected = parameter.detach().clone()
    if not swapped:
        rt.swap(1, "int4")
    assert torch.equal(parameter.detach(), expected)
    rt.restore(1)
    assert torch.equal(parameter.detach(), expected)


def test_writing_into_a_swapped_weight_is_refused_in_words(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"), variants=("int4",))
    model.elastic.swap(1, "int4")
    weight, before = layers(model)[1].mlp.up_proj.weight, bits(model)
    for write in (
        lambda: weight.mul_(2),
        lambda: weight.copy_(torch.zeros_like(weight.detach())),
        lambda: weight.__setitem__(0, 1.0),
        lambda: setattr(weight, "data", torch.zeros_like(weight.detach())),
        lambda: model.to(torch.float16),
    ):
        with pytest.raises(StateError, match=r"in variant 'int4'.*restore"):
            write()
    assert torch.equal(weight.detach(), before["model.layers.1.mlp.up_proj.weight"])


def test_what_cannot_be_is_refused_and_changes_nothing(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, variants=("int4",)).elastic
    expected = model(**prompt()).logits
    with pytest.raises(ConfigError, match=r"no variant 'int8'; there are 'int4'"):
        rt.swap([0, 1], "int8")
    with pytest.raises(ConfigError, match=r"layers \[1\] twice"):
        rt.apply((elastic.Swap((0, 1), "int4"), elastic.Restore((1,))))
    with pytest.raises(ConfigError, match="no weights of its own under 'mlpx'"):
        rt.plan(elastic.Swap((0,), "int4", ("mlpx",)))
    model.requires_grad_(True)
    model(**prompt()).logits.sum().backward()
    with pytest.raises(StateError, match=r"layers\.0 has gradients"):
        rt.swap(0, "int4")
    model.zero_grad()
    model.requires_grad_(False)
    assert torch.equal(model(**prompt()).logits, expected)
    assert rt.swap([], "int4").layers == rt.swap(0, "int4").deferred == ()
    assert rt.swap(0, "int4").layers == (), "it is so already"
    for wrong, words in ((["int5"], "int5"), (["int4", "int4"], "twice"), ([elastic.Variant("x", 3)], "no format")):
        with pytest.raises(ConfigError, match=words):
            elastic.wrap(build("llama-gqa"), variants=wrong)


def test_a_view_of_a_full_weight_keeps_its_pages_and_nothing_else(wrapped: Any) -> None:
    model = build("llama-gqa")
    before = bits(model)
    rt = wrapped(model, variants=("int4",)).elastic
    owners, maximum = rt.status().places[0].owners, rt.kv.maximum_bytes
    view = layers(model)[1].mlp.up_proj.weight.detach()[:2]
    change = rt.swap(1, "int4")
    assert 0 < change.retained_bytes == rt.status().places[0].owners["retained"]
    assert torch.equal(view, before["model.layers.1.mlp.up_proj.weight"][:2])
    rt.restore()
    rt.check()
    view = None
    gc.collect()
    wait_for_the_janitor()
    assert rt.status().places[0].owners == owners
    assert rt.kv.maximum_bytes == maximum
    assert_same_bits(model, before)


def test_a_reference_to_a_parameter_follows_it(wrapped: Any) -> None:
    import weakref

    model = wrapped(build("llama-gqa"), variants=("int4", "int8"))
    rt, mlp = model.elastic, layers(model)[1].mlp
    parameter, watched = mlp.up_proj.weight, mlp.gate_proj.weight
    reference, before = weakref.ref(watched), watched.detach().clone()
    for variant in ("int4", "int8", "int4"):
        rt.swap(1, variant)
        assert isinstance(parameter, WeightProxy), "exchanged under the same object"
        assert mlp.up_proj.weight is parameter
        assert type(watched) is torch.nn.Parameter, "torch does not exchange what has weak references"
        assert isinstance(mlp.gate_proj.weight, WeightProxy)
    rt.restore()
    assert mlp.gate_proj.weight is watched is reference()
    assert type(parameter) is torch.nn.Parameter
    assert torch.equal(watched, before)


def test_gradients_flow_through_swapped_layers(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"), variants=("int4",))
    model.elastic.swap([0, 1, 2], "int4")
    embedded = model.get_input_embeddings()(prompt()["input_ids"]).requires_grad_(True)
    model(inputs_embeds=embedded, use_cache=False).logits.sum().backward()
    assert embedded.grad is not None
    assert bool(embedded.grad.abs().sum() > 0)


def test_adapters_stay_and_what_is_under_them_is_swapped(wrapped: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(build("llama-gqa"), config).eval().requires_grad_(False)
    expected, before = model(**prompt()).logits, bits(model)
    rt = wrapped(model, variants=("int4",)).elastic
    rt.swap([0, 1, 2], "int4")
    packed = {name for name, p in model.named_parameters() if isinstance(p, WeightProxy)}
    assert any("base_layer" in name for name in packed)
    assert not any("lora_" in name for name in packed)
    with pytest.raises(StateError, match="restore"):
        model.merge_adapter()
    assert_same_bits(model, before)
    rt.restore()
    assert torch.equal(model(**prompt()).logits, expected)


def test_gates_of_experts_stay_full(wrapped: Any) -> None:
    model = wrapped(build("qwen3-moe"), variants=("int4",))
    model.elastic.swap([0, 1, 2], "int4")
    packed = {
        name.split("layers.1.")[1]
        for name, p in model.named_parameters()
        if isinstance(p, WeightProxy) and "s.1." in name
    }
    assert "mlp.experts.gate_up_proj" in packed
    assert not any("gate.weight" in name for name in packed)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_driver_that_fails_leaves_the_old_variant_serving(
    call: str, nth: int, monkeypatch: Any, wrapped: Any
) -> None:
    from elastic.memory import places

    make = places.make_backend
    monkeypatch.setattr(places, "make_backend", lambda place: FaultyBackend(make(place)))
    model = wrapped(build("llama-gqa"), variants=("int8", "int4"))
    rt = model.elastic
    backend: Any = rt.kv.memory.pools[0].pool.backend
    rt.swap(0, "int8")
    expected, before = model(**prompt()).logits, variants(model)
    rt.kv.trim()
    backend.fail(call, nth)
    try:
        rt.swap([0, 1, 2], "int4")
    except CapacityError:
        assert variants(model) == before
        assert torch.equal(model(**prompt()).logits, expected)
        assert not rt.events()[-1].ok
    backend.disarm()
    rt.check()
    rt.swap([0, 1, 2], "int4")
    assert variants(model) == ["int4"] * 3
    rt.restore()


def test_a_copy_that_fails_leaves_the_old_variant_serving(monkeypatch: Any, wrapped: Any) -> None:
    from elastic.memory import copy_engine

    model = wrapped(build("llama-gqa"), variants=("int4",))
    rt, expected = model.elastic, model(**prompt()).logits
    rt.kv.trim()
    owners, real, left = rt.status().places[0].owners, copy_engine.copy, [20]

    def copy_until(target: torch.Tensor, source: torch.Tensor) -> None:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("the link is down")
        real(target, source)

    monkeypatch.setattr(copy_engine, "copy", copy_until)
    with pytest.raises(RuntimeError, match="the link is down"):
        rt.swap([0, 1, 2], "int4")
    assert variants(model) == ["float32"] * 3
    assert rt.status().places[0].owners == owners
    assert torch.equal(model(**prompt()).logits, expected)
    assert rt.swap([0, 1, 2], "int4").status == "applied"


def test_pages_of_a_layer_are_mapped_while_the_bytes_of_the_one_before_travel(monkeypatch: Any, wrapped: Any) -> None:
    """On an H100 mapping a layer's pages takes nearly as long as copying its int4."""
    from elastic.memory.copy_engine import ThreadCopyEngine, ThreadHandle
    from elastic.memory.weight_buffer import WeightBuffer

    rt = wrapped(build("llama-gqa"), variants=("int4",)).elastic
    order: list[str] = []

    def noted(word: str, call: Any) -> Any:
        def note(*args: Any, **kwargs: Any) -> Any:
            order.append(word)
            return call(*args, **kwargs)

        return note

    for name, owner, method in (
        ("mapped", WeightBuffer, "allocate"),
        ("sent", ThreadCopyEngine, "copy"),
        ("there", ThreadHandle, "finish"),
    ):
        monkeypatch.setattr(owner, method, noted(name, getattr(owner, method)))
    rt.swap([0, 1, 2], "int4")
    assert order == ["mapped", "sent", "mapped", "there", "sent", "mapped", "there", "sent", "there"]


def test_models_of_a_process_share_one_host_copy_of_each_variant(wrapped: Any) -> None:
    first = wrapped(build("llama-gqa"), [small(64 << 20, "cpu#0")], variants=VARIANTS)
    alone = first.elastic.status().host
    second = wrapped(build("llama-gqa"), [small(64 << 20, "cpu#1")], variants=VARIANTS)
    assert second.elastic.status().host == alone
    elastic.unwrap(first)
    gc.collect()
    assert second.elastic.status().host == alone
    second.elastic.swap([0, 1, 2], "int4")
    elastic.unwrap(second)
    gc.collect()
    assert host.status().memory_bytes < alone.memory_bytes


def test_swaps_asked_for_inside_a_forward_are_committed_after_it(wrapped: Any) -> None:
    """Nothing that the forward reads is written meanwhile: its logits are those of the model as it began."""
    model = build("llama-gqa")
    expected = model(**prompt()).logits
    rt = wrapped(model, variants=("int4",)).elastic
    packed = static("llama-gqa", {0: "int4", 1: "int4", 2: "int4"})(**prompt()).logits
    asked: list[Any] = []

    def ask(*args: Any) -> None:
        with pytest.raises(StateError, match="inside a forward pass"):
            rt.restore()
        asked.append(rt.swap([0, 1, 2], "int4", wait=False) if len(asked) % 2 == 0 else rt.restore(wait=False))

    handle = layers(model)[1].register_forward_hook(ask)
    for before, after in ((expected, "int4"), (packed, "float32")) * 3:
        assert torch.equal(model(**prompt()).logits, before)
        asked[-1].result()
        assert variants(model) == [after] * 3
    handle.remove()


@pytest.mark.parametrize("architecture", CONFIGS)
def test_forward_passes_compute_from_the_parts(architecture: str, monkeypatch: Any, wrapped: Any) -> None:
    """No matrix is expanded as a whole, experts included."""
    from elastic.quant.variants.packed_weight import PackedMatrix

    model = wrapped(build(architecture), variants=("int4",))
    rt = model.elastic
    rt.swap(range(rt.status().layers), "int4")

    def refuse(self: PackedMatrix) -> torch.Tensor:
        raise AssertionError(f"{self.shape} was expanded")

    monkeypatch.setattr(PackedMatrix, "value", refuse)
    cache = model(**prompt(2)).past_key_values
    model(torch.full((2, 1), 5), past_key_values=cache)


def test_swaps_on_a_device(device: str, wrapped: Any) -> None:
    model, reference = build("llama-gqa", device=device), build("llama-gqa", device=device)
    inputs = prompt(2, device=device)
    expected = model(**inputs).logits
    rt = wrapped(model, variants=VARIANTS).elastic
    for variant in VARIANTS:
        rt.swap([0, 1, 2], variant)
        packed = copy.deepcopy(reference)
        for layer in packed.model.layers:
            pack_static(layer, variant)
        assert torch.equal(model(**inputs).logits, packed(**inputs).logits)
        rt.check()
    rt.restore()
    assert torch.equal(model(**inputs).logits, expected)


def test_what_was_flipped_is_flipped_back_when_a_later_action_of_the_call_fails(monkeypatch: Any, wrapped: Any) -> None:
    """From every state that a layer can be in: full, released, packed."""
    model = build("llama-gqa")
    before = bits(model)
    rt = wrapped(model, variants=VARIANTS).elastic
    rt.release(1)
    rt.swap(2, "int8")
    rt.kv.trim()
    owners, expected = rt.status().places[0].owners, model(**prompt()).logits
    mechanism = rt._executor.runner.handlers[elastic.Swap]
    commit, calls = mechanism.commit, []

    def fail_at_last(prepared: Any) -> None:
        calls.append(prepared)
        commit(prepared)
        if len(calls) == 2:
            raise StateError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(mechanism, "commit", fail_at_last)
        with pytest.raises(StateError, match="injected"):
            rt.apply([elastic.Swap((0, 1), "int4"), elastic.Swap((2,), "int3")])
    assert len(calls) == 2
    calls.clear()
    assert [where[0].place for where in rt.status().residencies.values()] == ["cpu", HOST, "cpu"]
    assert variants(model) == ["float32", "float32", "int8"]
    assert torch.equal(model(**prompt()).logits, expected)
    assert_same_bits(model, before)
    rt.kv.trim()
    rt.check()
    assert rt.status().places[0].owners == owners
    assert rt.swap([0, 1, 2], "int4").status == "applied"


def test_a_parameter_that_begins_in_the_middle_of_a_word_is_swapped(wrapped: Any) -> None:
    model, expected = build("llama-gqa"), build("llama-gqa")(**prompt()).logits
    layer = model.model.layers[1].mlp.up_proj
    memory = torch.empty(layer.weight.numel() + 1)
    layer.weight = torch.nn.Parameter(memory[1:].view_as(layer.weight).copy_(layer.weight.detach()))
    wrapped(model, variants=["int4"])
    model.elastic.swap([1], "int4")
    assert not torch.equal(model(**prompt()).logits, expected)
    model.elastic.restore()
    assert torch.equal(model(**prompt()).logits, expected)
