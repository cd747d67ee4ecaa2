"""Weights leave their place and come back under a running model (laws 1, 2, 3, 5, 8)."""

from __future__ import annotations

import copy
import gc
import logging
import re
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from torch import nn

import elastic
from elastic import CapacityError, ConfigError, StateError
from elastic.runtime import build as runtime_build
from elastic.types import HOST
from elastic.weights.proxy.tensor import WeightProxy
from support.architectures import CONFIGS, build, prompt
from support.child_process import wait_for_the_janitor
from support.wrapped_model import PAGE, assert_same_bits, bits, layers, pickled, small, tight

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_layer_leaves_streams_and_returns_bit_for_bit(architecture: str, wrapped: Any) -> None:
    model = build(architecture)
    before, expected = bits(model), model(**prompt(3)).logits
    few = {**OPTIONS, "max_new_tokens": 4}
    tokens = model.generate(**prompt(3), **few)
    rt = wrapped(model).elastic
    count = rt.status().layers
    released = rt.release(range(count))
    assert released.layers == tuple(range(count))
    assert all(where[0].place == HOST for where in rt.status().residencies.values())
    assert any(isinstance(p, WeightProxy) for p in model.parameters())
    assert torch.equal(model(**prompt(3)).logits, expected)
    assert torch.equal(model.generate(**prompt(3), **few), tokens)
    assert_same_bits(model, before)
    rt.check()
    assert rt.restore().layers == tuple(range(count))
    assert not any(isinstance(p, WeightProxy) for p in model.parameters())
    assert torch.equal(model(**prompt(3)).logits, expected)
    assert_same_bits(model, before)
    rt.release([0, -1])
    elastic.unwrap(model)
    assert_same_bits(model, before)
    assert torch.equal(model(**prompt(3)).logits, expected)


def test_pages_of_a_release_are_kv_capacity_at_once_and_return(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model).elastic
    layer_bytes = rt.status().places[0].owners["layer:1"]
    capacity = rt.kv.capacity_bytes
    step = rt.plan(elastic.Release((1,)))[0]
    assert step.moved_bytes == sum(p.nbytes for p in layers(model)[1].parameters())
    assert rt.release(1).released_bytes == layer_bytes == step.released_pages * PAGE
    assert rt.kv.capacity_bytes == rt.kv.maximum_bytes == capacity + layer_bytes
    step = rt.plan(elastic.Release((0, 2)))[0]
    assert rt.release([0, 2]).released_bytes == layer_bytes == step.released_pages * PAGE  # one: a second buffer
    assert rt.restore().released_bytes == -2 * layer_bytes
    assert rt.kv.capacity_bytes == rt.kv.maximum_bytes == capacity
    step = rt.plan(elastic.Release((1,)))[0]
    assert step.moved_bytes == rt.release(1).moved_bytes == 0, "the host has them"


def test_a_limit_that_was_set_stays_through_a_release(wrapped: Any) -> None:
    rt = wrapped(build("llama-gqa")).elastic
    rt.kv.resize("1MiB")
    rt.release(0)
    assert rt.kv.limit_bytes == rt.kv.capacity_bytes == 1 << 20
    rt.restore()
    assert rt.kv.limit_bytes == 1 << 20


def test_a_generation_that_has_run_out_of_kv_goes_on_after_a_release(wrapped: Any) -> None:
    model = build("llama-gqa")
    expected = model.generate(**prompt(length=150), **{**OPTIONS, "max_new_tokens": 60})
    rt = wrapped(model, tight(model, 21), kv_layout="token_major").elastic
    cache = elastic.ElasticCache(model)
    tokens = prompt(length=150)["input_ids"]
    logits = model(tokens, past_key_values=cache).logits
    ran_out = 0
    while tokens.shape[1] < expected.shape[1]:
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
        try:
            logits = model(tokens[:, -1:], past_key_values=cache).logits
        except CapacityError:
            ran_out += 1
            assert cache.get_seq_length() == tokens.shape[1] - 1
            rt.release([0, 1, 2])
            logits = model(tokens[:, -1:], past_key_values=cache).logits
    assert ran_out == 1
    assert torch.equal(tokens, expected)


def test_a_restore_waits_for_caches_and_completes_as_they_end(wrapped: Any) -> None:
    model = build("llama-gqa")
    expected = model(**prompt()).logits
    rt = wrapped(model, tight(model, 14), kv_layout="token_major").elastic
    rt.release([0, 1, 2])
    cache = model(**prompt(length=250)).past_key_values
    assert rt.plan(elastic.Restore((0, 1, 2)))[0].status == "deferred"
    result = rt.restore()
    assert (result.status, result.layers, result.deferred) == ("deferred", (0,), (1, 2))
    assert rt.kv.capacity_bytes < rt.kv.maximum_bytes, "new caches do not get what the layers wait for"
    model(torch.tensor([[5]]), past_key_values=cache)
    del cache
    gc.collect()
    wait_for_the_janitor()
    rt.apply(())  # after the retry that the end of the cache asked for
    assert all(where[0].place == "cpu" for where in rt.status().residencies.values())
    assert torch.equal(model(**prompt()).logits, expected)
    last = rt.events()[-1]
    assert (last.why, last.outcome) == ("pages came free", "applied")


def test_a_release_ends_the_waiting_of_a_restore(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, tight(model, 14), kv_layout="token_major").elastic
    rt.release([0, 1, 2])
    cache = model(**prompt(length=250)).past_key_values
    assert rt.restore().status == "deferred"
    rt.release([0, 1, 2])
    assert rt.kv.capacity_bytes == rt.kv.maximum_bytes
    del cache
    gc.collect()
    wait_for_the_janitor()
    rt.apply(())
    assert all(where[0].place == HOST for where in rt.status().residencies.values())


def test_a_view_held_outside_keeps_its_pages_and_nothing_else(wrapped: Any) -> None:
    model = build("llama-gqa")
    before = bits(model)
    rt = wrapped(model).elastic
    owners = rt.status().places[0].owners
    maximum = rt.kv.maximum_bytes
    view = layers(model)[1].mlp.up_proj.weight.detach()[:2]
    result = rt.release(1)
    assert 0 < result.retained_bytes < owners["layer:1"]
    assert result.retained_bytes == rt.status().places[0].owners["retained"]
    assert rt.kv.maximum_bytes == maximum + owners["layer:1"] - result.retained_bytes
    assert torch.equal(view, before["model.layers.1.mlp.up_proj.weight"][:2])
    rt.restore()
    assert torch.equal(view, before["model.layers.1.mlp.up_proj.weight"][:2])
    rt.check()
    assert view is not None
    view = None
    wait_for_the_janitor()
    assert "retained" not in rt.status().places[0].owners
    assert rt.kv.maximum_bytes == maximum
    assert_same_bits(model, before)


def test_a_reference_to_a_parameter_follows_it(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    parameter = layers(model)[1].mlp.up_proj.weight
    before = parameter.detach().clone()
    assert model.elastic.release(1).retained_bytes == 0
    assert isinstance(parameter, WeightProxy)
    assert isinstance(parameter, torch.nn.Parameter)
    assert torch.equal(parameter, before)
    model.elastic.restore()
    assert type(parameter) is torch.nn.Parameter
    assert layers(model)[1].mlp.up_proj.weight is parameter


def test_a_parameter_that_torch_will_not_exchange_is_replaced_and_returns(wrapped: Any) -> None:
    import weakref

    model = wrapped(build("llama-gqa"))
    projection = layers(model)[1].mlp.up_proj
    parameter = projection.weight
    watched, before = weakref.ref(parameter), parameter.detach().clone()
    assert model.elastic.release(1).retained_bytes > 0
    assert isinstance(projection.weight, WeightProxy)
    assert type(parameter) is torch.nn.Parameter
    assert torch.equal(parameter, before)
    model.elastic.restore()
    assert projection.weight is parameter is watched()
    assert torch.equal(parameter, before)


def test_a_released_model_is_saved_copied_and_printed_as_if_it_were_whole(wrapped: Any, tmp_path: Path) -> None:
    model = build("llama-gqa")
    model.save_pretrained(tmp_path / "plain")
    expected = model(**prompt()).logits
    wrapped(model).elastic.release([0, 2])
    model.save_pretrained(tmp_path / "released")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "released" / name).read_bytes()
    for other in (copy.deepcopy(model), pickled(model)):
        assert not any(isinstance(p, WeightProxy) for p in other.parameters())
        assert torch.equal(other(**prompt()).logits, expected)
    assert "host memory" in repr(layers(model)[0].mlp.up_proj.weight)
    assert str(model) == str(build("llama-gqa"))
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in build("llama-gqa").parameters())


def test_another_parameter_has_a_copy_of_a_released_weight(wrapped: Any) -> None:
    rt = wrapped(model := build("llama-gqa"), variants=("int8",)).elastic
    weight = model.model.layers[1].mlp.up_proj.weight
    before = weight.detach().clone()
    for action in (elastic.Release((1,)), elastic.Swap((1,), "int8")):
        rt.apply(action)
        with pytest.raises(StateError, match=r"of model.layers.1, which is in .*give that a copy, as .detach\(\)"):
            nn.Parameter(weight)
        assert torch.equal(nn.Parameter(weight.detach()), before)
        assert torch.equal(nn.Parameter(weight.data), before)
        rt.restore()
    assert torch.equal(nn.Parameter(weight), before)


def test_a_library_that_makes_parameters_like_a_released_one_is_refused_in_words(wrapped: Any) -> None:
    from accelerate import cpu_offload, hooks

    model = build("llama-gqa")
    expected = model(**prompt()).logits
    wrapped(model).elastic.release(0)
    with pytest.raises(StateError, match=r"another library would put a parameter .*; unwrap the model before"):
        cpu_offload(model, "cpu")
    hooks.remove_hook_from_submodules(model)
    assert torch.equal(model(**prompt()).logits, expected)
    with pytest.raises(StateError, match="another library"):
        type(model.model.layers[0].mlp.up_proj.weight)(torch.zeros(3), requires_grad=False)


@pytest.mark.parametrize("name", ["half", "share_memory", "double"])
@pytest.mark.parametrize("action", [elastic.Release((1,)), elastic.Swap((1,), "int8")], ids=["released", "packed"])
def test_a_cast_or_a_move_is_refused_as_a_whole(action: Any, name: str, wrapped: Any) -> None:
    rt = wrapped(model := build("llama-gqa"), variants=("int8",)).elastic
    rt.apply(action)
    expected, addresses = (
        model(**prompt()).logits,
        [model.lm_head.weight.data_ptr(), model.model.norm.weight.data_ptr()],
    )
    with pytest.raises(StateError, match=r"of model.layers.1, which is in .*unwrap"):
        getattr(model, name)()
    assert torch.equal(model.float().cpu()(**prompt()).logits, expected)
    assert [model.lm_head.weight.data_ptr(), model.model.norm.weight.data_ptr()] == addresses
    getattr(elastic.unwrap(model), name)()


@pytest.mark.parametrize("released", [(), (0, 1, 2)])
def test_load_state_dict_writes_what_is_released_too(released: tuple[int, ...], wrapped: Any) -> None:
    model, other = build("llama-gqa"), build("llama-gqa", seed=7)
    rt = wrapped(model).elastic
    rt.release(released)
    model(**prompt())
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(**prompt()).logits, other(**prompt()).logits)
    rt.release([0, 1, 2])
    assert torch.equal(model(**prompt()).logits, other(**prompt()).logits)
    rt.restore()
    assert_same_bits(model, bits(other))
    assert torch.equal(model(**prompt()).logits, other(**prompt()).logits)


def test_what_is_written_while_a_layer_returns_is_not_lost(wrapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = build("llama-gqa"), build("llama-gqa", seed=7)
    rt = wrapped(model).elastic
    rt.release([0, 1, 2])
    mechanism = rt._executor.runner.handlers[elastic.Restore]
    prepare = mechanism.prepare

    def write_after(action: elastic.Restore) -> Any:
        prepared = prepare(action)
        model.load_state_dict(other.state_dict())
        return prepared

    with monkeypatch.context() as patch:
        patch.setattr(mechanism, "prepare", write_after)
        with pytest.raises(StateError, match=r"layers\.0 were written while they were on their way"):
            rt.restore()
    rt.check()
    assert all(where[0].place == HOST for where in rt.status().residencies.values())
    assert torch.equal(model(**prompt()).logits, other(**prompt()).logits)
    rt.restore()
    assert_same_bits(model, bits(other))


def test_weights_changed_behind_torchs_back_are_not_lost_by_a_release(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    rt = model.elastic
    rt.release(1)
    rt.restore(1)
    weight = layers(model)[1].mlp.up_proj.weight
    weight.data += 1  # as a merge of adapters does
    expected = weight.detach().clone()
    rt.release(1)
    assert torch.equal(weight, expected)
    rt.restore(1)
    assert torch.equal(weight, expected)


def test_writing_into_a_released_weight_is_refused_in_words(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    model.elastic.release(1)
    weight, before = layers(model)[1].mlp.up_proj.weight, bits(model)
    for write in (
        lambda: weight.mul_(2),
        lambda: weight.__setitem__(0, 1.0),
        lambda: setattr(weight, "data", torch.zeros_like(weight.detach())),
        lambda: torch.add(weight, 1, out=weight),
        lambda: model.to(torch.float16),
    ):
        with pytest.raises(StateError, match=r"layers\.\d, which is in host memory; restore"):
            write()
    with pytest.raises(StateError, match="no address"):
        weight.data_ptr()
    assert torch.equal(weight, before["model.layers.1.mlp.up_proj.weight"])


def test_moves_that_move_nothing_are_allowed(wrapped: Any) -> None:
    model = build("llama-gqa")
    expected = model(**prompt()).logits
    wrapped(model).elastic.release(1)
    assert model.to("cpu").to(torch.float32).float().cpu().eval().requires_grad_(False) is model
    assert torch.equal(model(**prompt()).logits, expected)


@pytest.mark.parametrize("how", ["cast", "assign", "offload"])
def test_weights_replaced_from_outside_are_noticed(how: str, wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    if how == "cast":
        model.half().float()
    elif how == "offload":
        from accelerate import cpu_offload, hooks

        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        model.load_state_dict(bits(build("llama-gqa", seed=3)), assign=True)
    with pytest.raises(StateError, match=r"layers\.0.*replaced outside Elastic.*unwrap\(model\) and wrap it again"):
        model(**prompt())
    if how == "offload":
        hooks.remove_hook_from_submodules(model)
    changed = bits(model)
    elastic.unwrap(model)
    assert_same_bits(model, changed)
    wrapped(model)
    model(**prompt())


def test_requires_grad_and_gradients(wrapped: Any) -> None:
    model = build("llama-gqa").requires_grad_(True)
    rt = wrapped(model).elastic
    rt.release(1)
    assert all(p.requires_grad for p in model.parameters())
    layers(model)[1].requires_grad_(False)
    rt.restore(1)
    assert not any(p.requires_grad for p in layers(model)[1].parameters())
    model(**prompt()).logits.sum().backward()
    with pytest.raises(StateError, match=r"layers\.0 has gradients"):
        rt.release(0)
    model.zero_grad()
    rt.release(0)


@pytest.mark.parametrize("held", [False, True], ids=["exchanged", "replaced"])
@pytest.mark.parametrize("action", [elastic.Release((1,)), elastic.Swap((1,), "int8")], ids=["release", "swap"])
def test_what_is_frozen_while_an_action_waits_stays_frozen(action: Any, held: bool, wrapped: Any) -> None:
    rt = wrapped(model := build("llama-gqa").requires_grad_(True), variants=("int8",)).elastic
    parameters = list(layers(model)[1].parameters()) if held else []
    references = [weakref.ref(parameter) for parameter in parameters]  # torch exchanges none of these
    for prepared in (action, elastic.Restore((1,))):
        model.requires_grad_(True)
        told = rt.prepare(prepared)
        model.requires_grad_(False)
        rt.commit(told.id)
        assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == []
    assert all(reference() is parameter for reference, parameter in zip(references, parameters, strict=True))
    assert not any(parameter.requires_grad for parameter in parameters)


@pytest.mark.parametrize("gone", [True, False], ids=["deleted", "none"])
def test_a_buffer_that_is_gone_since_is_no_fault_of_an_action(gone: bool, wrapped: Any) -> None:
    model = build("llama-gqa")
    layers_of = model.model.layers
    layers_of[0].register_buffer("statistics", torch.zeros(3))
    rt = wrapped(model, places=[small(4 << 20), small(4 << 20, "cpu#other")], variants=("int8",)).elastic
    expected, owners = model(**prompt()).logits, rt.status().places[0].owners
    if gone:
        del layers_of[0].statistics
    else:
        layers_of[0].statistics = None
    for action in (elastic.Swap((0,), "int8"), elastic.Restore((0,)), elastic.Release((0,)), elastic.Restore((0,))):
        rt.apply(action)
        rt.check()
    rt.migrate(0, "cpu#other")
    rt.migrate(0, "cpu")
    assert rt.status().places[0].owners == owners
    assert torch.equal(model(**prompt()).logits, expected)
    assert torch.equal(elastic.unwrap(model)(**prompt()).logits, expected)


def test_tied_and_shared_weights_stay_where_they_are(wrapped: Any) -> None:
    model = build("llama-gqa")
    blocks = model.model.layers
    blocks[2].mlp.up_proj.weight = blocks[0].mlp.up_proj.weight  # tied across two layers
    blocks[1].mlp.gate_proj.weight = blocks[1].mlp.up_proj.weight  # tied within one
    expected = model(**prompt()).logits
    rt = wrapped(model).elastic
    assert "fixed:model.layers.0" in rt.status().places[0].owners
    rt.release([0, 1, 2])
    assert torch.equal(model(**prompt()).logits, expected)
    assert blocks[1].mlp.gate_proj.weight is blocks[1].mlp.up_proj.weight
    assert isinstance(blocks[1].mlp.gate_proj.weight, WeightProxy)
    assert type(blocks[0].mlp.up_proj.weight) is torch.nn.Parameter
    elastic.unwrap(model)
    assert blocks[2].mlp.up_proj.weight is blocks[0].mlp.up_proj.weight
    assert blocks[1].mlp.gate_proj.weight is blocks[1].mlp.up_proj.weight


def test_parameters_within_another_ones_memory_stay_where_they_are(wrapped: Any) -> None:
    """Also where a third one lies between: the whole, a part of it, a later part."""
    model = build("llama-gqa")
    whole = torch.randn(3 * 48, 32)
    mlps = [layer.mlp for layer in model.model.layers]
    mlps[0].up_proj.weight = torch.nn.Parameter(whole, requires_grad=False)
    mlps[1].up_proj.weight = torch.nn.Parameter(whole[10:58], requires_grad=False)
    mlps[2].up_proj.weight = torch.nn.Parameter(whole[96:], requires_grad=False)
    rt = wrapped(model).elastic
    rt.release([0, 1, 2])
    assert not any(isinstance(mlp.up_proj.weight, WeightProxy) for mlp in mlps)
    whole.zero_()
    assert not any(bool(mlp.up_proj.weight.any()) for mlp in mlps)


def test_a_layer_used_twice_has_no_weights_of_its_own(wrapped: Any) -> None:
    model = build("llama-gqa")
    model.model.layers[2] = model.model.layers[0]
    expected = model(**prompt(), use_cache=False).logits
    rt = wrapped(model).elastic
    with pytest.raises(ConfigError, match=r"layers\.2 has no weights of its own"):
        rt.release(2)
    rt.release(1)
    assert torch.equal(model(**prompt(), use_cache=False).logits, expected)


def test_adapters_stay_and_what_is_under_them_is_released(wrapped: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(build("llama-gqa"), config).eval().requires_grad_(False)
    expected, before = model(**prompt()).logits, bits(model)
    rt = wrapped(model).elastic
    rt.release([0, 1, 2])
    released = {name for name, p in model.named_parameters() if isinstance(p, WeightProxy)}
    assert released
    assert not any("lora_" in name for name in released)
    assert torch.equal(model(**prompt()).logits, expected)
    with pytest.raises(StateError, match="restore"):
        model.merge_adapter()
    assert_same_bits(model, before)
    rt.restore()
    assert torch.equal(model(**prompt()).logits, expected)


@pytest.mark.parametrize("architecture", ["llama-gqa", "mixtral"])
@pytest.mark.parametrize("first", ["adapters", "wrap"])
def test_parameters_that_are_adapted_by_name_are_released_and_packed(
    architecture: str, first: str, wrapped: Any
) -> None:
    peft = pytest.importorskip("peft")
    adapted = {"llama-gqa": "mlp.up_proj.weight", "mixtral": "experts.down_proj"}[architecture]
    config = peft.LoraConfig(target_parameters=[adapted], target_modules=[], init_lora_weights=False)

    def adapt(model: Any) -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(model, config).eval()

    def gradients(model: Any) -> list[torch.Tensor]:
        trained = [p for name, p in model.named_parameters() if "lora_" in name]
        return list(torch.autograd.grad(model(**prompt()).logits.sum(), trained))

    plain, inner = adapt(build(architecture)), build(architecture)
    model = adapt(inner) if first == "adapters" else inner
    rt = wrapped(model, variants=("int8",)).elastic
    model = model if first == "adapters" else adapt(model)
    rt.release([0, 1])
    released = {name.rsplit(".", 1)[1] for name, p in model.named_parameters() if isinstance(p, WeightProxy)}
    assert adapted.rsplit(".", 1)[1] in released
    assert torch.equal(model(**prompt()).logits, plain(**prompt()).logits)
    assert all(map(torch.equal, gradients(model), gradients(plain)))
    rt.swap(1, "int8")
    assert 0 < (model(**prompt()).logits - plain(**prompt()).logits).abs().max() < 0.5
    rt.restore()
    assert torch.equal(model(**prompt()).logits, plain(**prompt()).logits)
    model.merge_adapter()
    torch.testing.assert_close(model(**prompt()).logits, plain(**prompt()).logits)


def test_projections_can_be_called_by_themselves(wrapped: Any) -> None:
    model = build("gpt2")
    x = torch.randn(1, 3, 32)
    expected = model.transformer.h[1](x)
    rt = wrapped(model).elastic
    rt.release(1)
    assert torch.equal(model.transformer.h[1](x)[0], expected[0])
    parts = model.transformer.h[1].mlp.c_fc, build("gpt2").transformer.h[1].mlp.c_fc
    assert torch.equal(parts[0](x), parts[1](x))


def test_layers_are_named_by_index_or_module_name(wrapped: Any) -> None:
    rt = wrapped(build("llama-gqa")).elastic
    assert rt.release("model.layers.1").layers == (1,)
    assert rt.release([1, -1, "model.layers.2"]).layers == (2,)
    assert rt.release(()).layers == ()
    assert rt.restore(2).layers == (2,)
    for wrong in (3, -4, "model.layers.9", True, 1.5, "lm_head"):
        with pytest.raises(ConfigError, match=r"layer .* is no decoder layer of this model; use 0 to 2"):
            rt.release([wrong])
    future = rt.restore(wait=False)
    assert future.result()[0].layers == (1,)


def test_actions_that_cannot_be_are_refused_and_change_nothing(wrapped: Any) -> None:
    rt = wrapped(build("llama-gqa")).elastic
    for wrong in (elastic.Release((3,)), elastic.Restore((-4,))):
        with pytest.raises(ConfigError, match="no decoder layer"):
            rt.apply((elastic.Release((0,)), wrong))
        with pytest.raises(ConfigError, match="no decoder layer"):
            rt.plan(wrong)
    with pytest.raises(ConfigError, match=r"layers \[1\] twice"):
        rt.apply((elastic.Release((0, 1)), elastic.Restore((1,))))
    with pytest.raises(ConfigError, match="no action of this model; there are ResizeKV, Release, Swap, Restore"):
        rt.apply(("release",))
    assert all(where[0].place == "cpu" for where in rt.status().residencies.values())
    rt.apply((elastic.Release((0,)), elastic.Release((1,)), elastic.ResizeKV("cpu", 1 << 20)))
    assert [where[0].place for where in rt.status().residencies.values()] == [HOST, HOST, "cpu"]


def test_a_packed_weight_that_lies_transposed_is_viewed_by_its_own_strides(wrapped: Any) -> None:
    """The matrices of GPT-2 are [inputs, outputs]: what expands a packed one makes it [outputs, inputs]."""
    model = wrapped(build("gpt2"), variants=("int8",))
    sizes = [(p.numel(), p.stride()) for p in model.parameters()]
    model.elastic.swap([0], "int8")
    flat = [parameter.view(-1) for parameter in model.parameters()]
    assert [(len(view), p.stride()) for view, p in zip(flat, model.parameters(), strict=True)] == sizes
    weight = model.transformer.h[0].attn.c_attn.weight
    assert torch.equal(weight.view(-1).view(weight.shape), weight + 0)
    assert len(nn.utils.parameters_to_vector(model.parameters())) == sum(size for size, _ in sizes)


@pytest.mark.parametrize("variant", [None, "int8"])
def test_views_of_weights_that_are_elsewhere_or_packed_are_made_in_every_mode(variant: Any, wrapped: Any) -> None:
    """Under inference mode too, where what is made is no view of a tensor that was made outside of it."""
    model = wrapped(build("llama-gqa"), variants=("int8",))
    before = bits(model)
    if variant is None:
        model.elastic.release([1])
    else:
        model.elastic.swap([1], variant)

    def views() -> list[torch.Tensor]:
        weight = model.model.layers[1].mlp.up_proj.weight
        return [weight.detach(), weight.t(), weight.view(-1), weight[1:], *weight.chunk(2)]

    expected = views()
    with torch.inference_mode():
        assert_same_bits(model, before)
        assert all(map(torch.equal, views(), expected))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_released_layers_stream_in_every_mode(mode: Any, wrapped: Any) -> None:
    model = build("llama-gqa")
    expected = model.generate(**prompt(), **OPTIONS)
    rt = wrapped(model).elastic
    with mode():
        rt.release([0, 1, 2])
        assert torch.equal(model.generate(**prompt(), **OPTIONS), expected)
        rt.restore()
        assert torch.equal(model.generate(**prompt(), **OPTIONS), expected)
    model(**prompt())


def test_gradients_flow_through_streamed_layers_to_what_is_trained(wrapped: Any) -> None:
    plain, model = build("llama-gqa"), build("llama-gqa")
    wrapped(model).elastic.release([0, 1, 2])
    for each in (plain, model):
        each.get_input_embeddings().weight.requires_grad_(True)
        each(**prompt(), use_cache=False).logits.sum().backward()
    assert torch.equal(plain.get_input_embeddings().weight.grad, model.get_input_embeddings().weight.grad)


def test_unwrap_without_memory_leaves_a_model_that_works(wrapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama-gqa")
    expected, before = model(**prompt()).logits, bits(model)
    wrapped(model).elastic.release(1)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_strided", refuse)
        with pytest.raises(RuntimeError, match="allocate"):
            elastic.unwrap(model)
    assert torch.equal(model(**prompt()).logits, expected)
    assert_same_bits(model, before)
    model.elastic = None  # not to be unwrapped again


def test_a_model_twice_its_budget_runs(wrapped: Any) -> None:
    config = t.LlamaConfig(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = t.LlamaForCausalLM(config).eval().requires_grad_(False)
    expected = model.generate(**prompt(3), **OPTIONS)
    before = bits(model)
    place = small(sum(p.nbytes for p in model.parameters()) // 2 + 40 * PAGE)
    rt = wrapped(model, place, kv_layout="token_major").elastic
    absent = [where[0].place == HOST for where in rt.status().residencies.values()]
    assert 0 < sum(absent) < 8
    assert torch.equal(model.generate(**prompt(3), **OPTIONS), expected)
    assert rt.restore().status == "applied", "all that wrap left there"
    with pytest.raises(CapacityError, match=r"no room for \d more layers beside its KV cache"):
        rt.restore(range(8))
    assert torch.equal(model.generate(**prompt(3), **OPTIONS), expected)
    assert_same_bits(model, before)
    rt.release(range(8))
    assert torch.equal(model.generate(**prompt(3), **OPTIONS), expected)
    assert rt.restore().status == "applied"
    assert absent == [where[0].place == HOST for where in rt.status().residencies.values()]
    rt.kv.resize("64KiB")
    rt.restore(absent.index(True))
    rt.check()


def test_a_budget_without_room_for_a_prefetch_buffer_refuses_releases_in_words(wrapped: Any) -> None:
    model = build("llama-gqa")
    elastic.wrap(model, places=small(64 << 20, "cpu#probe"))
    owners = model.elastic.status().places[0].owners
    elastic.unwrap(model)
    rt = wrapped(model, small(sum(owners.values()) - PAGE)).elastic
    assert all(where[0].place == "cpu" for where in rt.status().residencies.values())
    with pytest.raises(CapacityError, match=r"no room for the prefetch buffer.*larger budget"):
        rt.release(0)


def test_threads_stream_one_model(wrapped: Any) -> None:
    model = build("llama-gqa")
    prompts = [prompt(1 + i % 2, 20 + i)["input_ids"] for i in range(4)]
    expected = [model.generate(ids, **OPTIONS) for ids in prompts]
    wrapped(model).elastic.release([0, 1, 2])
    found: list[Any] = [None] * 4

    def write(i: int) -> None:
        found[i] = model.generate(prompts[i], **OPTIONS)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for tokens, right in zip(found, expected, strict=True):
        assert torch.equal(tokens, right)


@pytest.mark.parametrize("worth", [0, 64 << 20])
def test_files_that_are_not_the_models_are_not_passed_over_in_silence(
    wrapped: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, worth: int
) -> None:
    monkeypatch.setattr(runtime_build, "WORTH_A_WARNING", worth)
    caplog.set_level(logging.INFO, "elastic.runtime.build")
    model = build("llama-gqa")
    model.save_pretrained(tmp_path)
    wrapped(t.AutoModelForCausalLM.from_pretrained(tmp_path).eval(), checkpoint=tmp_path)
    assert not caplog.records
    wrapped(build("llama-gqa", dtype=torch.bfloat16), "cpu#b", checkpoint=tmp_path)
    wrapped(build("gpt2"), "cpu#c", checkpoint=tmp_path)
    words = [record.getMessage() for record in caplog.records]
    assert [re.sub(r"\d+", "N", text).startswith("checkpoint: of N parameters") for text in words] == [True, True]
    assert "27 are in it by name" in words[0]
    assert " 0 are in it by name" in words[1]
    levels = [record.levelname for record in caplog.records]
    assert levels == ["INFO" if worth else "WARNING", "WARNING"]  # a small model in another dtype; another model


def test_a_checkpoint_serves_as_the_host_copy(wrapped: Any, tmp_path: Path) -> None:
    model = build("llama-gqa")
    model.save_pretrained(tmp_path)
    model = t.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    expected = model(**prompt()).logits
    rt = wrapped(model, checkpoint=tmp_path).elastic
    gc.collect()
    before = rt.status().host
    rt.release([0, 1, 2])
    host = rt.status().host
    assert host.file_bytes > before.file_bytes
    assert host.memory_bytes == before.memory_bytes
    assert torch.equal(model(**prompt()).logits, expected)
    model.load_state_dict(build("llama-gqa", seed=5).state_dict())
    assert rt.status().host.memory_bytes > before.memory_bytes, "what was written is not the file's any more"
    assert torch.equal(model(**prompt()).logits, build("llama-gqa", seed=5)(**prompt()).logits)
    again = t.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(**prompt()).logits, expected), "the file is never written"


def test_two_models_on_one_place_lend_each_other_pages(wrapped: Any) -> None:
    first, second = build("llama-gqa"), build("llama-gqa")
    expected = first.generate(**prompt(), **OPTIONS)
    place = small(16 << 20, "cpu#shared")
    wrapped(first, place)
    wrapped(second, place)
    gc.collect()
    host = first.elastic.status().host.memory_bytes
    first.elastic.release([0, 1, 2])
    one = first.elastic.status().host.memory_bytes
    second.elastic.release([0, 1, 2])
    assert second.elastic.status().host.memory_bytes == one > host, "equal weights are held once"
    for model in (first, second):
        assert torch.equal(model.generate(**prompt(), **OPTIONS), expected)
        model.elastic.check()
    first.elastic.restore()
    assert torch.equal(first.generate(**prompt(), **OPTIONS), expected)
    assert torch.equal(second.generate(**prompt(), **OPTIONS), expected)


@torch.no_grad()
def test_heads_that_change_places_within_a_matrix_are_not_lost(wrapped: Any) -> None:
    """Sums of the bytes of a row are the same as before."""
    model = build("llama-gqa")
    rt = wrapped(model, variants=["int4"]).elastic
    rt.release(1)
    rt.restore(1)  # the host store has the weights
    weight = model.model.layers[1].self_attn.o_proj.weight
    turned = weight.roll(8, dims=1)
    weight.copy_(turned)
    expected = model(**prompt()).logits
    rt.release(1)
    assert torch.equal(model(**prompt()).logits, expected)
    rt.restore(1)
    rt.swap(1, "int4")
    rt.restore(1)
    assert torch.equal(weight, turned)
    assert torch.equal(model(**prompt()).logits, expected)
