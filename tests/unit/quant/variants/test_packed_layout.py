"""The layout of a layer in a variant, from shapes alone, against what packing it really gives."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import elastic
from elastic.errors import ConfigError
from elastic.memory.weight_layout import LayerLayout, ParameterLayout
from elastic.quant.formats.base import KernelTarget, MatrixShape, format_of
from elastic.quant.formats.integer import Integers, round_to_nearest
from elastic.quant.formats.pruned import SemiStructured, Unstructured
from elastic.quant.variants.eligible import LayerParameters
from elastic.quant.variants.pack_model import packer
from elastic.quant.variants.packed_layout import layer_part_shapes, packed_layout
from elastic.quant.variants.variant import Variant, config_of
from support import architectures
from support.integer_matrices import pack

CPU = KernelTarget.of(torch.device("cpu"))
NAMES = ("int8", "int4", "int3", "2:4", "4:8", "sparse50", "sparse30", "ffn75", "ffn50", "heads75", "heads50")
MODELS = ("llama-gqa", "qwen3-moe", "phi3", "gpt2", "deepseek-v3")


def on_meta(layer: nn.Module) -> LayerParameters:
    """The same parameters without their data."""
    own = LayerParameters.of(layer)
    parameters = {n: (module, torch.empty_like(p, device="meta")) for n, (module, p) in own.parameters.items()}
    return LayerParameters("", parameters, head_sizes=own.head_sizes)


def shapes(parts: Any) -> dict[str, Any]:
    return {name: (tuple(part.shape), part.dtype) for name, part in parts.items()}


@pytest.mark.parametrize("name", MODELS)
def test_parts_of_real_layers_have_these_shapes_in_this_order(name: str) -> None:
    model = architectures.build(name)
    layer = model.get_submodule(next(n for n, m in model.named_modules() if n.endswith(".1")))
    for variant in NAMES:
        config = config_of(variant)
        try:
            planned = layer_part_shapes(on_meta(layer), config, CPU)
        except ConfigError:
            with pytest.raises(ConfigError):
                packer(Variant(variant, config), {})(LayerParameters.of(layer))
            continue
        packed = packer(Variant(variant, config), {})(LayerParameters.of(layer))
        found = {key: shapes(packing.parts) for key, packing in packed.items()}
        assert {key: dict(parts) for key, parts in planned.items()} == found
        assert [list(parts) for parts in planned.values()] == [list(parts) for parts in found.values()]


def test_integers_for_every_target() -> None:
    targets = (CPU, KernelTarget("cuda", "sm90"), KernelTarget("cuda", "sm75"))
    weight = torch.randn(48, 512, generator=torch.Generator().manual_seed(0)) + 0.1
    for bits, group_size, symmetric, target in product((8, 4, 3), (-1, 64, 512), (True, False), targets):
        config = Integers(bits, group_size, symmetric)
        parts = pack(config, round_to_nearest(weight, config), target)
        planned = format_of(config)(config, MatrixShape(48, 512), target).part_shapes(weight.dtype)
        assert dict(planned) == shapes(parts), (config, target)


def test_sparse_parts_for_gpus() -> None:
    matrix = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    configs = (SemiStructured(2, 4), SemiStructured(4, 8), Unstructured(0.3))
    for config, dtype, instructions in product(configs, (torch.float32, torch.bfloat16), ("sm80", "sm90")):
        target = KernelTarget("cuda", instructions)
        parts = format_of(config)(config, MatrixShape(*matrix.to(dtype).shape), target).quantize(matrix.to(dtype), None)
        planned = format_of(config)(config, MatrixShape(64, 128), target).part_shapes(dtype)
        assert dict(planned) == shapes(parts), (config, target)


def test_parameters_that_are_not_packed_stay_between_the_others() -> None:
    layer = architectures.build("llama-gqa").model.layers[0]
    parameters = LayerParameters.of(layer)
    full = LayerLayout.pack({name: ParameterLayout.like(p) for name, (_, p) in parameters.parameters.items()})
    layout = packed_layout(parameters, full, config_of("int4"), CPU)
    names = [name.partition("/")[0] for name in layout.parameters]
    assert list(dict.fromkeys(names)) == list(full.parameters)
    assert layout.parameters["input_layernorm.weight"].nbytes == full.parameters["input_layernorm.weight"].nbytes
    assert 0 < layout.nbytes < full.nbytes


def test_what_cannot_be_packed_is_refused_in_words() -> None:
    layer = nn.Module()
    layer.inner = nn.Linear(10, 10)
    with pytest.raises(ConfigError, match="no matrix of the layer can be packed as Integers"):
        layer_part_shapes(on_meta(layer), elastic.Integers(4), CPU)
    moe = architectures.build("qwen3-moe").model.layers[0]
    with pytest.raises(ConfigError, match="has experts, whose columns cannot be left out"):
        layer_part_shapes(on_meta(moe), config_of("ffn75"), CPU)
    config = config_of("ffn75")
    with pytest.raises(ConfigError, match="ask for the whole layer"):
        format_of(config)(config, MatrixShape(16, 16), CPU).part_shapes(torch.float32)
