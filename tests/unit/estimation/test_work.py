"""What a batch makes layers do: all of their matrices once for each token, but for experts that it is not sent to."""

from __future__ import annotations

import pytest
import torch
import transformers

from elastic.estimation.model_layout import ModelLayout, layout_of
from elastic.estimation.weight_pages import WeightPages
from elastic.estimation.work import activation_bytes, layer_work
from elastic.planning.estimate.configuration import FULL
from elastic.quant.formats.base import KernelTarget

HIDDEN, INNER, EXPERTS, CHOSEN = 32, 48, 8, 2
SIZES = {"vocab_size": 100, "max_position_embeddings": 512}


def dbrx(experts: int = EXPERTS, chosen: int = CHOSEN) -> ModelLayout:
    """Experts' matrices lie one below another, [experts * inner, hidden], and a config within has their number."""
    network = {"ffn_hidden_size": INNER, "moe_num_experts": experts, "moe_top_k": chosen, "hidden_size": HIDDEN}
    attention = {"kv_n_heads": 2, "rope_theta": 1e4}
    config = transformers.DbrxConfig(
        d_model=HIDDEN, n_heads=4, n_layers=2, vocab_size=100, ffn_config=network, attn_config=attention
    )
    return layout_of(config, torch.bfloat16)


def mixtral() -> ModelLayout:
    config = transformers.MixtralConfig(
        **SIZES,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
    )
    return layout_of(config, torch.bfloat16)


@pytest.mark.parametrize("layout", [dbrx(), mixtral()], ids=["dbrx", "mixtral"])
def test_a_token_meets_the_experts_that_it_is_sent_to(layout: ModelLayout) -> None:
    (kind,) = layout.kinds
    pages = WeightPages(layout, 1 << 16, KernelTarget("cuda", "sm90"))
    work = layer_work(pages, kind, FULL, layout.kv_shape(FULL), 1)
    matrices = sum(slot.parameter.numel() for slot in kind.slots.values() if slot.parameter.ndim > 1)
    experts = EXPERTS * 3 * INNER * HIDDEN
    met = matrices - experts + experts * CHOSEN // EXPERTS
    assert sum(each.token_flops for each in work) == 2 * met
    assert sum(each.weight_bytes for each in work) == sum(slot.parameter.nbytes for slot in kind.slots.values())
    assert [each.least_met for each in work if each.weight_bytes == 2 * experts] == [CHOSEN / EXPERTS]


def test_a_batch_has_rows_of_the_experts_that_its_tokens_are_sent_to_and_not_of_all() -> None:
    few, many, more = (activation_bytes(each, 512, 1, 64) for each in (dbrx(), dbrx(4 * EXPERTS), dbrx(chosen=4)))
    assert few == many < more
