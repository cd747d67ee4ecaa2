"""Which way the matrices of experts lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as t

from elastic.quant.formats.base import MatrixShape
from elastic.quant.formats.pruned import SemiStructured
from elastic.quant.variants.eligible import LayerParameters, matrices, matrix_of
from elastic.quant.variants.pack_model import packer
from elastic.quant.variants.variant import MatrixParameter, Variant
from support import architectures

LLAMA4 = {
    **architectures.GQA,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "head_dim": 8,
    "intermediate_size_mlp": 48,
}


def llama4() -> Any:
    """Its experts do not say that their matrices are [inputs, outputs]."""
    return t.Llama4ForCausalLM(t.Llama4TextConfig(**LLAMA4, interleave_moe_layer_step=1))


@pytest.mark.parametrize(
    ("name", "inner", "transposed"), [("llama4", 48, True), ("gpt-oss", 48, True), ("mixtral", 48, False)]
)
def test_inputs_of_experts_are_told_from_outputs(name: str, inner: int, transposed: bool) -> None:
    model = llama4() if name == "llama4" else architectures.build(name)
    layer = LayerParameters.of(model.model.layers[0])
    experts = {key: (p, way) for key, p, way in matrices(layer) if p.ndim == 3}
    assert {way for _, way in experts.values()} == {transposed}
    assert [matrix_of(*pair) for pair in experts.values()] == [MatrixShape(2 * inner, 32), MatrixShape(32, inner)]
    config = SemiStructured(2, 4)
    for key, packing in packer(Variant("2:4", config), {})(layer).items():
        if key in experts:
            assert isinstance(packing, MatrixParameter)
            value = packing.packed.value()
            groups = (value.mT if transposed else value).unflatten(-1, (-1, 4))
            assert (torch.count_nonzero(groups, -1) <= 2).all()
