"""How vLLM's linear layers meet elastic weights: a quantization method that multiplies with whatever is in the slot.

It keeps every matrix as an ordinary parameter (vLLM on a CPU would pack it into a oneDNN handle and delete it), so that
a decoder layer's weights can live in pages and change their form. In compiled code the product is one opaque operator:
a graph would bake in what is in the slot when it is traced.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from elastic.quant.variants.packed_weight import PackedSource
from elastic.weights.prepacked.small_linear import is_small, small_linear
from elastic.weights.prepacked.source import Source
from elastic.weights.proxy.host_source import HostSource
from elastic.weights.proxy.tensor import WeightProxy

_layers: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""Linear layers by the name of their operator's argument: what a compiled graph knows of them."""


@torch.library.custom_op("elastic::linear", mutates_args=())
def linear(x: torch.Tensor, bias: torch.Tensor | None, layer: str, outputs: int) -> torch.Tensor:
    """Multiply x, [..., inputs], with the weight that the layer has now; returns [..., outputs] in the dtype of x."""
    module = _layers[layer]
    product: torch.Tensor = module.quant_method.apply(module, x, bias)
    return product


@linear.register_fake
def _(x: torch.Tensor, bias: torch.Tensor | None, layer: str, outputs: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], outputs)


class ElasticLinear(UnquantizedLinearMethod):  # type: ignore[misc]
    """Linear layers whose weight may be full, packed, or absent from one step to the next."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.outputs = 0
        self.small = False

    def process_weights_after_loading(self, layer: Any) -> None:
        """Have the loaded matrix, [outputs, inputs], as a plain parameter: vLLM's own classes are for loading."""
        layer.weight = nn.Parameter(layer.weight.data, requires_grad=False)
        self.outputs, self.small = layer.weight.shape[0], is_small(layer.weight)
        _layers[self.name] = layer

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Compute F.linear(x, layer.weight, bias) for x: [..., inputs]; of packed matrices without torch's way to them.

        All in one function, which a step calls for each matrix.
        """
        if torch.compiler.is_dynamo_compiling():
            product: torch.Tensor = linear(x, bias, self.name, self.outputs)
            return product
        weight = layer._parameters["weight"]  # `layer.weight` would be a call of Python's
        if not isinstance(weight, WeightProxy):
            return small_linear(x, weight, bias) if self.small else F.linear(x, weight, bias)
        source = weight.source
        if isinstance(source, Source):
            return source.product(x, bias)
        if isinstance(source, PackedSource):
            product = source.packed.product(x)
            return product if bias is None else product + bias
        if self.small and isinstance(source, HostSource):  # to the bit as where it is resident
            return small_linear(x, source.value(), bias)
        return F.linear(x, weight, bias)


def is_packable(module: nn.Module, parameter: torch.Tensor) -> bool:
    """Return whether a parameter, [outputs, inputs], of a layer in vLLM's model may be packed."""
    return parameter.ndim == 2 and isinstance(getattr(module, "quant_method", None), ElasticLinear)


class ElasticConfig(QuantizationConfig):  # type: ignore[misc]
    """`quantization="elastic"`: weights stay as they are in the checkpoint until an action changes them."""

    def get_name(self) -> str:
        """Return the name that it is registered under."""
        return "elastic"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes of activations."""
        return [torch.float32, torch.bfloat16, torch.float16]

    get_min_capability = staticmethod(int)
    """Returns 0, as `int()` does: the full form asks for no CUDA capability."""
    get_config_filenames = staticmethod(list[str])
    """Returns that it is configured by no files, as `list()` does."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ElasticConfig:
        """Make one for a checkpoint that says it was made for elastic."""
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method of a linear layer; None for all others, which vLLM computes as ever."""
        return ElasticLinear(prefix) if isinstance(layer, LinearBase) else None
