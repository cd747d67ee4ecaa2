"""The handlers of a model's actions."""

from __future__ import annotations

from contextlib import ExitStack, closing

from elastic.actions.base import ActionHandler
from elastic.actions.deferred import DeferredActions
from elastic.actions.drop import DropHandler
from elastic.actions.migrate import MigrateHandler
from elastic.actions.migrate_kv import MigrateKVHandler
from elastic.actions.pages.allocation import WeightPageAllocator
from elastic.actions.release import ReleaseHandler
from elastic.actions.replicate import ReplicateHandler
from elastic.actions.resize_kv import ResizeHandler
from elastic.actions.swap import SwapHandler
from elastic.hooks.device_transfer import TransferRouter
from elastic.hooks.replicas.dispatcher import ReplicaDispatcher
from elastic.kvcache.attention import attend_alike
from elastic.kvcache.split_cache import RowSplitCaches, without_rows
from elastic.memory.rate_limit import RateLimiter
from elastic.runtime.parts import ModelParts
from elastic.types import Drop, Evict, Fetch, Migrate, MigrateKV, Release, Replicate, ResizeKV, Restore, Swap
from elastic.weights.decoder import Decoder, parameter_names


def weight_handlers(
    parts: ModelParts, deferred: DeferredActions, copy_rate: RateLimiter, *, releases_wait: bool = False
) -> dict[type, ActionHandler]:
    """Make the handlers of the actions that pages travel by inside one place, whatever engine computes.

    `releases_wait`: caches give pages up between steps, so a release may wait for those of its prefetch buffer.
    """
    swap = SwapHandler(parts.weights, parts.broker, deferred, copy_rate)
    return {
        ResizeKV: ResizeHandler(parts.kv),
        Release: ReleaseHandler(parts.weights, parts.broker, deferred, waits=releases_wait),
        Swap: swap,
        Restore: swap,
    }


def make_handlers(
    decoder: Decoder, copy_rate: RateLimiter, parts: ModelParts, stack: ExitStack
) -> dict[type, ActionHandler]:
    """Make the handler of each type of action."""
    pools, weights, kv, forward = parts.pools, parts.weights, parts.kv, parts.forward
    deferred = DeferredActions(weights, parts.broker)
    allocator = stack.enter_context(closing(WeightPageAllocator(pools, parts.broker)))
    router = TransferRouter(weights, forward)
    router.update()
    names = [parameter_names(layer) for layer in decoder.layers]
    dispatcher = ReplicaDispatcher(weights, forward, RowSplitCaches(kv), names)
    unsplittable = without_rows(kv, decoder.config)
    in_place = weight_handlers(parts, deferred, copy_rate)
    replicate = ReplicateHandler(
        weights, decoder.layers, dispatcher, allocator, deferred, copy_rate, unsplittable, attend_alike
    )
    stack.callback(replicate.close)
    migrate_kv = stack.enter_context(closing(MigrateKVHandler(kv, copy_rate, weights.require_alone)))
    return {
        **in_place,
        Drop: DropHandler(weights, parts.broker, deferred),
        Fetch: in_place[Restore],
        Migrate: MigrateHandler(weights, router, allocator, deferred, copy_rate),
        MigrateKV: migrate_kv,
        Replicate: replicate,
        Evict: replicate,
    }
