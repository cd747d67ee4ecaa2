"""Attention for one new token, in which each key head is read once.

With one query token the query heads of a group are simply several queries of one key head, so no key is repeated:
[batch, groups * n, 1, dim] is viewed as [batch, groups, n, dim]. On CPUs the stock kernel reads grouped keys four times
as slowly at long contexts, and keys in bfloat16 without native instructions four times again; there two batched
matrix products with a softmax in float32 between them are the fastest (benchmarks/decode.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from elastic.kvcache.visits import attend_elsewhere

NAME = "elastic_sdpa"
_STOCK = "sdpa"
_UNUSUAL = ("softcap", "position_bias", "s_aux")  # what the stock function refuses or adds to the scores


def register() -> None:
    """Have transformers know the function by its name. Can be called twice."""
    AttentionInterface.register(NAME, elastic_sdpa)
    AttentionMaskInterface.register(NAME, sdpa_mask)


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
    returns [batch, q, heads, dim], on the query's device. Anything but one query token goes to the stock function; what
    an engine caches in blocks, to its `cache`; keys and values on another device are visited or fetched."""
    if key.device != query.device:
        return attend_elsewhere(
            elastic_sdpa, module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        ), None
    attend = getattr(kwargs.get("cache"), "attend", None)
    if attend is not None and not dropout and not any(kwargs.get(name) is not None for name in _UNUSUAL):
        return attend(module.layer_idx, query, key, value, scaling, kwargs["write_index"]), None
    if query.shape[2] != 1 or not _plain(attention_mask, dropout, kwargs):
        out, weights = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out, weights
    batch, heads, _, dim = query.shape
    packed = query.reshape(batch, key.shape[1], heads // key.shape[1], dim)
    if query.device.type == "cpu" and _rows_merge(key) and _rows_merge(value):
        out = _matmul_attention(packed, key, value, attention_mask, scaling or dim**-0.5)
    else:
        out = nn.functional.scaled_dot_product_attention(packed, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(batch, 1, heads, value.shape[-1]), None


def _matmul_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Query [batch, groups, n, dim], key and value [batch, groups, k, dim], mask [batch, 1, 1, k] or [1, 1, 1, k]."""
    batch, groups, n, _ = query.shape
    by_key = torch.bmm(key.flatten(0, 1), query.flatten(0, 1).transpose(1, 2))  # the faster order for strided keys
    scores = by_key.transpose(1, 2).contiguous().float() * scaling
    if mask is not None:
        scores = scores.view(batch, groups, n, -1)
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        scores = scores.flatten(0, 1)
    weights = torch.softmax(scores, dim=-1).to(value.dtype)
    return torch.bmm(weights, value.flatten(0, 1)).view(batch, groups, n, -1)


def _rows_merge(states: torch.Tensor) -> bool:
    """Whether [batch, heads, k, dim] can be seen as [batch * heads, k, dim] without a copy."""
    return states.shape[0] == 1 or states.stride(0) == states.shape[1] * states.stride(1)


def _plain(mask: torch.Tensor | None, dropout: float, kwargs: dict[str, Any]) -> bool:
    shared_mask = mask is None or mask.shape[1] == 1
    return shared_mask and not dropout and kwargs.get("position_bias") is None and kwargs.get("cache") is None


class AttentionSwitch:
    """Sets `elastic_sdpa` on the parts of a model that use `sdpa`, and sets them back. Other choices are left alone."""

    def __init__(self, model: nn.Module) -> None:
        self._configs = list(_configs_with_sdpa(model))
        self._all = list({id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}.values())

    def install(self) -> None:
        register()
        for config in self._configs:
            config._attn_implementation_internal = NAME

    def remove(self) -> None:
        for config in self._configs:
            if config._attn_implementation_internal == NAME:
                config._attn_implementation_internal = _STOCK

    def everywhere(self) -> bool:
        """Whether `elastic_sdpa` is now the attention of all parts of the model."""
        return len(self._configs) == len(self._all) and all(c._attn_implementation == NAME for c in self._all)


def _configs_with_sdpa(model: nn.Module) -> Iterator[PretrainedConfig]:
    """The configs of submodels whose attention goes through the interface (others compare the name themselves)."""
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and id(module.config) not in seen:
            seen.add(id(module.config))
            if module._supports_attention_backend and module.config._attn_implementation in (_STOCK, NAME):
                yield module.config
