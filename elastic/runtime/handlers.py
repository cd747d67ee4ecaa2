"""The handlers of a model's actions."""

from __future__ import annotations

from contextlib import ExitStack, closing

from elastic.actions.base import ActionHandler
from elastic.actions.deferred import DeferredActions
from elastic.actions.migrate import MigrateHandler
from elastic.actions.migrate_kv import MigrateKVHandler
from elastic.actions.pages.allocation import WeightPageAllocator
from elastic.actions.pages.broker import PageBroker
from elastic.actions.release import ReleaseHandler
from elastic.actions.replicate import ReplicateHandler
from elastic.actions.resize_kv import ResizeHandler
from elastic.actions.swap import SwapHandler
from elastic.hooks.device_transfer import TransferRouter
from elastic.hooks.forward_state import ForwardState
from elastic.hooks.replicas.dispatcher import ReplicaDispatcher
from elastic.hooks.replicas.split_rows import parameter_names
from elastic.kvcache.attention import attend_alike
from elastic.kvcache.manager import KVMemory
from elastic.kvcache.split_cache import RowSplitCaches, without_rows
from elastic.memory.page_pool import PagePool
from elastic.memory.rate_limit import RateLimiter
from elastic.types import Evict, Migrate, MigrateKV, Release, Replicate, ResizeKV, Restore, Swap
from elastic.weights.decoder import Decoder
from elastic.weights.model import ModelWeights


def make_handlers(
    decoder: Decoder,
    pools: tuple[PagePool, ...],
    weights: ModelWeights,
    kv: KVMemory,
    broker: PageBroker,
    forward: ForwardState,
    copy_rate: RateLimiter,
    stack: ExitStack,
) -> dict[type, ActionHandler]:
    """Make the handler of each type of action; from then on batches are shared out between layers' replicas."""
    deferred = DeferredActions(broker)
    allocator = stack.enter_context(closing(WeightPageAllocator(pools, broker)))
    router = TransferRouter(weights, forward)
    router.update()
    names = [parameter_names(layer) for layer in decoder.layers]
    dispatcher = forward.dispatcher = ReplicaDispatcher(weights, forward, RowSplitCaches(kv), names)
    unsplittable = without_rows(kv, decoder.config)
    replicate = ReplicateHandler(
        weights, decoder.layers, dispatcher, allocator, deferred, copy_rate, unsplittable, attend_alike
    )
    stack.callback(replicate.close)
    migrate_kv = stack.enter_context(closing(MigrateKVHandler(kv, copy_rate, weights.require_alone)))
    swap = SwapHandler(weights, broker, deferred, copy_rate)
    return {
        ResizeKV: ResizeHandler(kv),
        Release: ReleaseHandler(weights, broker, deferred),
        Swap: swap,
        Restore: swap,
        Migrate: MigrateHandler(weights, router, allocator, deferred, copy_rate),
        MigrateKV: migrate_kv,
        Replicate: replicate,
        Evict: replicate,
    }
