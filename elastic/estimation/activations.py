"""The most bytes that a batch takes while it is computed, measured in an engine."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from elastic.engines.continuous import ContinuousEngine
from elastic.engines.continuous.chunk_profile import Mix, profile_chunks
from elastic.engines.core.kv_state import INT8
from elastic.engines.executor.attention_metadata import are_few
from elastic.engines.executor.layer_groups import layer_groups
from elastic.estimation.model_layout import ModelLayout, layout_of
from elastic.estimation.work import activation_bytes, copied_bytes, copies_blocks
from elastic.memory.backends.streams import synchronize
from elastic.planning.estimate.configuration import FULL
from elastic.weights.decoder import batch_context_length

Peak = Callable[[ContinuousEngine, Mix], int]
"""The most bytes that a batch takes."""


def measured_share(engine: ContinuousEngine, layout: ModelLayout, mixes: Sequence[Mix], form: str) -> float:
    """Return the largest share of what is bounded by formula that batches take: of activations and copied caches.

    The engine has not been started; `layout` is of its model, `form` that of its keys and values.
    """
    device = engine._model.device.type
    return max(peak_bytes(engine, mix) / bound_bytes(layout, mix, form, device) for mix in mixes)


def bound_bytes(layout: ModelLayout, mix: Mix, form: str, device: str) -> int:
    """Bound the bytes of a batch on a type of device, with what decode steps copy of the cache."""
    tokens, seen = sum(count for _, count in mix), sum(start + count for start, count in mix if count == 1)
    copied = copied_bytes(layout, seen, form, device)
    read = max((read_tokens(layout, start, count, device) for start, count in mix), default=0)
    return activation_bytes(layout, tokens, len(mix), read) + copied


def read_tokens(layout: ModelLayout, start: int, count: int, device: str) -> int:
    """Bound the tokens that attention of a chunk reads into memory of its own, and does not see where they lie."""
    seen = start + count
    if copies_blocks(layout, device) or not are_few(np.array([count]), np.array([seen])).all():
        return seen
    windows = [group.window for group in layer_groups(layout.decoder.config) if group.window is not None]
    shorter = [window for window in windows if window < seen and count > 1]
    return min(seen, max(shorter) + count) if shorter else 0


def bound_of(engine: ContinuousEngine) -> Peak:
    """Return what bounds the bytes of an engine's batches by formula, by a model without data that is made for it."""
    layout = layout_of(engine._model.config, engine._model.dtype)
    form = INT8 if engine.kv_format.dtype == INT8 else FULL
    device = engine._model.device.type
    return lambda _, mix: bound_bytes(layout, mix, form, device)


def peak_bytes(engine: ContinuousEngine, mix: Mix) -> int:
    """Return the most bytes of tensors that are alive at a time in a batch, but for those that were before."""
    device = engine._model.device
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        profile_chunks(engine, [mix], 1)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else each profile writes lines of its own to stderr
    with torch.profiler.profile(profile_memory=True) as profiler:
        profile_chunks(engine, [mix], 1)
    alive = most = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            alive += event.nbytes()
            most = max(most, alive)
    return most


@dataclass(frozen=True)
class StepBytes:
    """Bytes that the largest step of an engine takes while it is computed, but for its pages."""

    fixed: int
    """Of any,"""
    prompt: float
    """with so much for each token of the context of a part of a prompt, those before it included,"""
    decode: float
    """or for each token of all requests that are generated together."""


def step_bytes(engine: ContinuousEngine, most_tokens: int, most_requests: int) -> StepBytes:
    """Measure what steps of up to so many tokens, and so many requests, take: at three sizes of each, from a small
    part of the cache, and the line through the larger two.

    What steps take is bounded by formula where weights are at other ranks: such an engine computes no batch alone. The
    engine has not been started. Raises `ConfigError` for a cache that has no room for a batch.
    """
    peak = bound_of(engine) if engine.runtime.dropped_shards else peak_bytes
    block = engine.kv_format.block_tokens
    room = engine.reports.load().total_blocks * block // 2
    longest = min(room, batch_context_length(engine._config) or room)
    tokens = max(1, min(most_tokens, longest // 4))
    far = longest - tokens
    near = far * 3 // 4  # short ones are attended to where they lie
    alone, middle, end = (peak(engine, ((start, tokens),)) for start in (0, near, far))
    prompt = max(0.0, (end - middle) / max(1, far - near))
    count = max(1, min(most_requests, most_tokens, room // (4 * block)))
    each = max(2, min(room // count, longest) // (2 * block) * 2 * block)  # whole blocks are read
    fewer, more = (peak(engine, ((context - 1, 1),) * count) for context in (each // 2, each))
    decode = max(0.0, (more - fewer) / max(1, count * (each - each // 2)))
    parts = most_tokens / tokens  # of a larger cache, or of one that is shared
    fixed = max(parts * alone, parts * (end - prompt * longest), more - decode * count * each)
    return StepBytes(math.ceil(fixed), parts * prompt, decode)
