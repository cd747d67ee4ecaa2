"""Variants that are read from quantized checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import elastic
from elastic import ConfigError, StateError
from elastic.quant.checkpoints.reader import QuantizedCheckpoint
from elastic.weights.proxy.tensor import WeightProxy
from support.architectures import build
from support.wrapped_model import assert_same_bits, bits, small

GOLDEN = Path(__file__).parents[1] / "golden"
FORMATS = sorted(path.name for path in GOLDEN.iterdir() if (path / "logits.safetensors").exists())
ROOMY = elastic.Place("cpu", torch.device("cpu"), 64 << 20, page_bytes=4096)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def original(folder: Path) -> Any:
    """A full-precision model that the checkpoint could have been made of; the norms come with the variant."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    model = LlamaForCausalLM(LlamaConfig(**config)).float().eval().requires_grad_(False)
    files = QuantizedCheckpoint(folder)
    for name, parameter in model.named_parameters():
        codes, plain = files.codes(name), files.plain(name)
        parameter.copy_(codes.value() if codes is not None else plain)  # type: ignore[arg-type]
    return model


def rounded(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Logits with what the decoder's matrices take and give rounded to bfloat16, as fast kernels do."""
    handles = []
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            handles.append(module.register_forward_pre_hook(lambda _, args: (args[0].bfloat16().float(),)))
            handles.append(module.register_forward_hook(lambda _, args, output: output.bfloat16().float()))
    logits: torch.Tensor = model(inputs).logits
    for handle in handles:
        handle.remove()
    return logits


@pytest.mark.parametrize("name", FORMATS)
def test_a_swap_to_a_checkpoint_gives_the_logits_of_its_package(name: str, wrapped: Any) -> None:
    model, golden = original(GOLDEN / name), load_file(GOLDEN / name / "logits.safetensors")
    explained = distance(rounded(model, golden["input_ids"]), model(golden["input_ids"]).logits)
    for layer in model.model.layers:  # as where AWQ has rescaled them
        layer.input_layernorm.weight.mul_(1.5)
        layer.post_attention_layernorm.weight.mul_(0.5)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    full = model(golden["input_ids"]).logits
    rt = wrapped(model, variants=[elastic.Variant("quantized", checkpoint=GOLDEN / name)]).elastic
    rt.swap([0, 1], "quantized")
    assert distance(model(golden["input_ids"]).logits, golden["logits"]) <= 2 * explained < 0.06
    assert {where[0].variant for where in rt.status().residencies.values()} == {"quantized"}
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in before.items())
    with pytest.raises(ConfigError, match="norms rescaled for its matrices: swap the whole layer"):
        rt.swap("model.layers.0.mlp", "quantized")
    rt.restore()
    assert torch.equal(model(golden["input_ids"]).logits, full)
    model.model.layers[0].mlp.up_proj.weight.add_(1)
    for act in (rt.plan, rt.apply):
        with pytest.raises(StateError, match="written since a quantized checkpoint of it was read"):
            act(elastic.Swap((0,), "quantized"))
    assert rt.swap(1, "quantized").layers == (1,)


def test_parts_of_a_checkpoint_without_rescaled_norms_can_be_swapped(wrapped: Any) -> None:
    model = wrapped(original(GOLDEN / "gptq-4bit"), variants=[elastic.Variant("int4", checkpoint=GOLDEN / "gptq-4bit")])
    model.elastic.swap("model.layers.0.mlp", "int4")
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, WeightProxy)
    assert not isinstance(model.model.layers[0].self_attn.q_proj.weight, WeightProxy)


def test_a_checkpoint_of_another_model_is_refused() -> None:
    variant = elastic.Variant("int4", checkpoint=GOLDEN / "gptq-4bit")
    for model in (build("llama-gqa"), build("gpt2")):
        before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        with pytest.raises(ConfigError, match=r"gptq-4bit.*(shape|no quantized matrix)"):
            elastic.wrap(model, places=ROOMY, variants=[variant])
        assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in before.items())


def left_full(folder: Path, target: Path, layer: str) -> Path:
    """A checkpoint as another one, but with the matrices of a layer in full precision."""
    files, tensors = QuantizedCheckpoint(folder), load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.startswith(layer) and name.endswith("qweight")]:
        prefix = name.removesuffix("qweight")
        codes = files.codes(f"{prefix}weight")
        assert codes is not None
        tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(prefix)}
        tensors[f"{prefix}weight"] = codes.value().half()
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, target / "model.safetensors")
    return target


def test_a_checkpoint_that_quantizes_no_layer_is_refused(tmp_path: Path) -> None:
    folder = left_full(GOLDEN / "gptq-4bit", tmp_path / "full", "model.layers.")
    with pytest.raises(ConfigError, match="full has all layers of this model in full precision"):
        elastic.wrap(original(GOLDEN / "gptq-4bit"), places=ROOMY, variants=[elastic.Variant("q", checkpoint=folder)])


@pytest.mark.parametrize("name", ["gptq-4bit", "awq-gemm"])
def test_a_layer_that_a_checkpoint_leaves_in_full_precision_stays_so(name: str, tmp_path: Path, wrapped: Any) -> None:
    folder = left_full(GOLDEN / name, tmp_path / "checkpoint", "model.layers.0.")
    model, ids = original(GOLDEN / name), torch.arange(12).view(1, -1)
    full, before, quantized = model(ids).logits, bits(model), elastic.Variant("quantized", checkpoint=folder)
    expected = None
    for _ in range(2):  # packed, then read from the file
        options = {"variants": [quantized, "int8"], "variant_cache": tmp_path, "policy": "balanced"}
        rt = wrapped(model, small(64 << 20), **options, controller=False).elastic
        swapped = rt.swap([0, 1], "quantized")
        assert (swapped.layers, [home.variant for home, *_ in rt.status().residencies.values()]) == (
            (1,),
            ["float32", "quantized"],
        )
        expected = model(ids).logits if expected is None else expected
        assert torch.equal(model(ids).logits, expected)
        assert not torch.equal(expected, full)
        rt.swap(0, "int8")
        assert rt.swap(0, "quantized").layers == (0,), "it is full again"
        assert torch.equal(model(ids).logits, expected)
        rt.restore()
        assert torch.equal(model(ids).logits, full)
        rt.check()
        elastic.unwrap(model)
        assert_same_bits(model, before)


def test_policies_go_from_fine_to_coarse_also_where_a_layer_stays_full_in_one(tmp_path: Path, wrapped: Any) -> None:
    folder = left_full(GOLDEN / "gptq-4bit", tmp_path, "model.layers.0.")
    options: dict[str, Any] = {"variants": [elastic.Variant("gptq", checkpoint=folder), "int8"], "controller": False}
    for policy in ("balanced", elastic.Policy(levels=("int8", "gptq"))):
        model = wrapped(original(GOLDEN / "gptq-4bit"), ROOMY, policy=policy, **options)
        steps = model.elastic.controller.policy._path
        assert {(step.layer, step.before, step.after) for step in steps} == {
            (0, "float32", "int8"),
            (1, "float32", "int8"),
            (1, "int8", "gptq"),
        }
        elastic.unwrap(model)
    model, policy = original(GOLDEN / "gptq-4bit"), elastic.Policy(levels=("gptq", "int8"))
    with pytest.raises(ConfigError, match=r"go from fine to coarse; 'int8' has [0-9,]+ bytes, 'gptq' before it"):
        elastic.wrap(model, places=ROOMY, policy=policy, **options)


def test_a_layer_that_a_checkpoint_lacks_is_refused(tmp_path: Path) -> None:
    folder = left_full(GOLDEN / "gptq-4bit", tmp_path, "model.layers.0.")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"no quantized matrix of model.layers.0, nor mlp.up_proj.weight: is it"):
        elastic.wrap(original(GOLDEN / "gptq-4bit"), places=ROOMY, variants=[elastic.Variant("q", checkpoint=folder)])


def test_a_model_whose_matrices_are_quantized_already_is_refused() -> None:
    class Quantized(torch.nn.Parameter):
        """As other libraries have parameters of their own kind."""

    model = original(GOLDEN / "gptq-4bit")
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = Quantized(module.weight.detach(), requires_grad=False)
    variant = elastic.Variant("q", checkpoint=GOLDEN / "gptq-4bit")
    with pytest.raises(ConfigError, match=r"no matrix of model.layers.0.*load the model without quantization"):
        elastic.wrap(model, places=ROOMY, variants=[variant])
