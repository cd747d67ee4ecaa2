"""The decoder of a model without Hugging Face's structure, and what of it goes into pages and is packed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elastic.engines.vllm.model.decoder import find_decoder
from elastic.engines.vllm.model.streaming import StreamingHooks
from elastic.errors import ConfigError
from elastic.hooks.forward_gate import ForwardGate
from elastic.quant.variants.eligible import LayerParameters, matrices
from elastic.weights.eligible import layer_slots


class FusedLinear(nn.Module):
    """A linear layer that is no `nn.Linear`, as vLLM's are."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs), requires_grad=False)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = FusedLinear(8, 24)
        self.norm = nn.RMSNorm(8)


class Model(nn.Module):
    """Three of its layers are here; the first and the last are on other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.embed = nn.Embedding(512, 8)
        self.inner.few = nn.ModuleList([nn.Linear(2, 2)])
        self.inner.layers = nn.ModuleList([nn.Identity(), Layer(), Layer(), Layer(), nn.Identity()])


def is_fused(module: nn.Module, parameter: torch.Tensor) -> bool:
    return isinstance(module, FusedLinear)


def test_the_layers_of_this_rank_are_found_with_their_own_names() -> None:
    model = Model()
    decoder = find_decoder(model)
    assert decoder.layer_names == ("inner.layers.1", "inner.layers.2", "inner.layers.3")
    assert decoder.layers == tuple(model.inner.layers[1:4])
    assert decoder.roots == (model.inner,)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="ModuleList"):
        find_decoder(nn.Sequential(nn.Linear(2, 2)))


def test_only_wanted_parameters_live_in_pages() -> None:
    model = Model()
    slots = layer_slots(model, find_decoder(model), lambda parameter: parameter.ndim > 1)
    assert [list(layer) for layer in slots] == [["qkv_proj.weight"]] * 3


def test_what_is_packed_is_for_the_engine_to_say() -> None:
    layer = Layer()
    of_engine = LayerParameters("0", LayerParameters.of(layer).parameters, is_fused)
    assert [name for name, _, _ in matrices(of_engine)] == ["qkv_proj.weight"]
    assert list(matrices(LayerParameters.of(layer))) == []  # none of Hugging Face's linear modules


def test_absent_layers_alone_have_hooks() -> None:
    class Unit:
        def __init__(self, index: int) -> None:
            self.index, self.absent = index, False

    class Weights:
        layers = [Unit(index) for index in range(3)]

    def hooked() -> list[int]:
        return [i for i, layer in enumerate(layers) if layer._forward_hooks and layer._forward_pre_hooks]

    layers, gate = [Layer() for _ in range(3)], ForwardGate()
    hooks = StreamingHooks(layers, Weights(), gate)  # type: ignore[arg-type]
    assert hooked() == []
    for absent in ([1, 2], [0, 2], [], [0]):
        with gate.exclusive():
            for unit in Weights.layers:
                unit.absent = unit.index in absent
        hooks.update()
        hooks.update()
        assert hooked() == absent
    hooks.remove()
    hooks.remove()
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
