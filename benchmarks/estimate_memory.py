"""The most bytes of one rank in a fresh process: weights by its ledger, and what the process has more than at rest."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from estimate_fleets import resident
from estimate_shapes import CONTEXT, STEP_TOKENS

from elastic.engines.continuous.chunk_profile import Mix, profile_chunks
from elastic.estimation.profile import engine_for

MIXES: tuple[Mix, ...] = (((0, STEP_TOKENS),), ((205, STEP_TOKENS),), ((250, 1),) * 8)


def peaks(path: Path, forms: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return for each form the ledger's bytes at rest, and the most that the process had more, with caches."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transformers.models.llama.modeling_llama", "elastic.engines.continuous"])
    with context.Pool(1, maxtasksperchild=1) as pool:
        return {form: pool.apply(_peak, (str(path), form)) for form in forms}


def _peak(path: str, form: str) -> tuple[int, int]:
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)
    with engine_for(model, form, torch.device("cpu"), CONTEXT, STEP_TOKENS) as engine:
        profile_chunks(engine, [((0, 1),)], 1)  # code and kernels of its own
        (place,) = model.elastic.status().places
        ledger = sum(place.owners.values())  # with the caches' first pages: the process at rest has them, too
        before = resident("self", "VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        for mix in MIXES:
            profile_chunks(engine, [mix], 1)
        return ledger, max(0, resident("self", "VmHWM") - before)
