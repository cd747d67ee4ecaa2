"""Tiny models with random weights, one for each architecture that the tests cover. No file is read."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest
import torch
import transformers as t

VOCAB = 96
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GQA: dict[str, Any] = {**SMALL, "num_key_value_heads": 2}
MOE: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MLA: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}

CONFIGS: dict[str, Any] = {
    "llama-mha": lambda: t.LlamaConfig(**SMALL),
    "llama-gqa": lambda: t.LlamaConfig(**GQA),
    "qwen2-sliding": lambda: t.Qwen2Config(**GQA, use_sliding_window=True, sliding_window=16, max_window_layers=1),
    "qwen3": lambda: t.Qwen3Config(**GQA, head_dim=8),
    "qwen3-moe": lambda: t.Qwen3MoeConfig(**GQA, **MOE, head_dim=8),
    "mistral-sliding": lambda: t.MistralConfig(**GQA, sliding_window=16),
    "mixtral": lambda: t.MixtralConfig(**GQA, **MOE),
    "gemma": lambda: t.GemmaConfig(**GQA, head_dim=8),
    "gemma2": lambda: t.Gemma2Config(
        **GQA,
        head_dim=8,
        sliding_window=16,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=2.0,
        initializer_range=0.08,  # scores of up to 17: the cap is felt
        tie_word_embeddings=False,  # else it says the last token again, whatever it attends to
        attn_implementation="eager",  # earlier versions choose sdpa, which leaves the cap out
    ),
    "gemma3": lambda: t.Gemma3TextConfig(**GQA, head_dim=8, sliding_window=16, query_pre_attn_scalar=8),
    "gemma4": lambda: t.Gemma4UnifiedTextConfig(**GQA, head_dim=8, global_head_dim=16, sliding_window=16),
    "phi3": lambda: t.Phi3Config(**GQA),
    "phi": lambda: t.PhiConfig(**SMALL),
    "gpt2": lambda: t.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=512, bos_token_id=1, eos_token_id=None
    ),
    "gpt-neox": lambda: t.GPTNeoXConfig(**SMALL),
    "deepseek-v3": lambda: t.DeepseekV3Config(**SMALL, **MLA),
    "gpt-oss": lambda: t.GptOssConfig(**GQA, **MOE, head_dim=8, sliding_window=16),
    "falcon": lambda: t.FalconConfig(**SMALL, new_decoder_architecture=True, num_kv_heads=2),
    "opt": lambda: t.OPTConfig(**{**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bloom": lambda: t.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=3, n_head=4, eos_token_id=None),
    "qwen3-next": lambda: t.Qwen3NextConfig(
        **{**GQA, "num_hidden_layers": 4},
        **MOE,
        head_dim=8,
        shared_expert_intermediate_size=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
}


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu") -> Any:
    """A model in evaluation mode, the same for the same arguments."""
    torch.manual_seed(seed)
    config = CONFIGS[name]()
    model = t.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():  # far from uniform logits, so that greedy choices are clear
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
        for name, sinks in model.named_parameters():
            if name.endswith(".sinks"):  # of which heads have different ones
                sinks.copy_(torch.linspace(-2, 3, len(sinks)))
    return model.requires_grad_(False).to(device)


@functools.cache
def plain(name: str) -> Any:
    """`build(name)`, one for all who do nothing to it."""
    return build(name)


def prompt(batch: int = 1, length: int = 24, seed: int = 1, device: Any = "cpu") -> dict[str, torch.Tensor]:
    """Token ids and mask, [batch, length]; all rows but the last are padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(batch - 1):
        mask[row, : 3 * (row + 1)] = 0
        ids[row, : 3 * (row + 1)] = 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def in_turn(first: Iterable[Any], second: Sequence[Any], often: Collection[Any] | None = None) -> list[Any]:
    """Give each value of an axis, such as architectures, one of another in turn; other pairs are for `make long`.

    So are all of those that are not among the `often` ones, where these are given. `first`, or `often`, should have as
    many values as `second`, or more: then each value of the second is there.
    """
    values = list(first)
    turns = [value for value in values if often is None or value in often]
    return [
        pytest.param(a, b, marks=[] if a in turns and number == turns.index(a) % len(second) else pytest.mark.long)
        for a in values
        for number, b in enumerate(second)
    ]


def long_ones(*values: Any) -> list[Any]:
    """Leave values of an axis to `make long`: what they show, others show in `make test`."""
    rows = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*row, marks=pytest.mark.long) for row in rows]
