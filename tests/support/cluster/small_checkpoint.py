"""The files of a small model, for ranks that load what they serve: of few layers, so that a step takes little time."""

from __future__ import annotations

from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from support.lossless_variant import exact

LAYERS, VOCABULARY = 4, 96
TOKEN_BYTES = LAYERS * 512
"""Of the KV cache, for each token."""


@cache
def small_model() -> Any:
    """Return what is served, of weights that the variant `half` holds exactly, so that a swap changes no token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, eos_token_id=None,
    )  # fmt: skip
    plain = LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in plain.parameters():
        if parameter.ndim > 1:
            parameter.mul_(4)  # far from uniform logits, so that greedy choices are clear
    return exact(plain)


@cache
def _files() -> TemporaryDirectory[str]:
    folder: TemporaryDirectory[str] = TemporaryDirectory(prefix="elastic-small-")
    small_model().save_pretrained(folder.name)
    return folder


def checkpoint() -> str:
    """Return the directory of its files, which are there until this process ends."""
    return _files().name
