"""How a wrapped model is watched and controlled: its monitor, its policy, its controller."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from elastic.config import MODES, SLO, Policy, Scale
from elastic.controller.decision import ControllerPolicy
from elastic.controller.loop import TICK_S, Controller
from elastic.controller.policies.arbiter import Arbiter
from elastic.controller.policies.peer_group import PeerGroup, PeerModel
from elastic.controller.policies.precision import PrecisionPolicy
from elastic.controller.policies.precision_steps import LayerSize
from elastic.controller.policies.scaling import ScalingPolicy
from elastic.controller.sensors.host_memory import read_host
from elastic.controller.sensors.monitor import InstanceReadings, Monitor
from elastic.controller.sensors.nvml import NVMLSensor
from elastic.controller.snapshot import MemoryStats, PlaceReading, Snapshot
from elastic.errors import ConfigError
from elastic.memory.page_pool import PagePool
from elastic.planning.cost_model import CostModel
from elastic.planning.measured_cost import Calibration, MeasuredCostModel
from elastic.planning.placement import ResourceDemand
from elastic.types import Action, KVStatus, PlaceStatus
from elastic.weights.model import ModelWeights

if TYPE_CHECKING:
    from elastic.kvcache.manager import KVMemory
    from elastic.kvcache.storage.pool import KVPool
    from elastic.quant.sensitivity.profile_file import Profile
    from elastic.quant.variants.variant import Variant
    from elastic.runtime.runtime import Runtime

MakePolicy = Callable[[ModelWeights], ControllerPolicy]
Asked = str | Path | Policy | Scale | ControllerPolicy
Calibrate = Callable[[], Calibration]
EVENTS_SEEN = 16
"""Of the last ones, those that a policy sees."""


def make_monitor(
    run: Runtime, memory: KVMemory, weights: ModelWeights, pools: Sequence[PagePool]
) -> tuple[Monitor, NVMLSensor]:
    """The monitor of an instance; it does not keep its runtime alive. NVML is asked about places on CUDA only."""
    known = weakref.ref(run)

    def busy() -> bool:
        here = known()
        return here is not None and here.busy

    nvml = NVMLSensor({p.name: p.backend.device.index or 0 for p in pools if p.backend.device.type == "cuda"})

    def instance() -> InstanceReadings:
        readings, runtime = InstanceReadings(_kv(memory), weights.form()), known()
        return readings if runtime is None else _with_places(readings, runtime, memory, weights, pools)

    return Monitor(run.counters, instance, busy, lambda: (nvml.read(), read_host())), nvml


def choose_policy(
    policy: Asked | Sequence[Asked],
    slo: SLO | None,
    order: str | Path | Profile,
    variants: Sequence[Variant],
    layers: Sequence[nn.Module],
    calibrate: Calibrate,
) -> MakePolicy | None:
    """Check what `wrap` was asked for, before anything is done. None: actions are called by hand.

    `layers` are the plain decoder layers; `calibrate` measures them, if a policy needs that. Raises `ConfigError` for
    what cannot work.
    """
    indices = _parse_order(order, layers)
    asked = tuple(policy) if isinstance(policy, tuple | list) else (policy,)
    parsed = [_parse_policy(one) for one in asked]
    if (len(asked) > 1 and None in parsed) or not asked:
        raise ConfigError(f"policy={policy!r} cannot be; several policies must all be ones that act")
    if parsed == [None]:
        return None
    for one in parsed:
        if isinstance(one, Policy):
            _require_variants(policy, one, [variant.name for variant in variants])
    measured = calibrate() if len(parsed) > 1 or any(isinstance(one, Scale) for one in parsed) else None
    width, group = _width(layers), _group(parsed)

    def make(weights: ModelWeights) -> ControllerPolicy:
        model = partial(_cost_model, measured, width) if measured else None
        made = [_make(one, slo, indices, weights, model) for one in parsed if one is not None]
        if model is None:
            return made[0]
        chosen = made[0] if len(made) == 1 else Arbiter(made, _sizes(weights), needs(weights), model)
        return PeerModel(PeerGroup.named(group), chosen, needs(weights), model) if group else chosen

    return make


def _group(parsed: Sequence[Policy | Scale | ControllerPolicy | None]) -> str:
    """That of the policies `scale`."""
    names = {one.group for one in parsed if isinstance(one, Scale) and one.group}
    if len(names) > 1:
        raise ConfigError(f"one model cannot be in the groups {sorted(names)}; give its policies the same group")
    return min(names, default="")


def _make(
    parsed: Policy | Scale | ControllerPolicy,
    slo: SLO | None,
    order: Sequence[int],
    weights: ModelWeights,
    model: Callable[[int], CostModel] | None,
) -> ControllerPolicy:
    if isinstance(parsed, Policy):
        return _swap_policy(parsed, slo, order, weights)
    if isinstance(parsed, Scale):
        assert model is not None
        return ScalingPolicy(parsed, needs(weights), model, slo)
    return parsed


def _require_variants(policy: object, parsed: Policy, variants: Sequence[str]) -> None:
    if not variants:
        raise ConfigError(f"policy={policy!r} swaps layers and needs variants to swap to: wrap(…, variants=('int4',))")
    unknown = [level for level in parsed.levels if level not in variants]
    if unknown:
        raise ConfigError(f"levels={parsed.levels} has {unknown[0]!r}; the model has the variants {tuple(variants)}")


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
    if policy:
        chosen = policy(weights)
        run.controller = make_controller(run, chosen)
        if isinstance(chosen, PeerModel):
            stack.callback(chosen.leave)


def make_controller(run: Runtime, policy: ControllerPolicy) -> Controller:
    """Ticks for a runtime that it does not keep alive; its actions are never waited for."""
    known = weakref.ref(run)

    def sense() -> Snapshot | None:
        here = known()
        return None if here is None or here.closed else here.monitor.read()

    def act(actions: Sequence[Action], why: str) -> Any:
        here = known()
        return None if here is None or here.closed else here.apply(actions, why=why, wait=False)

    lock = policy.group.lock if isinstance(policy, PeerModel) else None
    return Controller(sense, policy, act, tick_s=getattr(policy, "tick_s", TICK_S), lock=lock)


def _parse_policy(policy: Asked) -> Policy | Scale | ControllerPolicy | None:
    if isinstance(policy, Policy | Scale):
        return policy
    if isinstance(policy, str | Path):
        name = str(policy)
        if name == "manual":
            return None
        if name == "scale":
            return Scale()
        if name in MODES:
            return Policy.named(name)
        if Path(name).suffix in (".toml", ".json"):
            return Policy.from_file(name)
    elif callable(getattr(policy, "decide", None)):
        return policy
    modes = ", ".join(map(repr, ("manual", *MODES, "scale")))
    raise ConfigError(
        f"policy={policy!r} is not known; use one of {modes}, an elastic.Policy or Scale, a *.toml or *.json file of a "
        "Policy, or an object with decide(snapshot, state)"
    )


def _parse_order(order: str | Path | Profile, layers: Sequence[nn.Module]) -> tuple[int, ...]:
    from elastic.quant.sensitivity import order as orders
    from elastic.quant.sensitivity.profile_file import Profile

    if isinstance(order, str | Path) and Path(order).suffix == ".json":
        order = Profile.load(order)
    if isinstance(order, Profile):
        order.check(layers)
    return orders.order(order if isinstance(order, Profile) else str(order), len(layers))


def _swap_policy(settings: Policy, slo: SLO | None, order: Sequence[int], weights: ModelWeights) -> PrecisionPolicy:
    sizes = _sizes(weights)
    swappable = [index for index in order if sizes[index].variants]
    total = {name: sum(sizes[i].variants[name] for i in swappable) for i in swappable[:1] for name in sizes[i].variants}
    levels = settings.levels or tuple(sorted(total, key=lambda name: -total[name]))
    return PrecisionPolicy(settings, swappable, levels, sizes, slo)


def _sizes(weights: ModelWeights) -> list[LayerSize]:
    sizes = []
    for layer in weights.layers:
        page = layer.pool.page_bytes
        variants = {name: layer.pages_in(layer.with_variant(name)) * page for name in layer.variants}
        sizes.append(LayerSize(layer.dtype, layer.pages * page, variants))
    return sizes


def needs(weights: ModelWeights) -> list[ResourceDemand]:
    """Bytes of the layers, in whole pages, and of the modules right inside them, the largest first."""
    found = []
    for layer in weights.layers:
        modules: Counter[str] = Counter()
        for name, slot in layer.slots.items():
            modules[name.partition(".")[0]] += slot.parameter.nbytes
        parts = {name: ResourceDemand(nbytes) for name, nbytes in modules.most_common() if nbytes * 10 > layer.nbytes}
        found.append(ResourceDemand(layer.pages * layer.pool.page_bytes, parts=parts))
    return found


def _width(layers: Sequence[nn.Module]) -> int:
    """Bytes of one token's hidden state: the shortest side of a layer's matrices is d, or smaller."""
    matrices = [p for p in layers[0].parameters() if p.ndim == 2]
    return max((min(p.shape) * p.element_size() for p in matrices), default=1)


def _cost_model(calibration: Calibration, token_bytes: int, rows: int) -> CostModel:
    """Of a step: one new token for each row."""
    return MeasuredCostModel(calibration, rows, 1, token_bytes)


def _with_places(
    instance: InstanceReadings, run: Runtime, memory: KVMemory, weights: ModelWeights, pools: Sequence[PagePool]
) -> InstanceReadings:
    """Add the events, and for several places where the layers are and what the places have left."""
    events = run.events()[-EVENTS_SEEN:]
    if len(pools) < 2:
        return replace(instance, events=events)
    known = weights.residencies()
    residencies = tuple((w.pool.name, *(r.place for r in known[w.name][1:] if not r.part)) for w in weights.layers)
    caches = {pool.pool.name: pool.status() for pool in memory.pools}
    readings = tuple(_reading(pool.status(), caches[pool.name]) for pool in pools)
    apart = tuple(w.index for w in weights.layers if any(r.part for r in known[w.name]))
    return replace(instance, residencies=residencies, places=readings, events=events, apart=apart)


def _reading(place: PlaceStatus, kv: KVStatus) -> PlaceReading:
    return PlaceReading(
        place.name, place.budget_bytes, place.free_bytes, kv.used_bytes, kv.capacity_bytes, kv.maximum_bytes
    )


def _kv(memory: KVMemory) -> MemoryStats:
    """All of the cache, used as its fullest place is."""
    shares = memory.shares()
    statuses = {pool: pool.status() for pool in shares}

    def least(size: Callable[[KVPool], int]) -> int:
        return min(int(size(pool) / share) for pool, share in shares.items())

    capacity = least(lambda pool: statuses[pool].capacity_bytes)
    maximum = least(lambda pool: statuses[pool].maximum_bytes)
    limit = least(lambda pool: statuses[pool].limit_bytes)
    fullest = max(statuses.values(), key=lambda s: s.used_bytes / max(1, s.capacity_bytes))
    return MemoryStats(
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
