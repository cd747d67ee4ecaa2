"""The attention function of a wrapped model.

One new token goes to the kernel that was measured as the fastest for it (`decode_table.py`), an engine's cache attends
by itself, anything else goes to the stock function.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from elastic.errors import ConfigError
from elastic.kvcache.decode_table import table
from elastic.kvcache.remote_attention import attend_on_cache_device

_SDPA = "sdpa"
_UNUSUAL = ("softcap", "position_bias", "s_aux")  # what the stock function refuses or adds to the scores
_elastic_modules: WeakSet[nn.Module] = WeakSet()
_installed: WeakSet[AttentionSwitch] = WeakSet()


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
    """Attend under the contract of Hugging Face's `sdpa`.

    query: [batch, heads, q, dim], key and value: [batch, kv_heads, k, dim]; returns [batch, q, heads, dim], on the
    query's device. Anything but one query token goes to the stock function; what an engine caches in blocks, to its
    `cache`; for keys and values on another device, see `remote_attention`.
    """
    if key.device != query.device:
        return attend_on_cache_device(
            elastic_sdpa, module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        ), None
    attend = getattr(kwargs.get("cache"), "attend", None)
    if attend is not None:
        if dropout or any(kwargs.get(name) is not None for name in _UNUSUAL):
            raise ConfigError(
                "this model's attention adds to its scores (softcap, sinks, biases); use generate instead"
            )
        return attend(module.layer_idx, query, key, value, scaling), None
    one_token = query.shape[2] == 1 and not dropout and (attention_mask is None or attention_mask.shape[1] == 1)
    one_dtype = query.dtype == key.dtype == value.dtype and not torch.is_autocast_enabled(query.device.type)
    if not (one_token and one_dtype) or kwargs.get("position_bias") is not None or kwargs.get("cache") is not None:
        out, weights = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out, weights
    batch, heads, _, dim = query.shape
    packed = query.reshape(batch, key.shape[1], heads // key.shape[1], dim)
    out = table.attend(packed, key, value, attention_mask, scaling or dim**-0.5)
    return out.reshape(batch, 1, heads, value.shape[-1]), None


class AttentionSwitch:
    """Has the modules of a model attend by `elastic_sdpa` where its configs say `sdpa`. Other choices are left alone.

    The configs go on saying `sdpa`: models look at the name, and copies of them are plain ones. Holds no module.
    """

    def __init__(self, model: nn.Module) -> None:
        models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        by_interface = [m for m in models if m._supports_attention_backend]  # others compare names themselves
        configs = {id(m.config) for m in by_interface}
        self._modules = WeakSet(m for m in model.modules() if id(getattr(m, "config", None)) in configs)
        self._configs = list({id(m.config): m.config for m in models}.values())
        self._all = len(by_interface) == len(models)

    def install(self) -> None:
        """Install the attention; another library's choice of what `sdpa` stands for is left alone too."""
        _elastic_modules.update(self._modules)
        _installed.add(self)
        if ALL_ATTENTION_FUNCTIONS[_SDPA] is sdpa_attention_forward:
            AttentionInterface.register(_SDPA, _sdpa)

    def remove(self) -> None:
        """Undo `install`. Can be called twice, or without it."""
        _elastic_modules.difference_update(self._modules)
        _installed.discard(self)
        if not _installed and ALL_ATTENTION_FUNCTIONS[_SDPA] is _sdpa:
            AttentionInterface.register(_SDPA, sdpa_attention_forward)

    def everywhere(self) -> bool:
        """Return whether `elastic_sdpa` is now the attention of all parts of the model."""
        return self._all and all(map(_says_sdpa, self._configs))


def attends(model: nn.Module, config: PretrainedConfig) -> bool:
    """Return whether the modules of a model with this config now attend by `elastic_sdpa`."""
    ours = any(m in _elastic_modules for m in model.modules() if getattr(m, "config", None) is config)
    return ours and _says_sdpa(config)


def attend_alike(original: nn.Module, copy: nn.Module) -> None:
    """Have a copy of a module attend as the original does."""
    for module, copied in zip(original.modules(), copy.modules(), strict=True):
        if module in _elastic_modules:
            _elastic_modules.add(copied)


def _sdpa(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend for the name `sdpa` while a model of the process is wrapped: for others by the stock function."""
    ours = not torch.compiler.is_compiling() and module in _elastic_modules
    out, weights = (elastic_sdpa if ours else sdpa_attention_forward)(module, *args, **kwargs)
    return out, weights


def _says_sdpa(config: PretrainedConfig) -> bool:
    return config._attn_implementation == _SDPA and ALL_ATTENTION_FUNCTIONS[_SDPA] is _sdpa
