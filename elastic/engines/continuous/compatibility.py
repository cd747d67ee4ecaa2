"""The models that continuous batching can serve: they are tried with two tokens, not by name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from elastic.engines.core.kv_state import INT8, KVFormat, usual_block_tokens
from elastic.engines.executor.block_layout import LAYOUTS
from elastic.engines.executor.layer_groups import layer_groups
from elastic.engines.pipeline.forward import Attended, StageForward
from elastic.engines.pipeline.turn import Turn
from elastic.errors import ConfigError, require, require_count, require_flag, require_whole
from elastic.kvcache.attention import AttentionSwitch, elastic_attention
from elastic.kvcache.score_terms import ScoreTerms
from elastic.kvcache.storage.pool import KVPool
from elastic.planning.sharding.heads import kv_shards
from elastic.planning.sharding.numbers import of_layers
from elastic.runtime.runtime import runtime
from elastic.weights.decoder import PAGED_CACHE, layer_count

_WINDOW_MASK = "create_sliding_window_causal_mask"  # in the Python module of each model that calls it

_REASONS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a model raises that needs more than tokens: images, or a cache of its own."""


class _CacheProbe:
    """Stands for the cache in one forward pass of two tokens: notes what the layers give it.

    With `ends` each layer ends there.
    """

    def __init__(self, *, ends: bool) -> None:
        self._ends = ends
        self.shapes: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}
        """Layer -> heads and dim of its keys, and of its values."""

    def new_tokens(self) -> list[int]:
        return [2]

    def of_requests(self, start: int, stop: int) -> _CacheProbe:
        return self

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        terms: ScoreTerms | None = None,
    ) -> torch.Tensor:
        """Attend to these tokens, by no terms. Shapes as those of `RequestSlice.attend`."""
        if layer in self.shapes:
            raise ConfigError(f"layer {layer} attends several times to what it keeps once; use generate instead")
        self.shapes[layer] = (key.shape[1], key.shape[3]), (value.shape[1], value.shape[3])
        if self._ends:
            raise Attended
        gqa = key.shape[1] != query.shape[1]
        attended = scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=gqa)
        return attended.transpose(1, 2).contiguous()


def refusal(model: Any) -> str:
    """Say why a model on the meta device, not wrapped, would not be served, in the words of engines; "": it would be.

    Operations may fail there alone, in many ways: what would come behind them is not seen then.
    """
    switch = AttentionSwitch(model)
    switch.install()
    try:
        kv_shape(model, None)
    except ConfigError as error:
        cause = error.__cause__
        of_signature = isinstance(cause, TypeError) and "argument" in str(cause)
        return str(error) if cause is None or of_signature else ""
    finally:
        switch.remove()
    return ""


@torch.no_grad()
def kv_shape(model: Any, present: Sequence[int] | None) -> tuple[int, int]:
    """Return the heads of keys and values in every layer of a model, and the dim of keys; values have no more.

    `present` are the layers that a wrapped model has here; None: all of them. Raises `ConfigError` for one whose caches
    do not come in equal blocks, or that attends in a way that is not known.
    """
    config = model.config.get_text_config(decoder=True)
    windows = [group.window for group in layer_groups(config) if group.window is not None]
    if windows and not _masks_windows(model):
        raise ConfigError(
            f"sliding_window={windows[0]} is in the config of {type(model).__name__}, and its code makes no mask of "
            "one, so its tokens do not go by it; use generate instead"
        )
    attention = config._attn_implementation
    by_itself = ConfigError(
        f"{type(model).__name__} attends by code of its own, or of another library; continuous batching needs "
        "transformers' attention interface: use generate instead"
    )
    if elastic_attention(model, config) is None:
        if attention in ("sdpa", "eager"):
            raise by_itself
        raise ConfigError(
            f"attn_implementation={attention!r}: continuous batching needs a model that was loaded with 'sdpa' or "
            "'eager'"
        )
    if not getattr(config, "is_causal", True):  # masks are made by it, which engines do not ask for
        raise ConfigError("is_causal=False: this model's tokens see those behind them too; use generate instead")
    layers = range(layer_count(config) or 0) if present is None else present
    probe = _CacheProbe(ends=present is not None)
    try:
        _call(model, probe, present)
    except ConfigError:
        raise
    except _REASONS as error:
        raise ConfigError(f"continuous batching cannot call this model: {error!r}; use generate instead") from error
    if not probe.shapes:
        raise by_itself
    shapes = set(probe.shapes.values())
    if len(probe.shapes) == len(layers) and len(shapes) == 1:
        (heads, dim), (value_heads, value_dim) = shapes.pop()
        if heads == value_heads and dim >= value_dim:
            return heads, dim
    listed = ", ".join(f"{keys} and {values}" for keys, values in sorted(shapes))
    raise ConfigError(
        f"continuous batching needs keys of one (heads, dim) in all {len(layers)} layers, and values of as many heads "
        f"that are no larger; {len(probe.shapes)} layers have {listed}"
    )


def _call(model: Any, probe: _CacheProbe, present: Sequence[int] | None) -> None:
    """Call a model with two tokens, and as far as its layers are there; None: all are.

    The mask has one element, as those of engines: it has more where attention is called if the model changes it.
    """
    positions = torch.arange(2, device=model.device)[None]
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)
    inputs = {
        "input_ids": torch.zeros_like(positions),
        "position_ids": positions,
        "attention_mask": mask,
        PAGED_CACHE: probe,
        "use_cache": False,
    }
    if present is None:
        model(**inputs)
        return
    forward = StageForward(model, Turn())
    try:
        forward.run_to_attention(present, inputs)
    finally:
        forward.close()


def require_options(**options: Any) -> None:
    """Raise `ConfigError` for options of an engine, all of them by name, that cannot be."""
    for name in ("max_requests", "max_batch_tokens"):
        require_whole(options[name], name)
    for name in ("max_queue", "block_tokens", "cohorts"):
        require_count(options[name], name)
    for name in ("share_prefixes", "enforce_eager", "cuda_graphs"):
        require_flag(options[name], name)
    for name, method, kind in (("step_budget", "tokens", "a StepBudget"), ("grammars", "matcher", "a GrammarCompiler")):
        given = options[name]
        require(given is None or callable(getattr(given, method, None)), name, given, f"{kind}, or None")
    layout, dtype, dtypes = options["block_layout"], options["kv_cache_dtype"], ("auto", INT8)
    require(layout in LAYOUTS, "block_layout", layout, f"one of {', '.join(sorted(LAYOUTS))}")
    require(dtype in dtypes, "kv_cache_dtype", dtype, " or ".join(dtypes))


def kv_format(model: Any, block_tokens: int | None, block_layout: str, dtype: str) -> KVFormat:
    """Return the form of a wrapped model's blocks. Raises `ConfigError` for a model that cannot have it."""
    dropped, shards_here = runtime(model).dropped, runtime(model).shards_here
    heads, dim = kv_shape(model, [layer for layer, parts in enumerate(shards_here) if parts] if dropped else None)
    groups = layer_groups(model.config.get_text_config(decoder=True))
    parts = kv_shards(runtime(model).shards, heads)
    if dtype == INT8 and dim % 2:
        raise ConfigError(f"kv_cache_dtype={INT8!r} needs heads of an even size; this model's have {dim}: use 'auto'")
    dtype = str(model.dtype).removeprefix("torch.") if dtype == "auto" else dtype
    layers = tuple((of_layers(group.layers, parts), group.window) for group in groups)
    tokens = block_tokens or usual_block_tokens(dtype, dim)
    return KVFormat(tokens, block_layout, dtype, heads // parts, dim, layers, parts)


def _masks_windows(model: Any) -> bool:
    """Return whether the code of a model's decoder asks transformers for masks of sliding windows."""
    config = model.config.get_text_config(decoder=True)
    kinds = {type(module) for module in model.modules() if getattr(module, "config", None) is config}
    homes = {sys.modules.get(base.__module__) for kind in kinds for base in kind.__mro__}
    return any(hasattr(home, _WINDOW_MASK) for home in homes)


def one_pool(model: Any) -> KVPool:
    """Return the KV pool of a model that the engine can serve. Raises `ConfigError` for others."""
    pools = list(runtime(model).kv.memory.shares())
    if len(pools) != 1:
        raise ConfigError(f"its KV cache is at {len(pools)} places; continuous batching needs all of it at one")
    return pools[0]
