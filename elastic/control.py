"""How a wrapped model is watched and controlled: its monitor, its policy, its controller."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from elastic.config import MODES, SLO, Policy
from elastic.controller.host import read_host
from elastic.controller.monitor import Monitor
from elastic.controller.nvml import Nvml
from elastic.controller.plan import Decides
from elastic.controller.policy import SwapPolicy
from elastic.controller.snapshot import Memory, Snapshot
from elastic.controller.steps import LayerSize
from elastic.controller.thread import TICK_S, Controller
from elastic.errors import ConfigError
from elastic.hooks.weights import ModelWeights
from elastic.memory.pool import PagePool
from elastic.types import Action

if TYPE_CHECKING:
    from elastic.kvcache.memory import KVMemory
    from elastic.kvcache.pool import KVPool
    from elastic.quant.profile_file import Profile
    from elastic.runtime import Runtime

MakePolicy = Callable[[ModelWeights], Decides]


def make_monitor(
    run: Runtime, memory: KVMemory, weights: ModelWeights, pools: Sequence[PagePool]
) -> tuple[Monitor, Nvml]:
    """The monitor of an instance; it does not keep its runtime alive. NVML is asked about places on CUDA only."""
    known = weakref.ref(run)

    def busy() -> bool:
        here = known()
        return here is not None and here.busy

    nvml = Nvml({p.name: p.backend.device.index or 0 for p in pools if p.backend.device.type == "cuda"})
    monitor = Monitor(run.counters, lambda: _kv(memory), weights.form, busy, nvml.read, read_host)
    return monitor, nvml


def choose_policy(
    policy: str | Path | Policy | Decides,
    slo: SLO | None,
    order: str | Path | Profile,
    variants: Sequence[str],
    layers: Sequence[nn.Module],
) -> MakePolicy | None:
    """Check what `wrap` was asked for, before anything is done. None: actions are called by hand.

    `layers` are the plain decoder layers. Raises `ConfigError` for what cannot work.
    """
    indices = _parse_order(order, layers)
    parsed = _parse_policy(policy)
    if not isinstance(parsed, Policy):
        return None if parsed is None else lambda weights: parsed
    if not variants:
        raise ConfigError(f"policy={policy!r} swaps layers and needs variants to swap to: wrap(…, variants=('int4',))")
    unknown = [level for level in parsed.levels if level not in variants]
    if unknown:
        raise ConfigError(f"levels={parsed.levels} has {unknown[0]!r}; the model has the variants {tuple(variants)}")
    return lambda weights: _swap_policy(parsed, slo, indices, weights)


def set_up_control(
    run: Runtime,
    memory: KVMemory,
    weights: ModelWeights,
    pools: Sequence[PagePool],
    policy: MakePolicy | None,
    slo: SLO | None,
    stack: ExitStack,
) -> None:
    """Give a runtime its monitor and, with a policy, its controller, which is not started yet."""
    run.monitor, nvml = make_monitor(run, memory, weights, pools)
    stack.callback(nvml.close)
    run.slo = slo
    run.controller = make_controller(run, policy(weights)) if policy else None


def make_controller(run: Runtime, policy: Decides) -> Controller:
    """Ticks for a runtime that it does not keep alive; its actions are never waited for."""
    known = weakref.ref(run)

    def sense() -> Snapshot | None:
        here = known()
        return None if here is None or here.closed else here.monitor.read()

    def act(actions: Sequence[Action], why: str) -> Any:
        here = known()
        return None if here is None or here.closed else here.apply(actions, why=why, wait=False)

    return Controller(sense, policy, act, tick_s=getattr(policy, "tick_s", TICK_S))


def _parse_policy(policy: str | Path | Policy | Decides) -> Policy | Decides | None:
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str | Path):
        name = str(policy)
        if name == "manual":
            return None
        if name in MODES:
            return Policy.named(name)
        if Path(name).suffix in (".toml", ".json"):
            return Policy.from_file(name)
    elif callable(getattr(policy, "decide", None)):
        return policy
    modes = ", ".join(map(repr, ("manual", *MODES)))
    raise ConfigError(
        f"policy={policy!r} is not known; use one of {modes}, an elastic.Policy, a *.toml or *.json file of one, or an "
        "object with decide(snapshot, state)"
    )


def _parse_order(order: str | Path | Profile, layers: Sequence[nn.Module]) -> tuple[int, ...]:
    from elastic.quant import orders
    from elastic.quant.profile_file import Profile

    if isinstance(order, str | Path) and Path(order).suffix == ".json":
        order = Profile.load(order)
    if isinstance(order, Profile):
        order.check(layers)
    return orders.order(order if isinstance(order, Profile) else str(order), len(layers))


def _swap_policy(settings: Policy, slo: SLO | None, order: Sequence[int], weights: ModelWeights) -> SwapPolicy:
    sizes = []
    for layer in weights.layers:
        page = layer.pool.page_bytes
        variants = {name: layer.pages_in(layer.form_with(name)) * page for name in layer.variants}
        sizes.append(LayerSize(layer.dtype, layer.pages * page, variants))
    swappable = [index for index in order if sizes[index].variants]
    total = {name: sum(sizes[i].variants[name] for i in swappable) for i in swappable[:1] for name in sizes[i].variants}
    levels = settings.levels or tuple(sorted(total, key=lambda name: -total[name]))
    return SwapPolicy(settings, swappable, levels, sizes, slo)


def _kv(memory: KVMemory) -> Memory:
    """All of the cache, used as its fullest place is."""
    shares = memory.shares()
    statuses = {pool: pool.status() for pool in shares}

    def least(size: Callable[[KVPool], int]) -> int:
        return min(int(size(pool) / share) for pool, share in shares.items())

    capacity = least(lambda pool: statuses[pool].capacity_bytes)
    maximum = least(lambda pool: statuses[pool].maximum_bytes)
    limit = least(lambda pool: statuses[pool].limit_bytes)
    fullest = max(statuses.values(), key=lambda s: s.used_bytes / max(1, s.capacity_bytes))
    return Memory(
        used_bytes=fullest.used_bytes * capacity // fullest.capacity_bytes if capacity else fullest.used_bytes,
        capacity_bytes=capacity,
        maximum_bytes=maximum,
        limit_bytes=limit if limit < maximum else None,
        created_bytes=least(_created_bytes) if all(map(_is_on_cuda, shares)) else None,
    )


def _is_on_cuda(pool: KVPool) -> bool:
    return pool.pool.backend.device.type == "cuda"


def _created_bytes(pool: KVPool) -> int:
    """Physical memory that caches have, or could have without any more being created."""
    kv, place = pool.status(), pool.pool.status()
    return kv.used_bytes + kv.idle_bytes + place.idle_bytes + place.parked_bytes
