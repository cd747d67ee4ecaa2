"""A model whose layers can be cut so that each part of a matrix is a page of a GPU, 2 MiB."""

from __future__ import annotations

from typing import Any

import torch
import transformers as t

from support.architectures import GQA

GPU_PAGE = 2 << 20
SHARDS = 4
LAYERS = 2


def wide(device: str = "cpu") -> Any:
    """A model in evaluation mode, always the same; each of its cut matrices has `SHARDS` pages."""
    torch.manual_seed(0)
    inside = SHARDS * GPU_PAGE // (4 * GQA["hidden_size"])
    config = t.LlamaConfig(**{**GQA, "intermediate_size": inside, "num_hidden_layers": LAYERS})
    model = t.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model.requires_grad_(False).to(device)
