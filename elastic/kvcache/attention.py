"""Attention for one new token with grouped query heads, packed so that each key head is read once.

Stock `sdpa` asks the kernel to group the heads itself, which on CPUs is four times slower at long contexts: the fast
path there wants as many key heads as query heads. With one query token the heads of a group are simply the queries of
one key head, so [batch, groups * n, 1, dim] is viewed as [batch, groups, n, dim] and no key is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "elastic_sdpa"
_STOCK = "sdpa"


def elastic_sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Same contract as Hugging Face's `sdpa`: query [batch, heads, q, dim], key and value [batch, kv_heads, k, dim];
    returns [batch, q, heads, dim]. Anything but one query token over grouped heads goes to the stock function."""
    groups = key.shape[1]
    if query.shape[1] == groups or query.shape[2] != 1 or not _plain(attention_mask, dropout, kwargs):
        out, weights = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out, weights
    batch, heads, _, dim = query.shape
    packed = query.reshape(batch, groups, heads // groups, dim)
    out = nn.functional.scaled_dot_product_attention(packed, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(batch, 1, heads, value.shape[-1]), None


def _plain(mask: torch.Tensor | None, dropout: float, kwargs: dict[str, Any]) -> bool:
    shared_mask = mask is None or mask.shape[1] == 1
    return shared_mask and not dropout and kwargs.get("position_bias") is None and kwargs.get("cache") is None


class AttentionSwitch:
    """Sets `elastic_sdpa` on the parts of a model that use `sdpa`, and sets them back. Other choices are left alone."""

    def __init__(self, model: nn.Module) -> None:
        self._configs = list(_configs_with_sdpa(model))

    def install(self) -> None:
        AttentionInterface.register(NAME, elastic_sdpa)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        for config in self._configs:
            config._attn_implementation_internal = NAME

    def remove(self) -> None:
        for config in self._configs:
            if config._attn_implementation_internal == NAME:
                config._attn_implementation_internal = _STOCK


def _configs_with_sdpa(model: nn.Module) -> Iterator[PretrainedConfig]:
    """The configs of submodels whose attention goes through the interface (others compare the name themselves)."""
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and id(module.config) not in seen:
            seen.add(id(module.config))
            if module._supports_attention_backend and module.config._attn_implementation in (_STOCK, NAME):
                yield module.config
