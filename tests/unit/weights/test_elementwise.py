"""Feed-forward networks that are computed in parts, tried before a model is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as t
from torch import nn

import elastic
from elastic import ConfigError
from elastic.planning.sharding.cut_plan import CutPlan, cut_layer
from elastic.weights.shards.elementwise import require_elementwise
from support.architectures import GQA
from support.wrapped_model import small


class Network(nn.Module):
    """Two matrices, and what is done between them."""

    def __init__(self, between: Any, rows: int = 64) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(16, rows), nn.Linear(rows, 16), between

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.up(hidden)))


def cut(between: Any, dtype: torch.dtype = torch.float32, parts: int = 4) -> tuple[nn.Module, CutPlan]:
    layer = nn.Module()
    layer.mlp = Network(between).to(dtype).eval()
    return layer, cut_layer({name: tuple(p.shape) for name, p in layer.named_parameters()}, 16, parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("between", [nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Mish(), lambda x: x.relu() ** 2])
def test_what_is_done_one_by_one_can_be_done_in_parts(between: Any, dtype: torch.dtype) -> None:
    require_elementwise(*cut(between, dtype))


@pytest.mark.parametrize("parts", [2, 4, 16])
@pytest.mark.parametrize(
    "between",
    [
        lambda x: x.softmax(-1),
        lambda x: torch.relu(x - x.mean(-1, keepdim=True) - x.std(-1, keepdim=True)),
        lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:]),
        lambda x: x.where(x >= x.topk(3, -1).values.min(), 0.0),
    ],
)
def test_what_needs_all_of_the_inside_is_refused(between: Any, parts: int) -> None:
    with pytest.raises(ConfigError, match=r"mlp .*does not take the 64 elements of the size inside one by one"):
        require_elementwise(*cut(between, parts=parts))


def test_a_network_that_takes_its_weights_without_calling_their_modules_is_refused() -> None:
    layer, plan = cut(nn.SiLU())
    module = layer.mlp

    class Direct(Network):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.down(nn.functional.linear(hidden, self.up.weight).relu())

    module.__class__ = Direct
    with pytest.raises(ConfigError, match="does not call its matrices as modules"):
        require_elementwise(layer, plan)


def test_a_model_with_a_threshold_over_the_inside_is_not_cut_and_is_as_it_was() -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    sparse = {"layer_types": kinds, "activation_sparsity_pattern": [0.0, 0.9, 0.0], "num_kv_shared_layers": 0}
    sizes = {"vocab_size_per_layer_input": GQA["vocab_size"], "hidden_size_per_layer_input": 8, "head_dim": 8}
    config = t.Gemma3nTextConfig(**GQA | sparse | sizes | {"laurel_rank": 4, "intermediate_size": [48] * 3})
    model = t.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ConfigError, match=r"shards=2: model.layers.1: mlp \(Gemma3nTextMLP\) does not take the 48"):
        elastic.wrap(model, places=small(8 << 20), shards=2)
    elastic.wrap(model, places=small(8 << 20))
    elastic.unwrap(model)
