"""Checkpoints of other packages are read to the bit, or refused in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from elastic.errors import ConfigError
from elastic.quant.checkpoints.bit_unpacking import unpack, unpack_awq
from elastic.quant.checkpoints.reader import QuantizedCheckpoint
from elastic.quant.formats.integer import Integers, QuantizedMatrix

GOLDEN = Path(__file__).parents[1] / "golden"
FORMATS = sorted(path.name for path in GOLDEN.iterdir() if (path / "logits.safetensors").exists())
NAME = "model.layers.0.mlp.up_proj"
INPUTS, OUTPUTS, GROUP = 64, 32, 16

Tensors = dict[str, torch.Tensor]


# Golden files: the logits that the packages give for them.


def bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).float()


def as_half(codes: QuantizedMatrix) -> torch.Tensor:
    """The matrix as TorchLinear of GPTQModel expands it."""
    return codes.value().half().float()


def as_bfloat16(codes: QuantizedMatrix) -> torch.Tensor:
    """The matrix as torch's int4 kernel has it: code - 8, a scale and an offset in bfloat16."""
    scales = bfloat16(codes.scales)
    rounded = QuantizedMatrix(codes.codes, scales, torch.full_like(codes.zeros, 8), codes.order)
    offsets = bfloat16((8 - codes.zeros) * scales).repeat_interleave(codes.codes.shape[1] // codes.groups, 1)
    return rounded.value() + (offsets if codes.order is None else offsets[:, codes.order.argsort()])


def logits(
    folder: Path, value: Callable[[QuantizedMatrix], torch.Tensor], round_: Callable[[torch.Tensor], torch.Tensor]
) -> Any:
    """Of a plain model with these matrices, their inputs and outputs rounded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    model = LlamaForCausalLM(LlamaConfig(**config)).float().eval()
    checkpoint = QuantizedCheckpoint(folder)
    for name, parameter in model.named_parameters():
        codes = checkpoint.codes(name)
        plain = checkpoint.plain(name)
        assert (codes is None) != (plain is None), name
        if codes is None:
            parameter.data = plain.float()
        else:
            parameter.data = value(codes)
            module = model.get_submodule(name.removesuffix(".weight"))
            module.register_forward_pre_hook(lambda _, args: (round_(args[0]),))
            module.register_forward_hook(lambda _, args, output: round_(output))
    with torch.inference_mode():
        return model(load_file(folder / "logits.safetensors")["input_ids"]).logits


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", FORMATS)
def test_a_golden_file_gives_the_logits_of_its_package(name: str) -> None:
    """The package rounds in a way that is known (the file says which kernel ran), so a plain model can round likewise.

    What that explains, `explained`, is the distance between the plain model with and without the rounding. Exact
    values have to be within twice of it; rounded ones nearer than half (here they are equal to the bit but for one
    file, where a sum in another order tips a rounding; on other machines that may happen in any).
    """
    folder = GOLDEN / name
    golden = load_file(folder / "logits.safetensors")["logits"]
    with safe_open(folder / "logits.safetensors", "pt") as file:
        kernel = file.metadata()["kernel"]
    exact = logits(folder, QuantizedMatrix.value, torch.Tensor.float)
    if kernel == "TorchLinear":
        rounded = logits(folder, as_half, torch.Tensor.float)
    else:
        rounded = logits(folder, as_bfloat16, bfloat16)
    explained = distance(rounded, exact)
    assert explained < (0.002 if kernel == "TorchLinear" else 0.03)
    assert distance(golden, exact) <= 2 * explained
    assert distance(golden, rounded) <= explained / 2


def test_all_formats_have_a_golden_file() -> None:
    assert len(FORMATS) == 7
    found = {name: QuantizedCheckpoint(GOLDEN / name) for name in FORMATS}
    assert found["gptq-3bit"].config == Integers(3, 32, symmetric=True)
    assert found["gptq-8bit"].config == Integers(8, 32, symmetric=True)
    assert found["gptq-v2-asymmetric"].config == found["awq-gemm"].config == Integers(4, 32)
    ordered = {name for name in FORMATS if found[name].codes(f"{NAME}.weight").order is not None}
    assert ordered == {"gptq-4bit-act-order", "auto-gptq"}


# Bits, against a slow reading of the formats.


def words(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (rows, columns), generator=generator, dtype=torch.int64).int()


def slow_stream(row: list[int], bits: int) -> list[int]:
    stream = sum((word & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(row))
    return [(stream >> (bits * j)) & (2**bits - 1) for j in range(len(row) * 32 // bits)]


def slow_awq(row: list[int]) -> list[int]:
    codes = [0] * (8 * len(row))
    for i, word in enumerate(row):
        for nibble, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            codes[8 * i + column] = (word >> (4 * nibble)) & 15
    return codes


@given(bits=st.sampled_from((8, 4, 3)), rows=st.integers(1, 5), units=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_words_are_unpacked_bit_for_bit(bits: int, rows: int, units: int, seed: int) -> None:
    packed = words(rows, units * (3 if bits == 3 else 1), seed)
    assert unpack(packed, bits).tolist() == [slow_stream(row, bits) for row in packed.tolist()]
    columns = packed.t().contiguous()
    assert unpack(columns.t(), bits).tolist() == unpack(packed, bits).tolist()
    assert unpack_awq(packed).tolist() == [slow_awq(row) for row in packed.tolist()]


def test_an_awq_word_that_autoawq_packed() -> None:
    word = torch.tensor([[0x8964A573 - (1 << 32)]], dtype=torch.int32)
    assert unpack_awq(word).tolist() == [[3, 4, 7, 6, 5, 9, 10, 8]]


# Files made here.


def write(folder: Path, tensors: Tensors, **config: Any) -> Path:
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


def gptq(bits: int = 4, seed: int = 0, name: str = NAME) -> Tensors:
    groups = INPUTS // GROUP
    return {
        f"{name}.qweight": words(INPUTS * bits // 32, OUTPUTS, seed),
        f"{name}.qzeros": words(groups, OUTPUTS * bits // 32, seed + 1),
        f"{name}.scales": torch.rand(groups, OUTPUTS, generator=torch.Generator().manual_seed(seed)).half(),
        f"{name}.g_idx": torch.arange(INPUTS, dtype=torch.int32) // GROUP,
    }


def options(bits: int = 4, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, **more}


@given(
    bits=st.sampled_from((8, 4, 3)),
    form=st.sampled_from(("gptq", "gptq_v2")),
    shuffled=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=25)
def test_a_matrix_is_what_the_format_says(
    tmp_path_factory: pytest.TempPathFactory, bits: int, form: str, shuffled: bool, seed: int
) -> None:
    tensors = gptq(bits, seed)
    if shuffled:
        tensors[f"{NAME}.g_idx"] = tensors[f"{NAME}.g_idx"][torch.randperm(INPUTS)]
    folder = write(tmp_path_factory.mktemp("gptq"), tensors, **options(bits, checkpoint_format=form))
    codes = QuantizedCheckpoint(folder).codes(f"{NAME}.weight")
    assert codes is not None
    assert (codes.order is not None) == shuffled
    stored = [slow_stream(column, bits) for column in tensors[f"{NAME}.qweight"].t().tolist()]
    zeros = [slow_stream(row, bits) for row in tensors[f"{NAME}.qzeros"].tolist()]
    scales, group_of = tensors[f"{NAME}.scales"].float().tolist(), tensors[f"{NAME}.g_idx"].tolist()
    added = 1 if form == "gptq" else 0
    expected = [
        [scales[group_of[k]][n] * (stored[n][k] - (zeros[group_of[k]][n] + added)) for k in range(INPUTS)]
        for n in range(OUTPUTS)
    ]
    torch.testing.assert_close(codes.value(), torch.tensor(expected), rtol=1e-6, atol=0)


def test_an_awq_matrix_is_what_the_format_says(tmp_path: Path) -> None:
    groups = INPUTS // GROUP
    qweight, qzeros, scales = (
        words(INPUTS, OUTPUTS // 8, 0),
        words(groups, OUTPUTS // 8, 1),
        torch.rand(groups, OUTPUTS),
    )
    tensors = {f"{NAME}.qweight": qweight, f"{NAME}.qzeros": qzeros, f"{NAME}.scales": scales.half()}
    write(tmp_path, tensors, quant_method="awq", bits=4, group_size=GROUP, version="GEMM", zero_point=True)
    codes = QuantizedCheckpoint(tmp_path).codes(f"{NAME}.weight")
    assert codes is not None
    stored, zeros = (torch.tensor([slow_awq(row) for row in packed.tolist()]) for packed in (qweight, qzeros))
    expected = (stored - zeros.repeat_interleave(GROUP, 0)) * scales.half().float().repeat_interleave(GROUP, 0)
    torch.testing.assert_close(codes.value(), expected.t(), rtol=1e-6, atol=0)


def test_zeros_of_sixteen_survive(tmp_path: Path) -> None:
    """AutoGPTQ stores a zero point of 0 as -1, and with it fills a word with ones; that then means 16, unmasked."""
    tensors = gptq() | {f"{NAME}.qzeros": torch.full((INPUTS // GROUP, OUTPUTS // 8), -1, dtype=torch.int32)}
    codes = QuantizedCheckpoint(write(tmp_path, tensors, **options())).codes(f"{NAME}.weight")
    assert codes is not None
    assert (codes.zeros == 16).all()


def test_one_scale_for_a_row(tmp_path: Path) -> None:
    tensors = {k: v[:1] if "scales" in k or "qzeros" in k else v for k, v in gptq().items()}
    tensors[f"{NAME}.g_idx"] = torch.zeros(INPUTS, dtype=torch.int32)
    codes = QuantizedCheckpoint(write(tmp_path, tensors, **options() | {"group_size": -1})).codes(f"{NAME}.weight")
    assert codes is not None
    assert codes.groups == 1
    assert codes.order is None


def test_a_model_inside_another_finds_its_matrices(tmp_path: Path) -> None:
    norm = torch.rand(8)
    folder = write(tmp_path, gptq() | {"model.norm.weight": norm}, **options())
    checkpoint = QuantizedCheckpoint(folder)
    assert checkpoint.codes(f"base_model.model.{NAME}.base_layer.weight") is not None
    assert checkpoint.codes("model.norm.weight") is None
    assert checkpoint.codes(f"{NAME}.bias") is None
    assert checkpoint.plain(f"{NAME}.weight") is None
    found = checkpoint.plain("base_model.model.model.norm.weight")
    assert found is not None
    assert torch.equal(found, norm)


def test_the_config_may_lie_where_autogptq_writes_it(tmp_path: Path) -> None:
    save_file(gptq(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": GROUP, "desc_act": False}))
    assert QuantizedCheckpoint(tmp_path).codes(f"{NAME}.weight") is not None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (options(2), "bits=2"),
        (options(5), "bits=5"),
        (options("4"), "bits='4'"),
        (options(True), "bits=True"),
        (options(None), "bits=None"),
        (options(group_size=24), "group_size=24"),
        (options(group_size=None), "group_size=None"),
        (options(pack_dtype="int16"), "pack_dtype='int16'"),
        (options(checkpoint_format="marlin"), "marlin"),
        (options(checkpoint_format="gptq", is_marlin_format=True), "gptq, marlin"),
        (options(checkpoint_format="gptq_p"), "gptq_p"),
        (options(checkpoint_format="gptq", format="gptq_v2"), "gptq, gptq_v2"),
        (options(quant_method="awq", version="gemv"), "gemv"),
        (options(quant_method="awq", version="gemv_fast"), "gemv_fast"),
        (options(quant_method="awq", backend="llm-awq"), "llm-awq"),
        (options(8, quant_method="awq", version="gemm"), "bits=8"),
        (options(quant_method="bitsandbytes"), "bitsandbytes"),
        ({"bits": 4}, "quant_method=None"),
    ],
)
def test_an_unsupported_config_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    write(tmp_path, gptq(), **config)
    with pytest.raises(ConfigError, match=message) as refusal:
        QuantizedCheckpoint(tmp_path)
    assert str(tmp_path / "config.json") in str(refusal.value)


def changed(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {f"{NAME}.{part}": change(tensors[f"{NAME}.{part}"])}


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.endswith(part)}


@pytest.mark.parametrize(
    ("damage", "tensor", "message"),
    [
        (changed("qweight", torch.Tensor.long), "qweight", "int64"),
        (changed("qweight", lambda t: t[:-1]), "qweight", "56 inputs"),
        (changed("qweight", torch.flatten), "qweight", "any, any"),
        (changed("qweight", lambda t: t[:, :30]), "qweight", "whole numbers"),
        (changed("qweight", lambda t: t[:, :24]), "qzeros", "expected .4, 3."),
        (changed("qweight", lambda t: t.repeat(2, 1)), "qzeros", "expected .8, 4."),
        (changed("qzeros", lambda t: t.repeat(1, 2)), "qzeros", "expected .4, 4."),
        (changed("scales", lambda t: t[:2]), "scales", "expected .4, 32. of float16"),
        (changed("scales", torch.Tensor.double), "scales", "float64"),
        (changed("scales", lambda t: t * torch.nan), "scales", "not finite"),
        (changed("g_idx", lambda t: t[:32]), "g_idx", "expected .64."),
        (changed("g_idx", lambda t: t + 1), "g_idx", "groups outside 0 to 3"),
        (changed("g_idx", lambda t: t - 1), "g_idx", "groups outside 0 to 3"),
        (changed("g_idx", lambda t: t * 0), "g_idx", "several sizes, expected 16 inputs"),
        (changed("scales", lambda t: t[:0]), "scales", "cannot be mapped"),
        (without("qzeros"), "qweight", "comes without .*qzeros"),
        (without("g_idx"), "qweight", "comes without 'g_idx'"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Tensors], Tensors], tensor: str, message: str) -> None:
    write(tmp_path, damage(gptq()), **options(desc_act=True))
    with pytest.raises(ConfigError, match=message) as refusal:
        QuantizedCheckpoint(tmp_path).codes(f"{NAME}.weight")
    assert f"{NAME}.{tensor}" in str(refusal.value)
    assert "model.safetensors" in str(refusal.value)


def test_other_settings_for_one_module_are_noticed(tmp_path: Path) -> None:
    other = "model.layers.1.mlp.up_proj"
    write(tmp_path, gptq() | gptq(8, name=other), **options(dynamic={"+:.*1.*": {"bits": 8}}))
    checkpoint = QuantizedCheckpoint(tmp_path)
    assert checkpoint.codes(f"{NAME}.weight") is not None
    with pytest.raises(ConfigError, match="'dynamic'"):
        checkpoint.codes(f"{other}.weight")


def test_zeros_that_are_not_symmetric_contradict_the_config(tmp_path: Path) -> None:
    """So does a second version that calls itself the first."""
    tensors = gptq() | {f"{NAME}.qzeros": torch.full((INPUTS // GROUP, OUTPUTS // 8), 0x77777777, dtype=torch.int32)}
    assert QuantizedCheckpoint(write(tmp_path, tensors, **options(sym=True))).codes(f"{NAME}.weight") is not None
    write(tmp_path, tensors, **options(sym=True, checkpoint_format="gptq_v2"))
    with pytest.raises(ConfigError, match="not symmetric"):
        QuantizedCheckpoint(tmp_path).codes(f"{NAME}.weight")


def test_scaled_activations_are_refused(tmp_path: Path) -> None:
    write(tmp_path, gptq() | {"transformer.h.0.mlp.act.scales": torch.ones(8)}, **options())
    with pytest.raises(ConfigError, match=r"act.scales.* scales an activation"):
        QuantizedCheckpoint(tmp_path)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no directory"):
        QuantizedCheckpoint(tmp_path / "absent")
    with pytest.raises(ConfigError, match="no quantized checkpoint"):
        QuantizedCheckpoint(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="not an object"):
        QuantizedCheckpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"quantization_config": {"bi')
    with pytest.raises(ConfigError, match=r"config.json is damaged"):
        QuantizedCheckpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": options()}))
    with pytest.raises(ConfigError, match="no safetensors file"):
        QuantizedCheckpoint(tmp_path)


@given(keep=st.integers(0, 2000))
@settings(max_examples=20)
def test_a_truncated_file_is_refused(tmp_path_factory: pytest.TempPathFactory, keep: int) -> None:
    folder = write(tmp_path_factory.mktemp("short"), gptq(), **options())
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: min(keep, file.stat().st_size - 1)])
    with pytest.raises(ConfigError, match=r"model.safetensors"):
        QuantizedCheckpoint(folder)
