"""Memory of a GPU that steps take beside the pages: it is measured when a rank begins, and kept free. (AMOEBA, table 1)

What a step takes while it is computed comes from torch's allocator. On a CPU a place's budget is one of pages alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack

import torch

from elastic.engines.continuous.engine import ContinuousEngine
from elastic.errors import ConfigError
from elastic.estimation.activations import StepBytes, step_bytes
from elastic.kvcache.storage.budget import WeightsShare
from elastic.memory.pages.page_pool import PagePool
from elastic.memory.places import free_bytes, give_back_freed
from elastic.planning.arrangement.step_pages import StepPages
from elastic.weights.decoder import batch_context_length

OWNER = "fixed:activations"
MOST_FIXED = 0.1
"""Of the cache: where the longest prompts need no larger share, it is kept for them, however short requests are."""
Measure = Callable[[ContinuousEngine, int, int], StepBytes]


def keep_activations(
    engine: ContinuousEngine, most_tokens: int, most_requests: int, stack: ExitStack, measure: Measure = step_bytes
) -> None:
    """Keep free what the largest steps of an engine take, until the stack ends, if its place is on a GPU.

    Where the GPU has as much beside the budgets of its places, nothing is kept of these. Else the place is charged,
    and the cache smaller by that. The engine has not been started. Raises `ConfigError` where no cache is left.
    """
    pool = engine._memory.kv.pool
    if pool.device.type != "cuda":
        return
    steps = measure(engine, most_tokens, most_requests)
    give_back_freed(pool.device)
    # whatever its instance has room for
    every = pool.budget_pages // engine._memory.sector_pages * sector_tokens(engine)
    largest = steps.fixed + max(steps.prompt * longest_prompt(engine), steps.decode * every)
    if largest > _beside_budgets(engine, pool.device):
        charge(engine, steps, stack)


def charge(engine: ContinuousEngine, steps: StepBytes, stack: ExitStack) -> None:
    """Have the place of an engine be charged with what steps take, and the engine say what longer requests need."""
    memory, kv = engine._memory, engine._memory.kv
    pool, pages, sector = kv.pool, kv.limits.maximum, memory.sector_pages
    tokens = sector_tokens(engine)
    fixed, prompt = steps.fixed, steps.prompt
    if prompt * longest_prompt(engine) <= MOST_FIXED * pages * pool.page_bytes:
        fixed, prompt = fixed + math.ceil(prompt * longest_prompt(engine)), 0.0
    each = StepPages(prompt * tokens / pool.page_bytes, steps.decode * tokens / pool.page_bytes)
    sectors = (pages - pool.pages_for(fixed)) // (sector + each.of(1.0))
    if sectors < 1:
        raise ConfigError(
            f"place {pool.name}: steps take {fixed:,} bytes besides the pages, which leaves no room for a KV cache; "
            "give it a larger budget, or the engine a smaller max_batch_tokens"
        )
    kept = pool.pages_for(fixed) + sectors * each.of(1.0)
    share = WeightsShare(kv)
    if not share.take_from_cache(kept):
        raise ConfigError(f"place {pool.name}: caches have the {kept * pool.page_bytes:,} bytes that steps take")
    share.record_resident(kept)
    pool.charge(OWNER, kept * pool.page_bytes)
    stack.callback(_discharge, share, pool, kept)
    engine.step_pages = StepPages(each.prompt, each.decode, sectors * each.of(1.0))


def give_back_for_steps(engine: ContinuousEngine) -> None:
    """Have the device have all pages that nobody needs, where some of them are kept free for steps."""
    if engine.step_pages.charged:
        for pool in engine.runtime.pools:
            pool.unmap_idle()
            pool.trim()


def sector_tokens(engine: ContinuousEngine) -> int:
    """Return the tokens of an engine's sector."""
    form, room = engine.kv_format, engine.reports.kv_room()
    return min(room.sector_pages) * room.page_bytes // form.block_bytes * form.block_tokens


def longest_prompt(engine: ContinuousEngine) -> int:
    """Bound the tokens of a request that so many ranks like this could hold as share a layer."""
    every = engine._memory.kv.pool.budget_pages * engine.shards // engine._memory.sector_pages * sector_tokens(engine)
    return min(every, batch_context_length(engine._config) or every)


def _beside_budgets(engine: ContinuousEngine, device: torch.device) -> int:
    """Return the bytes of a device that will be free when the budgets of this process's places there are used up."""
    left = free_bytes(device)
    for pool in engine.runtime.pools:
        if pool.device == device:
            status = pool.status()  # of its budget, what is neither created nor held outside of the pages
            outside = sum(nbytes for owner, nbytes in status.owners.items() if owner.startswith("fixed:"))
            left -= status.budget_bytes - outside - pool.backend.created * pool.page_bytes
    return left


def _discharge(share: WeightsShare, pool: PagePool, kept: int) -> None:
    pool.discharge(OWNER, kept * pool.page_bytes)
    share.record_resident(-kept)
    share.give_to_cache(kept)
