"""A model whose matrices oneDNN can pack, and a choice that packs them whatever takes less time on this CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers as t

from elastic.weights.prepacked.onednn import OneDNNLayout, find_layout
from support.architectures import GQA

WIDE = {**GQA, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 128}
"""Sizes of matrices that oneDNN can pack, the head's too, but for those of keys and values."""


def any_layout(weight: torch.Tensor, together: Sequence[torch.Tensor] = ()) -> OneDNNLayout | None:
    """Return how a matrix could be packed, to stand in for `options.prepacked_layout`."""
    return find_layout((weight.shape[0], weight.shape[1]), weight.dtype) if weight.ndim == 2 else None


def wide_llama(dtype: torch.dtype = torch.float32) -> Any:
    """A model in evaluation mode, always the same."""
    torch.manual_seed(0)
    return t.LlamaForCausalLM(t.LlamaConfig(**WIDE)).to(dtype).eval()
