"""What tests of layers that come and go part by part share: a model whose parts are pages, and places for it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import elastic
from support.architectures import GQA
from support.wrapped_model import PAGE

SHARDS = 4
LAYERS = 2


def wide(seed: int = 0) -> Any:
    """A model whose matrices are some pages: 128 KiB each, of three sizes of pages."""
    torch.manual_seed(seed)
    config = LlamaConfig(**{**GQA, "hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": LAYERS})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


def place(name: str = "cpu", page_bytes: int = PAGE) -> elastic.Place:
    return elastic.Place(name, torch.device("cpu"), 16 << 20, page_bytes=page_bytes)
