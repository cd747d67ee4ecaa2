"""The most bytes that a batch takes while it is computed, measured in an engine."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from elastic.engines.continuous import ContinuousEngine
from elastic.engines.continuous.chunk_profile import Mix, profile_chunks
from elastic.estimation.model_layout import ModelLayout
from elastic.estimation.work import activation_bytes, copied_bytes


def measured_share(engine: ContinuousEngine, layout: ModelLayout, mixes: Sequence[Mix], form: str) -> float:
    """Return the largest share of what is bounded by formula that batches take: of activations and copied caches.

    The engine has not been started; `layout` is of its model, `form` that of its keys and values.
    """
    return max(peak_bytes(engine, mix) / bound_bytes(layout, mix, form) for mix in mixes)


def bound_bytes(layout: ModelLayout, mix: Mix, form: str) -> int:
    """Bound the bytes of a batch, with what decode steps copy of the cache."""
    tokens, context = sum(count for _, count in mix), max(start + count for start, count in mix)
    seen = sum(start + count for start, count in mix if count == 1)
    return activation_bytes(layout, tokens, len(mix), context) + copied_bytes(layout, seen, form)


def peak_bytes(engine: ContinuousEngine, mix: Mix) -> int:
    """Return the most bytes of tensors that are alive at a time in a batch, but for those that were before."""
    device = engine._model.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
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
