"""`wrap` takes, `unwrap` gives back exactly what it took (law 3); what cannot be wrapped is refused in words."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from torch import nn

import elastic
from elastic import CapacityError, ConfigError, StateError
from elastic.memory import places
from elastic.memory.pages.background import janitor
from support.architectures import CONFIGS, GQA, build, prompt
from support.child_process import wait_for_the_janitor
from support.wrapped_model import pickled, small


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Everything that a wrap could leave behind."""
    return {
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "parameters": [(id(p), p.stride(), p.requires_grad) for p in model.parameters()],
        "hooks": [(n, len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()],
        "attributes": {n: sorted(vars(m)) for n, m in model.named_modules()},
        "forward": [type(m).forward for m in model.modules()],
        "config": model.config.to_json_string(),  # type: ignore[union-attr, operator]
        "attention": model.config._attn_implementation,  # type: ignore[union-attr]
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    states = before.pop("state"), after.pop("state")
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert before == after


@pytest.mark.parametrize("architecture", CONFIGS)
def test_unwrap_leaves_the_model_as_it_was(architecture: str) -> None:
    model = build(architecture)
    before = fingerprint(model)
    expected = model(**prompt()).logits
    assert elastic.wrap(model, places="cpu=64MiB") is model
    assert elastic.runtime(model) is model.elastic
    assert list(model.state_dict()) == list(before["state"])
    model.generate(**prompt(), max_new_tokens=3, pad_token_id=0)
    assert elastic.unwrap(model) is model
    assert_same(before, fingerprint(model))
    assert torch.equal(model(**prompt()).logits, expected)
    assert not places._open


def test_save_pretrained_of_a_wrapped_model_is_the_models_own(wrapped: Any, tmp_path: Path) -> None:
    model = build("llama-gqa")
    model.save_pretrained(tmp_path / "plain")
    wrapped(model)
    model.save_pretrained(tmp_path / "wrapped")
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "wrapped" / name).read_bytes()
    loaded = t.AutoModelForCausalLM.from_pretrained(tmp_path / "wrapped")
    assert torch.equal(loaded(**prompt()).logits, model(**prompt()).logits)


class Heard:
    """A hook that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: Any) -> None:
        self.calls += 1


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_is_a_plain_model_that_can_be_wrapped_itself(how: str, wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    expected = model(**prompt()).logits
    other = copy.deepcopy(model) if how == "deepcopy" else pickled(model)
    with pytest.raises(StateError, match="not wrapped"):
        elastic.runtime(other)
    assert torch.equal(other(**prompt()).logits, expected)
    assert model.elastic.kv.used_bytes == 0
    wrapped(other, places=elastic.Place("cpu#copy", torch.device("cpu"), 64 << 20))
    out = other(**prompt())
    assert other.elastic.kv.used_bytes > 0
    assert model.elastic.kv.used_bytes == 0
    assert torch.equal(out.logits, expected)
    elastic.unwrap(other)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in other.modules())
    assert other.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "from a file"])
@pytest.mark.parametrize("places", [["cpu=64MiB"], ["cpu#a=64MiB", "cpu#b=64MiB"]], ids=["one place", "two places"])
def test_a_copy_has_nothing_of_elastic(how: str, places: list[str], wrapped: Any) -> None:
    """Nor does its pickle need Elastic where it is read. Hooks of others come along."""
    model, heard = build("llama-gqa"), Heard()
    model.model.layers[1].register_forward_hook(heard)
    before, expected = fingerprint(model), model(**prompt()).logits
    wrapped(model, places, variants=("int8",))
    model.elastic.swap([0], "int8")
    model.elastic.release([1])
    with elastic.ContinuousEngine(model):
        if how == "deepcopy":
            other = copy.deepcopy(model)
        else:
            assert b"elastic" not in pickle.dumps(model)
            other = pickle.loads(pickle.dumps(model)) if how == "pickle" else pickled(model)
    after = fingerprint(other)
    assert [shape for _, *shape in after.pop("parameters")] == [shape for _, *shape in before.pop("parameters")]
    assert_same(before, after)
    assert {type(parameter) for parameter in other.parameters()} == {nn.Parameter}
    assert torch.equal(other(**prompt()).logits, expected)
    (copied,) = other.model.layers[1]._forward_hooks.values()
    assert copied is not heard
    assert copied.calls == heard.calls + 1
    with pytest.raises(AttributeError, match="no attribute 'elastic'"):
        _ = other.elastic


def test_caches_of_any_kind_outlive_unwrap(wrapped: Any) -> None:
    model = wrapped(build("mistral-sliding"))
    cache = elastic.ElasticCache(model)
    model(**prompt(length=30), past_key_values=cache)
    copies = copy.deepcopy(cache)
    keys = [layer.keys.clone() for layer in cache.layers]
    elastic.unwrap(model)
    for layer, copied, before in zip(cache.layers, copies.layers, keys, strict=True):
        assert type(layer) is t.cache_utils.DynamicSlidingWindowLayer
        assert torch.equal(layer.keys, before[:, :, -layer.keys.shape[2] :])
        assert torch.equal(layer.keys, copied.keys)
    step = torch.tensor([[5]])
    assert torch.equal(model(step, past_key_values=cache).logits, model(step, past_key_values=copies).logits)


def test_a_view_outlives_unwrap(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    cache = model(**prompt()).past_key_values
    view = cache.layers[0].keys
    before = view.clone()
    elastic.unwrap(model)
    del cache
    gc.collect()
    assert torch.equal(view, before)


def test_a_model_that_is_dropped_gives_its_memory_back() -> None:
    model = elastic.wrap(build("llama-gqa"), places="cpu=64MiB")
    model.generate(**prompt(), max_new_tokens=3, pad_token_id=0)
    gone = weakref.ref(model)
    pool = places._open["cpu"][0]
    del model
    gc.collect()
    assert gone() is None
    wait_for_the_janitor()
    assert "cpu" not in places._open
    assert pool.backend.created == 0


@pytest.mark.parametrize("absent", [False, True])
def test_parts_of_a_model_that_is_gone_compute_or_say_why_not(absent: bool) -> None:
    model = build("llama-gqa")
    ids = prompt()["input_ids"]
    with torch.no_grad():
        expected = model.model(ids).last_hidden_state
    elastic.wrap(model, places="cpu=64MiB")
    if absent:
        model.elastic.release([1])
    part = model.model
    del model
    gc.collect()
    wait_for_the_janitor()
    assert "cpu" not in places._open
    with torch.no_grad(), pytest.raises(StateError, match="a part of is gone") if absent else nullcontext():
        assert torch.equal(part(ids).last_hidden_state, expected)
    other = build("llama-gqa")
    other.model = part
    with pytest.raises(StateError, match="load them again if it is gone"):
        elastic.wrap(other)


def test_a_part_that_computes_as_its_model_goes_holds_up_nothing_else() -> None:
    model = elastic.wrap(build("llama-gqa"), places="cpu=64MiB")
    part, inside, go_on, others = model.model, threading.Event(), threading.Event(), threading.Event()
    part.norm.register_forward_pre_hook(lambda *_: (inside.set(), go_on.wait(240))[:0] or None)
    thread = threading.Thread(target=part, args=(prompt()["input_ids"],))
    thread.start()
    assert inside.wait(60)
    del model
    gc.collect()
    janitor.submit(others.set)
    try:
        assert others.wait(60)
        assert "cpu" in places._open
    finally:
        go_on.set()
        thread.join()
    wait_for_the_janitor()
    assert "cpu" not in places._open


def test_nothing_is_kept_of_a_wrap_that_was_undone() -> None:
    """Else weights that the model gets later would stand beside those that it had."""
    model = elastic.wrap(build("llama-gqa"), places="cpu=64MiB")
    gone = weakref.ref(model.elastic)
    elastic.unwrap(model)
    gc.collect()
    assert gone() is None


def test_the_ledger_sums_to_the_budget_with_the_model_in_it(wrapped: Any) -> None:
    model = build("llama-gqa")
    wrapped(model)
    (place,) = model.elastic.status().places
    assert sum(place.owners.values()) + place.free_bytes == place.budget_bytes
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert sum(place.owners.values()) >= parameters
    assert {"fixed:lm_head", "fixed:model.embed_tokens", "layer:0", "layer:2", "staging"} <= set(place.owners)
    (kv,) = model.elastic.status().kv
    assert kv.maximum_bytes == place.free_bytes
    here = (elastic.Residency("cpu", "float32", "whole"),)
    assert model.elastic.status().residencies == {f"model.layers.{i}": here for i in range(3)}


def test_two_models_share_a_place(wrapped: Any) -> None:
    first, second = build("llama-gqa"), build("gpt2")
    expected = [m.generate(**prompt(), max_new_tokens=8, pad_token_id=0) for m in (first, second)]
    place = elastic.Place("cpu#shared", torch.device("cpu"), 32 << 20)
    wrapped(first, places=place)
    wrapped(second, places=place)
    assert len(places._open) == 1
    for model, tokens in zip((first, second), expected, strict=True):
        assert torch.equal(model.generate(**prompt(), max_new_tokens=8, pad_token_id=0), tokens)
        model.elastic.check()


def test_peft_models_are_elastic_and_keep_their_adapters(wrapped: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(build("llama-gqa"), config).eval().requires_grad_(False)
    expected = model.generate(**prompt(3), max_new_tokens=8, pad_token_id=0)
    wrapped(model)
    assert torch.equal(model.generate(**prompt(3), max_new_tokens=8, pad_token_id=0), expected)
    assert model.elastic.status().kv[0].idle_bytes > 0
    with model.disable_adapter():
        assert not torch.equal(model.generate(**prompt(3), max_new_tokens=8, pad_token_id=0), expected)


def test_a_model_dispatched_by_accelerate_is_elastic(wrapped: Any) -> None:
    from accelerate import dispatch_model

    model = build("llama-gqa")
    expected = model.generate(**prompt(), max_new_tokens=8, pad_token_id=0)
    dispatch_model(model, {"": "cpu"}, force_hooks=True, main_device="cpu")
    wrapped(model)
    assert torch.equal(model.generate(**prompt(), max_new_tokens=8, pad_token_id=0), expected)


# -- refusals: each names the value and the remedy, and leaves model and places as they were


def refused(model: Any, error: type[Exception], match: str, **options: Any) -> None:
    before = fingerprint(model) if hasattr(model, "config") else None
    with pytest.raises(error, match=match):
        elastic.wrap(model, **options)
    assert not places._open
    if before is not None:
        assert_same(before, fingerprint(model))


class Ticks:
    """A policy with a time between its ticks."""

    def __init__(self, tick_s: Any) -> None:
        self.tick_s = tick_s

    def decide(self, snapshot: Any, state: Any) -> Any:
        """Return nothing: it is never asked."""


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"policy": "fastest"}, ConfigError, r"policy='fastest'.*'manual'"),
        ({"places": ["tpu:0"]}, ConfigError, "'tpu:0' is not a place"),
        ({"places": ["cpu=1KiB"]}, CapacityError, "larger budget"),
        ({"places": ["cpu#a", "cpu#a"]}, ConfigError, "twice"),
        ({"places": []}, ConfigError, r"has none on \['cpu'\]"),
        ({"places": ["cpu=much"]}, ConfigError, "budget of place cpu='much'"),
        ({"kv_layout": "diagonal"}, ConfigError, r"kv_layout='diagonal'.*head_major"),
        ({"order": None}, ConfigError, "order=None cannot be"),
        ({"order": [2, 1, 0]}, ConfigError, r"order=\[2, 1, 0\] cannot be"),
        ({"places": 64}, ConfigError, "places=64 cannot be"),
        ({"places": {"cpu": "64MiB"}}, ConfigError, "places=.* cannot be"),
        ({"slo": 2.0}, ConfigError, r"slo=2.0 cannot be.*elastic\.SLO"),
        ({"controller": "no"}, ConfigError, "controller='no' cannot be"),
        ({"checkpoint": 3}, ConfigError, "checkpoint=3 cannot be"),
        *(({"variant_cache": path}, ConfigError, "variant_cache=.* cannot be") for path in (3, "", "a\0b")),
        ({"variants": None}, ConfigError, "variants=None cannot be.*'int4'"),
        *(({"policy": Ticks(tick_s)}, ConfigError, "tick_s=.*above 0") for tick_s in (0, -1, float("nan"), "1")),
        *(
            ({"variants": [elastic.Variant(name, elastic.Integers(4))]}, ConfigError, "name of a variant=")
            for name in ("float32", "full", "absent", "dropped", "", 3, "a/b", "../../x", "a+b", 101 * "a")
        ),
        ({"variants": [elastic.Variant("../x", checkpoint="somewhere")]}, ConfigError, "name of a variant="),
        ({"variants": [elastic.Variant("int4", calibration=[1, 2])]}, ConfigError, "calibration.*not list"),
        (
            {"variants": [elastic.Variant("int4", calibration=torch.tensor([[5, 10**6]]))]},
            ConfigError,
            "calibration: there are token ids from 5 to 1000000; the model has 0 to",
        ),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], error: type[Exception], match: str) -> None:
    refused(build("llama-gqa"), error, match, **options)


def test_a_model_that_hands_use_cache_on_is_elastic(wrapped: Any) -> None:
    """Its own forward method does not name it."""
    config = t.GraniteMoeConfig(**GQA, num_local_experts=4, num_experts_per_tok=2)
    model = t.GraniteMoeForCausalLM(config).eval().requires_grad_(False)
    expected = model.generate(**prompt(), max_new_tokens=4)
    rt = wrapped(model).elastic
    assert torch.equal(model.generate(**prompt(), max_new_tokens=4), expected)
    output = model(**prompt())
    assert rt.status().kv[0].used_bytes > 0
    name = "cache" if hasattr(output, "cache") else "past_key_values"  # the earlier one
    assert output[name] is not None
    assert model(**prompt(), use_cache=False).get(name) is None


def test_modules_that_are_no_causal_language_model() -> None:
    refused(nn.Linear(2, 2), ConfigError, "Hugging Face config")
    refused(
        t.T5ForConditionalGeneration(t.T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2)), ConfigError, "encoder"
    )
    refused(
        t.BertModel(t.BertConfig(hidden_size=16, num_attention_heads=2, intermediate_size=16)), ConfigError, "KV cache"
    )
    mamba = t.MambaForCausalLM(t.MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=32))
    refused(mamba, ConfigError, "KV cache")


def test_a_wrapped_model_is_not_wrapped_again(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    with pytest.raises(StateError, match="already wrapped"):
        elastic.wrap(model)
    assert model.elastic.status().layers == 3
    other = build("llama-gqa")
    other.model = model.model
    with pytest.raises(StateError, match="are those of another model that is wrapped"):
        elastic.wrap(other)
    model.generate(**prompt(), max_new_tokens=2, pad_token_id=0)


def test_a_shallow_copy_is_not_unwrapped(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    with pytest.raises(StateError, match="a shallow copy of a wrapped model; unwrap that one"):
        elastic.unwrap(copy.copy(model))
    model.elastic.check()


@pytest.mark.parametrize(
    "lose", [lambda model: delattr(model, "elastic"), lambda model: setattr(model, "elastic", None)]
)
def test_a_model_whose_attribute_is_lost_is_unwrapped(lose: Any) -> None:
    model = build("llama-gqa")
    before = fingerprint(model)
    elastic.wrap(model, places="cpu=64MiB")
    lose(model)
    with pytest.raises(StateError, match="already wrapped; unwrap it first"):
        elastic.wrap(model)
    assert elastic.unwrap(model) is model
    assert_same(before, fingerprint(model))


def test_what_a_user_sets_in_its_place_is_the_users() -> None:
    model = elastic.wrap(build("llama-gqa"), places="cpu=64MiB")
    model.elastic = "mine"  # type: ignore[assignment]
    assert elastic.unwrap(model).elastic == "mine"


@pytest.mark.parametrize("part", ["model", "model.layers.0"])
def test_a_part_is_not_unwrapped(part: str, wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    with pytest.raises(StateError, match=r"a part, or a shallow copy of a wrapped .*that one, or load it again"):
        elastic.unwrap(model.get_submodule(part))


def test_a_plain_model_is_not_unwrapped() -> None:
    with pytest.raises(StateError, match="not wrapped"):
        elastic.unwrap(build("llama-gqa"))
    with pytest.raises(StateError, match="int is not a model; unwrap takes what wrap returned"):
        elastic.unwrap(5)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="not wrapped"):
        elastic.ElasticCache(build("llama-gqa"))


def test_compiled_models_are_refused_in_words(wrapped: Any) -> None:
    refused(torch.compile(build("llama-gqa")), ConfigError, "compiled")
    model = build("llama-gqa")
    model.compile()
    with pytest.raises(ConfigError, match="compiled"):
        elastic.wrap(model)
    model = wrapped(build("llama-gqa"))
    with pytest.raises(Exception, match="cannot be compiled; unwrap it first"):
        torch.compile(model, backend="eager")(**prompt())
    model.elastic.release([1])
    parts = model.model.layers[0], model.model.layers[0].self_attn, model.model.layers[1].mlp
    for part in parts:
        part.compile(backend="eager")
        with pytest.raises(StateError, match="or a part of it, cannot be compiled; unwrap it first"):
            model(**prompt())
        part._compiled_call_impl = None
    model.generate(**prompt(), max_new_tokens=2, pad_token_id=0)


def test_offloaded_models_are_refused_with_the_remedy() -> None:
    from accelerate import cpu_offload

    model = cpu_offload(build("llama-gqa"), execution_device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"offloaded.*device_map"):
        elastic.wrap(model)


def test_weights_made_under_inference_mode_are_refused_with_the_remedy() -> None:
    with torch.inference_mode():
        model = build("llama-gqa")
    refused(model, ConfigError, "inference_mode.*load the model outside of it")


def test_what_compressed_tensors_expands_in_forward_passes_is_refused_with_the_remedy() -> None:
    model = build("llama-gqa")
    model.model.layers[1].mlp.up_proj.quantization_scheme = None  # as it leaves modules that it does not quantize
    elastic.unwrap(elastic.wrap(model, places="cpu=64MiB"))
    model.model.layers[1].mlp.up_proj.quantization_scheme = object()
    refused(model, ConfigError, "compressed-tensors expands.*dequantize=True")


def test_weights_that_another_library_quantized_stay_where_they_are(wrapped: Any) -> None:
    class Quantized(torch.nn.Parameter):
        """As bitsandbytes, quanto and torchao have parameters of their own kind."""

    model = build("llama-gqa")
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = Quantized(module.weight.detach(), requires_grad=False)
    expected = model(**prompt()).logits
    refused(model, ConfigError, "no matrix of model.layers.0.*load the model without quantization", variants=("int4",))
    rt = wrapped(model, [small(64 << 20), small(64 << 20, "cpu#b")]).elastic
    for act in (rt.release, rt.restore, partial(rt.migrate, place="cpu#b")):
        assert act([1]).status == "applied"
        assert torch.equal(model(**prompt()).logits, expected)
    with pytest.raises(ConfigError, match=r"parameters that are quantized.*q_proj"):
        rt.replicate([0], "cpu#b")


def test_models_with_a_kind_of_cache_of_their_own_are_refused_in_words() -> None:
    sizes: Any = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
    kinds = {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2}
    config = t.MiniMaxConfig(vocab_size=96, num_hidden_layers=2, num_key_value_heads=2, **sizes, **kinds)
    refused(t.MiniMaxForCausalLM(config).eval(), ConfigError, "kind of cache of its own")


def test_a_failing_install_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    from elastic.kvcache.attention import AttentionSwitch

    def fail(self: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(AttentionSwitch, "install", fail)
    refused(build("llama-gqa"), RuntimeError, "no", places="cpu=64MiB")
