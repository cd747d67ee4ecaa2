"""The most bytes of one rank in a fresh process: its ledger's, and what the process has more outside of pages."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import torch
import transformers
from estimate_fleets import forget_most, outside_bytes
from estimate_shapes import CONTEXT, STEP_TOKENS

from elastic.engines.continuous.chunk_profile import Mix, profile_chunks
from elastic.estimation.profile import engine_for

MIXES: tuple[Mix, ...] = (((0, STEP_TOKENS),), ((205, STEP_TOKENS),), ((250, 1),) * 8)
"""Each needs more pages of keys and values than those before it."""


def peak_bytes(path: Path, form: str) -> int:
    """Return the most bytes of a rank in a form, with caches, beyond those of its process at rest but for pages."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transformers.models.llama.modeling_llama", "elastic.engines.continuous"])
    with context.Pool(1) as pool:
        return pool.apply(_peak, (str(path), form))


def _peak(path: str, form: str) -> int:
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)
    with engine_for(model, form, torch.device("cpu"), CONTEXT, STEP_TOKENS) as engine:
        profile_chunks(engine, [((0, 1),)], 1)  # code and kernels of its own
        rest, most = outside_bytes("self"), 0
        for mix in MIXES:
            forget_most("self")
            profile_chunks(engine, [mix], 1)
            (place,) = model.elastic.status().places  # keys and values may have pages of weights that were swapped
            most = max(most, sum(place.owners.values()) + outside_bytes("self", "VmHWM") - rest)
    return most
