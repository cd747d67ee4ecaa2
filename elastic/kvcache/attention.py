"""The attention function of a wrapped model.

One new token goes to the kernel that was measured as the fastest for it (`decode_table.py`), an engine's cache attends
by itself, anything else goes to the stock function. Models that were loaded with `eager` have a stock function of their
own, in the module of their class: it is called for everything but an engine's cache.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from elastic.errors import ConfigError
from elastic.kvcache.decode_table import table
from elastic.kvcache.remote_attention import Attention, attend_on_cache_device
from elastic.kvcache.score_terms import ScoreTerms, attend_by_scores
from elastic.weights.decoder import PAGED_CACHE

_SDPA, _EAGER = "sdpa", "eager"
_TERMS = ("softcap", "s_aux", "position_bias")  # what the stock function refuses or adds to the scores
_EAGER_FUNCTION = "eager_attention_forward"  # the name that it has in all modules of transformers
_elastic_modules: WeakSet[nn.Module] = WeakSet()
_installed: WeakSet[AttentionSwitch] = WeakSet()
_replaced: dict[str, tuple[Attention, Attention]] = {}  # Python module -> its `eager` function, and ours
_known: WeakSet[nn.Module] = WeakSet()  # those whose `eager` function gives what an engine computes
_lock = threading.Lock()


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
    cache; for keys and values on another device, see `remote_attention`.
    """
    if key.device != query.device:
        return attend_on_cache_device(
            elastic_sdpa, module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        ), None
    attend = getattr(kwargs.get(PAGED_CACHE), "attend", None)
    if attend is not None:
        if dropout or (attention_mask is not None and attention_mask.numel() != 1):  # engines give one of one element
            raise ConfigError("this model's attention has dropout, or masks that the model makes; use generate instead")
        causal = kwargs.get("is_causal")  # as it was called, else as the module says, else it is
        if not (vars(module).get("is_causal", True) if causal is None else causal):
            raise ConfigError("this model's tokens see those behind them too, as an encoder's do; use generate instead")
        if any(kwargs.get(name) is not None for name in _TERMS):
            return attend(module.layer_idx, query, key, value, scaling, terms=_terms(**kwargs)), None
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
    """Has the modules of a model attend by `elastic_sdpa` where its configs say `sdpa`, and, for an engine's cache
    alone, where they say `eager`. Other choices are left alone.

    The configs go on saying it: models look at the name, and copies of them are plain ones. Holds no module.
    """

    def __init__(self, model: nn.Module) -> None:
        models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        by_interface = [m for m in models if m._supports_attention_backend]  # others compare names themselves
        configs = {id(m.config) for m in by_interface}
        self._modules = WeakSet(m for m in model.modules() if id(getattr(m, "config", None)) in configs)
        self._configs = list({id(m.config): m.config for m in models}.values())
        self._all = len(by_interface) == len(models)
        self._eager_homes = {home for module in self._modules for home in _eager_homes(type(module))}

    def install(self) -> None:
        """Install the attention; another library's choice of what `sdpa` stands for is left alone too."""
        _elastic_modules.update(self._modules)
        with _lock:
            _installed.add(self)
            for home in self._eager_homes - _replaced.keys():
                stock = getattr(sys.modules[home], _EAGER_FUNCTION)
                _replaced[home] = stock, _eager_or_engine(stock)
                setattr(sys.modules[home], _EAGER_FUNCTION, _replaced[home][1])
            if ALL_ATTENTION_FUNCTIONS[_SDPA] is sdpa_attention_forward:
                AttentionInterface.register(_SDPA, _sdpa)

    def remove(self) -> None:
        """Undo `install`. Can be called twice, or without it."""
        _elastic_modules.difference_update(self._modules)
        with _lock:
            _installed.discard(self)
            needed = {home for switch in _installed for home in switch._eager_homes}
            for home in _replaced.keys() - needed:
                stock, ours = _replaced.pop(home)
                if getattr(sys.modules[home], _EAGER_FUNCTION) is ours:
                    setattr(sys.modules[home], _EAGER_FUNCTION, stock)
            if not _installed and ALL_ATTENTION_FUNCTIONS[_SDPA] is _sdpa:
                AttentionInterface.register(_SDPA, sdpa_attention_forward)

    def follows_cache(self) -> bool:
        """Return whether keys and values may be on another device than queries: `elastic_sdpa` is the attention of all
        parts of the model now, and none makes something else of what its cache returns first (the latents of MLA)."""
        return self._all and all(_says_sdpa(c) and not getattr(c, "kv_lora_rank", None) for c in self._configs)


def elastic_attention(model: nn.Module, config: PretrainedConfig) -> str | None:
    """Return when the modules of a model with this config now attend by `elastic_sdpa`, by what the config says.

    "sdpa": always; "eager": for an engine's cache; None: never.
    """
    if not any(m in _elastic_modules for m in model.modules() if getattr(m, "config", None) is config):
        return None
    return _SDPA if _says_sdpa(config) else _EAGER if config._attn_implementation == _EAGER else None


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


def _eager_homes(kind: type) -> Iterator[str]:
    """Yield the Python modules in which methods of a class find their `eager` function."""
    for base in kind.__mro__:
        if callable(getattr(sys.modules.get(base.__module__), _EAGER_FUNCTION, None)):
            yield base.__module__


def _eager_or_engine(stock: Attention) -> Attention:
    """Return a function that attends by `elastic_sdpa` for an engine's cache, and else by the model's own function."""

    @functools.wraps(stock)
    def eager_attention_forward(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if getattr(kwargs.get(PAGED_CACHE), "attend", None) is None:
            return stock(module, query, key, value, attention_mask, **kwargs)
        if module not in _known:
            _require_known(stock, module, query, key, value, **kwargs)
            _known.add(module)
        return elastic_sdpa(module, query, key, value, attention_mask, **kwargs)

    return eager_attention_forward


@torch.no_grad()
def _require_known(stock: Attention, module: nn.Module, *states: torch.Tensor, **kwargs: Any) -> None:
    """Raise `ConfigError` unless a module's `eager` function gives what an engine computes in its place.

    It is tried with a few tokens of its own, with large scores, and the heads and sizes of `states`: queries, keys and
    values, [1, heads, tokens, dim]. A function that is found in the model's file may do anything. Of a module on the
    meta device, which has no data, vectors such as sinks are drawn.
    """
    tokens, spread, scaling, device = 4, 8.0, kwargs.get("scaling"), states[0].device
    random = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, dtype=torch.float64, generator=random)
    query, key, value = (draw(1, s.shape[1], tokens, s.shape[3]) for s in states)
    if device.type != "meta":
        query, key, value = query.to(device), key.to(device), value.to(device)
    else:
        drawn = {id(p): nn.Parameter(draw(p.shape), False) for p in module.parameters() if p.ndim == 1}
        module, kwargs = copy.deepcopy(module, {**drawn}), {name: drawn.get(id(v), v) for name, v in kwargs.items()}
    query *= spread / (query.shape[3] ** 0.5 * (scaling or query.shape[3] ** -0.5))
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril_()
    mask = torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, torch.finfo(torch.float32).min)[None, None]
    expected = stock(module, query, key, value, mask, **{**kwargs, PAGED_CACHE: None})[0]
    ours = attend_by_scores(query, key, value, seen, scaling, _terms(**kwargs)).transpose(1, 2)
    if expected.shape != ours.shape or not torch.allclose(expected.to(ours.dtype), ours, rtol=0, atol=1e-2):
        raise ConfigError(
            f"the eager attention of {type(module).__name__} is not that of scaled dot products, softcaps and sinks, "
            "which continuous batching knows; use generate instead"
        )


def _terms(
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> ScoreTerms:
    """Return what a model's attention was called with that says what is done with scores."""
    if position_bias is not None:
        raise ConfigError("this model's attention adds biases of positions to its scores; use generate instead")
    return ScoreTerms(softcap, s_aux)


def _says_sdpa(config: PretrainedConfig) -> bool:
    return config._attn_implementation == _SDPA and ALL_ATTENTION_FUNCTIONS[_SDPA] is _sdpa
