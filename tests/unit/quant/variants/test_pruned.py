"""Pruned variants among the others: names, what they cost, files, actions, sensitivities."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import elastic
from elastic import ConfigError, SemiStructured, Structured, Unstructured, Variant
from elastic.memory.weight_layout import LayerLayout, ParameterLayout
from elastic.quant.formats.base import config_from, format_of
from elastic.quant.formats.pruned import Pruned, name_of
from elastic.quant.pruning.criteria import prune
from elastic.quant.sensitivity.fake_quant import dequantized_layer
from elastic.quant.variants import variant_file
from elastic.weights.proxy.tensor import WeightProxy
from support.architectures import build, prompt
from support.static_quant import pack_static
from support.wrapped_model import PAGE, assert_same_bits, bits, small

NAMES = ("2:4", "4:8", "sparse50", "ffn75", "heads50")
TEXT = prompt(4, 64, seed=5)["input_ids"]
CALIBRATED = [
    Variant("wanda", SemiStructured(2, 4, "wanda"), calibration=TEXT),
    Variant("sparsegpt", Unstructured(0.5, "sparsegpt"), calibration=TEXT),
    Variant("channels", Structured(ffn=0.75, heads=0.75, by="wanda"), calibration=TEXT),
]


def label(variant: Any) -> str:
    """A short name for the reports of pytest."""
    return variant.name if isinstance(variant, Variant) else variant if isinstance(variant, str) else name_of(variant)


def test_names_stand_for_configs() -> None:
    expected: dict[str, Pruned] = {
        "2:4": SemiStructured(2, 4),
        "4:8": SemiStructured(4, 8),
        "sparse50": Unstructured(0.5),
        "sparse90": Unstructured(0.9),
        "ffn75": Structured(ffn=0.75),
        "heads50": Structured(heads=0.5),
    }
    for name, config in expected.items():
        assert Variant.parse(name).config == config
        assert name_of(config) == name
    assert name_of(Structured(ffn=0.75, heads=0.5, by="wanda")) == "ffn75-heads50-wanda"


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        ("3:5", "3:5 is no pattern that can be stored; use 2:4 or 4:8"),
        ("4:2", "4:2 is no pattern"),
        ("sparse" + "9" * 5000, "is not known; use one of int8"),
        ("1" * 5000 + ":4", "is not known; use one of int8"),
        (Variant(cast(Any, ["2:4"])), "it must be a text"),
        ("sparse5", "sparsity=0.05 is not supported; use a share from 0.1 to 0.95"),
        ("sparse100", "sparsity=1.0"),
        ("ffn100", "removes nothing"),
        ("ffn0", "ffn=0.0 is not supported; use a share from 0.05 to 1"),
        ("heads120", "heads=1.2"),
        ("pruned", "'pruned' is not known; use one of int8, int4, int3, 2:4, 4:8, sparse50, ffn75, heads75"),
        (Variant("2:4", SemiStructured(by="wanda")), "by 'wanda', which needs calibration="),
        (Variant("2:4", calibration=TEXT), "by 'magnitude', which uses no calibration"),
    ],
)
def test_impossible_ones_are_refused_in_words(variant: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        elastic.wrap(build("llama-gqa"), variants=[variant])
    for config, known in ((SemiStructured, "sparsegpt"), (Unstructured, "sparsegpt"), (Structured, "magnitude, wanda")):
        with pytest.raises(ConfigError, match=rf"by='size' is not supported; use one of: .*{known}"):
            config(**{"by": "size", **({"ffn": 0.5} if config is Structured else {})})
    for config, value in ((Unstructured, "0.5"), (Structured, "0.5"), (SemiStructured, 2.0)):
        with pytest.raises(ConfigError, match=r"='0.5' is not supported|2.0:4 is no pattern"):
            config(value)
    with pytest.raises(ConfigError, match="by='sparsegpt' is not supported; use one of: magnitude, wanda"):
        Structured(ffn=0.5, by="sparsegpt")


def test_a_layer_of_which_nothing_can_be_packed_is_refused_in_words() -> None:
    import transformers as t

    config = t.LlamaConfig(
        vocab_size=16, hidden_size=12, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2
    )
    model = t.LlamaForCausalLM(config).eval().requires_grad_(False)
    with pytest.raises(
        ConfigError, match=r"no matrix of model.layers.0 can be packed.*q_proj.* 12 inputs are not a mul"
    ):
        elastic.wrap(model, variants=["2:4"])


def test_a_matrix_of_which_no_weight_would_stay_is_left_full(wrapped: Any) -> None:
    """One of 8 inputs, here, of which 95 % are 8."""
    model = build("deepseek-v3")
    before = model(**prompt(2)).logits
    rt = wrapped(model, variants=["sparse95"]).elastic
    packings = model.elastic.weights.layers[0].variants["sparse95"].packings
    assert "self_attn.q_b_proj.weight" in packings
    assert "self_attn.kv_b_proj.weight" not in packings
    rt.swap([0, 1, 2], "sparse95")
    assert model(**prompt(2)).logits.isfinite().all()
    rt.restore()
    assert torch.equal(model(**prompt(2)).logits, before)


@pytest.mark.parametrize("name", NAMES)
def test_the_ledger_shows_what_is_stored_and_no_less(name: str, wrapped: Any) -> None:
    """Pages of exactly the parts, and of the parameters that stay full, each aligned as all are."""
    model = build("llama-gqa")
    rt = wrapped(model, variants=[name]).elastic
    full = rt.status().places[0].owners["layer:1"]
    unit = model.elastic.weights.layers[1]
    packings = unit.variants[name].packings
    like = {key: slot.parameter for key, slot in unit.slots.items()}
    stored = {f"{key}/{part}": t for key, packing in packings.items() for part, t in packing.parts.items()}
    layout = LayerLayout.pack(
        {
            key: ParameterLayout.like(t)
            for key, t in {**{k: p for k, p in like.items() if k not in packings}, **stored}.items()
        }
    )
    change = rt.swap(1, name)
    now = rt.status().places[0].owners["layer:1"]
    assert now == -(-layout.nbytes // PAGE) * PAGE
    assert change.released_bytes == full - now > 0
    rt.check()


@pytest.mark.parametrize("architecture", ["llama-gqa", "gpt2"])
@pytest.mark.parametrize("variant", [*(n for n in NAMES if n != "heads50"), *CALIBRATED[:2]], ids=label)
def test_logits_are_those_of_the_model_pruned_for_good(architecture: str, variant: Any, wrapped: Any) -> None:
    variant = Variant.parse(variant)
    model = build(architecture)
    before, expected = bits(model), model(**prompt(2)).logits
    plain = copy.deepcopy(model)
    rt = wrapped(model, variants=[variant, "int4"]).elastic
    rt.swap([0, 2], variant.name)
    rt.swap(1, "int4")
    logits = model(**prompt(2)).logits
    assert not torch.equal(logits, expected)
    assert_same_bits(model, before)
    for index, mine in enumerate(m for m in plain.modules() if type(m).__name__ in ("LlamaDecoderLayer", "GPT2Block")):
        unit = model.elastic.weights.layers[index]
        name = "int4" if index == 1 else variant.name
        for key, packing in unit.variants[name].packings.items():
            mine.get_parameter(key).copy_(packing.packed.value())
    torch.testing.assert_close(logits, plain(**prompt(2)).logits, rtol=0.02, atol=0.02 * float(logits.abs().max()))
    rt.swap([0, 2], "int4")
    rt.swap(1, variant.name)
    rt.restore()
    assert torch.equal(model(**prompt(2)).logits, expected)
    assert_same_bits(model, before)


def test_actions_in_any_order_keep_every_bit(wrapped: Any) -> None:
    """Swaps of layers and of parts, between pruned and quantized variants, migrations, replicas, releases."""
    model, choose = build("llama-gqa"), random.Random(3)
    before, expected = bits(model), model(**prompt(2)).logits
    places = [small(4 << 20, f"cpu#{name}") for name in "ab"]
    calibrated = [*CALIBRATED, Variant("rows", Unstructured(0.5, "wanda"), calibration=TEXT)]
    names = [*NAMES, "int4", *(variant.name for variant in calibrated)]
    rt = wrapped(model, places, variants=[*NAMES, "int4", *calibrated]).elastic
    alone = {}
    for name in names:
        rt.swap(1, name)
        alone[name] = model(**prompt(2)).logits
    for _ in range(40):
        layer = choose.randrange(3)
        act = choose.choice(["swap", "part", "migrate", "restore", "release"])
        if act == "swap":
            rt.swap(layer, choose.choice(names))
        elif act == "part":
            rt.swap(f"model.layers.{layer}.mlp.{choose.choice(['gate', 'up', 'down'])}_proj", choose.choice(names[:4]))
        elif act == "migrate":
            rt.migrate(layer, choose.choice(["cpu#a", "cpu#b"]))
        elif act == "restore":
            rt.restore(layer)
        else:
            rt.release(layer)
        rt.check()
    rt.restore()
    for name, logits in alone.items():
        rt.migrate([0, 1, 2], "cpu#b")
        rt.swap(1, name)
        assert torch.equal(model(**prompt(2)).logits, logits), name
        rt.replicate(1, "cpu#a")
        assert torch.allclose(model(**prompt(2)).logits, logits, atol=1e-4), name
        rt.evict(1, "cpu#a")
    rt.restore()
    assert torch.equal(model(**prompt(2)).logits, expected)
    assert_same_bits(model, before)


@pytest.mark.parametrize("variant", [*NAMES, *CALIBRATED], ids=label)
def test_the_second_start_reads_what_the_first_packed(
    variant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant, logits = Variant.parse(variant), []
    for _ in range(2):
        model = elastic.wrap(build("llama-gqa"), places=small(4 << 20), variants=[variant], variant_cache=tmp_path)
        model.elastic.swap([0, 1, 2], variant.name)
        logits.append(model(**prompt(2)).logits)
        elastic.unwrap(model)
        monkeypatch.setattr("elastic.quant.variants.pack_model.packer", None)
    assert torch.equal(*logits)
    (file,) = tmp_path.glob("*.safetensors")
    assert file.name == f"elastic-{variant.name.replace(':', 'of')}.safetensors"
    other = Variant(variant.name, SemiStructured(4, 8) if variant.name != "4:8" else Unstructured(0.5))
    with pytest.raises(ConfigError, match="asked for is"):
        elastic.wrap(build("llama-gqa"), places=small(4 << 20), variants=[other], variant_cache=tmp_path)


def test_files_of_the_version_before_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their checksums are others."""
    options: dict[str, Any] = {"places": small(4 << 20), "variants": ["int4"], "variant_cache": tmp_path}
    with monkeypatch.context() as patch:
        patch.setattr(variant_file, "VERSION", "elastic-variant-3")
        elastic.unwrap(elastic.wrap(build("llama-gqa"), **options))
    with pytest.raises(ConfigError, match=r"its version is 'elastic-variant-3'.*delete it"):
        elastic.wrap(build("llama-gqa"), **options)


def test_configs_are_written_and_read(tmp_path: Path) -> None:
    for config in (SemiStructured(4, 8, "wanda"), Unstructured(0.37, "sparsegpt"), Structured(0.5, 0.25, "wanda")):
        described = variant_file._describe_config(config)
        assert config_from(described["type"], described["fields"]) == config
        assert format_of(config) is not None


def test_what_calibration_does_not_reach_is_pruned_by_magnitude_and_said(
    wrapped: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = build("mixtral")
    gate_up = model.model.layers[0].mlp.experts.gate_up_proj.detach().clone()
    rt = wrapped(model, variants=[CALIBRATED[0]]).elastic
    assert "have no samples of inputs, as those of experts, and are pruned by magnitude" in caplog.text
    rt.swap(0, "wanda")
    packed = model.model.layers[0].mlp.experts.gate_up_proj.source.value()
    for expert, weight in zip(packed, gate_up, strict=True):
        assert torch.equal(expert, prune(weight, SemiStructured(2, 4))[0])


def test_loaded_weights_are_pruned_anew_and_channels_stay_out(wrapped: Any) -> None:
    model, other = build("llama-gqa"), build("llama-gqa", seed=7)
    rt = wrapped(model, variants=["2:4", "ffn75"]).elastic
    kept = model.elastic.weights.layers[1].variants["ffn75"].packings["mlp.up_proj.weight"].parts["outputs"].clone()
    model.load_state_dict(other.state_dict())
    rt.swap([0, 1, 2], "2:4")
    expected = copy.deepcopy(other)
    for layer in expected.model.layers:
        pack_static(layer, "2:4")
    assert torch.equal(model(**prompt()).logits, expected(**prompt()).logits)
    rt.swap(1, "ffn75")
    value = model.model.layers[1].mlp.up_proj.weight.source.value()
    zeros = torch.ones(48, dtype=torch.bool)
    zeros[kept.long()] = False
    assert not value[zeros].any()
    assert torch.equal(value[~zeros], other.model.layers[1].mlp.up_proj.weight[~zeros])
    rt.restore()
    assert_same_bits(model, bits(other))


def test_adapters_stay_and_what_is_under_them_is_pruned(wrapped: Any) -> None:
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "o_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(build("llama-gqa"), config).eval().requires_grad_(False)
    expected, before = model(**prompt()).logits, bits(model)
    rt = wrapped(model, variants=NAMES).elastic
    for name in NAMES:
        rt.swap([0, 1, 2], name)
        packed = {key for key, p in model.named_parameters() if isinstance(p, WeightProxy)}
        assert any("base_layer" in key for key in packed)
        assert not any("lora_" in key for key in packed)
        assert not torch.equal(model(**prompt()).logits, expected)
        assert_same_bits(model, before)
    rt.restore()
    assert torch.equal(model(**prompt()).logits, expected)


@pytest.mark.parametrize(
    "variant",
    [
        "2:4",
        "4:8",
        "sparse50",
        "ffn75",
        "heads50",
        SemiStructured(2, 4, "wanda"),
        SemiStructured(4, 8, "sparsegpt"),
        Unstructured(0.5, "wanda"),
        Unstructured(0.5, "sparsegpt"),
        Structured(ffn=0.5, by="wanda"),
    ],
    ids=label,
)
def test_layers_have_sensitivities(variant: Any, tmp_path: Path) -> None:
    model = build("llama-gqa")
    path = tmp_path / "profile.json"
    profile = elastic.profile(model, TEXT[:, :12], variant=variant, path=path)
    config = variant if isinstance(variant, Pruned) else Variant.parse(variant).config
    assert profile.setting.variant == name_of(config)
    assert sorted(profile.order) == [0, 1, 2]
    assert elastic.Profile.load(path) == elastic.profile(model, TEXT[:, :12], variant=variant, path=path) == profile
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_layer_is_profiled_as_it_is_packed(wrapped: Any) -> None:
    model = build("llama-gqa")
    expected = {n: dequantized_layer(model.model.layers[1], Variant.parse(n).config) for n in NAMES}
    unit = wrapped(model, variants=NAMES).elastic.weights.layers[1]
    for name, layer in expected.items():
        values = {key: packing.packed.value() for key, packing in unit.variants[name].packings.items()}
        for key, parameter in layer.named_parameters():
            assert torch.equal(parameter, values.get(key, model.model.layers[1].get_parameter(key)))
