"""The monitor, the policy and the controller of a wrapped model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import mean
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
from elastic.errors import ConfigError, require, require_period
from elastic.kvcache.storage.pool import KVPool
from elastic.planning.measured_cost import Calibration, MeasuredCostModel
from elastic.planning.placement import ResourceDemand
from elastic.runtime.parts import ModelParts
from elastic.runtime.runtime import Runtime
from elastic.types import Action
from elastic.weights.layer import WeightUnit
from elastic.weights.model import ModelWeights

if TYPE_CHECKING:
    from elastic.kvcache.manager import KVMemory
    from elastic.quant.sensitivity.profile_file import Profile
    from elastic.quant.variants.variant import Variant

MakePolicy = Callable[[ModelWeights], ControllerPolicy]
Asked = str | Path | Policy | Scale | ControllerPolicy
Calibrate = Callable[[], Calibration]
EVENTS_SEEN = 16
"""The number of last events that a policy sees."""


def connect_controller(
    runtime: Runtime, parts: ModelParts, make_policy: MakePolicy | None, slo: SLO | None, stack: ExitStack
) -> None:
    """Give a runtime its monitor and, with a policy, its controller, which is not started yet."""
    nvml = NVMLSensor({p.name: p.backend.device.index or 0 for p in parts.pools if p.backend.device.type == "cuda"})
    stack.callback(nvml.close)
    runtime.monitor = Monitor(
        runtime.counters,
        lambda: _instance_readings(runtime, parts),
        lambda: runtime.busy,
        lambda: (nvml.read(), read_host()),
    )
    runtime.slo = slo
    if make_policy:
        policy = make_policy(parts.weights)
        runtime.controller = _make_controller(runtime, policy)
        if isinstance(policy, PeerModel):
            stack.callback(policy.leave)


def _make_controller(runtime: Runtime, policy: ControllerPolicy) -> Controller:
    """Make the controller of a runtime; it does not wait for the actions that it asks for."""

    def sense() -> Snapshot | None:
        return None if runtime.closed else runtime.monitor.read()

    def act(actions: Sequence[Action], why: str) -> Any:
        return None if runtime.closed else runtime.request(actions, why)

    lock = policy.group.lock if isinstance(policy, PeerModel) else None
    return Controller(sense, policy, act, tick_s=getattr(policy, "tick_s", TICK_S), lock=lock)


def choose_policy(
    policy: Asked | Sequence[Asked],
    slo: SLO | None,
    order: str | Path | Profile,
    variants: Sequence[Variant],
    layers: Sequence[nn.Module],
    calibrate: Calibrate,
    fingerprints: Callable[[], Sequence[str]] | None = None,
) -> MakePolicy | None:
    """Check the policy that `wrap` was asked for, before anything is done. None: actions are called by hand.

    `layers` are the plain decoder layers; `calibrate` measures them, if a policy needs that. `fingerprints`: of their
    weights as a profile has them, asked for if there is one; None: theirs. Raises `ConfigError` for what cannot work.
    """
    indices = _parse_order(order, layers, fingerprints)
    asked = tuple(policy) if isinstance(policy, tuple | list) else (policy,)
    parsed = [_parse_policy(each) for each in asked]
    if (len(asked) > 1 and None in parsed) or not asked:
        raise ConfigError(f"policy={policy!r} cannot be; several policies must all be ones that act")
    if parsed == [None]:
        return None
    for settings in parsed:
        if isinstance(settings, Policy):
            _require_variants(policy, settings, [variant.name for variant in variants])
    scales = [settings for settings in parsed if isinstance(settings, Scale)]
    groups = {settings.group for settings in scales if settings.group}
    if len(groups) > 1:
        raise ConfigError(f"one model cannot be in the groups {sorted(groups)}; give its policies the same group")
    measured = calibrate() if len(parsed) > 1 or scales else Calibration({})
    matrices = [p for p in layers[0].parameters() if p.ndim == 2]  # their shortest side is a hidden state, or smaller
    token_bytes = max((min(p.shape) * p.element_size() for p in matrices), default=1)

    def make(weights: ModelWeights) -> ControllerPolicy:
        demands = resource_demands(weights)
        cost = partial(MeasuredCostModel, measured, tokens=1, token_bytes=token_bytes)  # of a step, by its rows
        made: list[ControllerPolicy] = []
        for settings in parsed:
            if isinstance(settings, Policy):
                made.append(_precision(settings, slo, indices, weights))
            elif isinstance(settings, Scale):
                made.append(ScalingPolicy(settings, demands, cost, slo))
            elif settings is not None:
                made.append(settings)
        chosen = made[0] if len(made) == 1 else Arbiter(made, _layer_sizes(weights), demands, cost)
        return PeerModel(PeerGroup.named(min(groups)), chosen, demands, cost) if groups else chosen

    return make


def _require_variants(policy: object, parsed: Policy, variants: Sequence[str]) -> None:
    if not variants:
        raise ConfigError(f"policy={policy!r} swaps layers and needs variants to swap to: wrap(…, variants=('int4',))")
    unknown = [level for level in parsed.levels if level not in variants]
    if unknown:
        raise ConfigError(f"levels={parsed.levels} has {unknown[0]!r}; the model has the variants {tuple(variants)}")


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
        require_period(getattr(policy, "tick_s", TICK_S), "tick_s")
        return policy
    modes = ", ".join(map(repr, ("manual", *MODES, "scale")))
    raise ConfigError(
        f"policy={policy!r} is not known; use one of {modes}, an elastic.Policy or Scale, a *.toml or *.json file of a "
        "Policy, or an object with decide(snapshot, state)"
    )


def _parse_order(
    order: str | Path | Profile, layers: Sequence[nn.Module], fingerprints: Callable[[], Sequence[str]] | None
) -> tuple[int, ...]:
    from elastic.quant.sensitivity import order as orders
    from elastic.quant.sensitivity.profile_file import Profile

    require(isinstance(order, str | Path | Profile), "order", order, "a name, an elastic.Profile, or its file")
    if isinstance(order, str | Path) and Path(order).suffix == ".json":
        order = Profile.load(order)
    if isinstance(order, Profile):
        order.check(layers if fingerprints is None else fingerprints())
    return orders.order(order if isinstance(order, Profile) else str(order), len(layers))


def _precision(settings: Policy, slo: SLO | None, order: Sequence[int], weights: ModelWeights) -> PrecisionPolicy:
    sizes = _layer_sizes(weights)
    swappable = [index for index in order if sizes[index].variants]
    packed: dict[str, list[float]] = {}  # in parts of the full bytes: layers may be of unlike sizes
    for name, part in ((n, b / sizes[i].full_bytes) for i in swappable for n, b in sizes[i].variants.items()):
        packed.setdefault(name, []).append(part)
    levels = settings.levels or tuple(sorted(packed, key=lambda name: -mean(packed[name])))
    _require_falling(settings.levels, [weights.layers[i] for i in swappable])
    return PrecisionPolicy(settings, swappable, levels, sizes, slo)


def _require_falling(levels: Sequence[str], layers: Sequence[WeightUnit]) -> None:
    """Raise `ConfigError` for a level that does not make layers smaller that are packed in it and one before."""
    precisions = {level: [layer.with_variant(level) for layer in layers] for level in levels}
    for before, after in combinations(levels, 2):
        pairs = zip(layers, precisions[before], precisions[after], strict=True)
        both = [(a, b) for layer, a, b in pairs if layer.full not in (a, b)]
        larger, smaller = (sum(p.nbytes for pair in both for p in pair[i].layout.parameters.values()) for i in (0, 1))
        if smaller >= larger > 0:
            raise ConfigError(
                f"levels={levels!r} go from fine to coarse; {after!r} has {smaller:,} bytes, {before!r} before it "
                f"has {larger:,}: put the larger first"
            )


def _layer_sizes(weights: ModelWeights) -> list[LayerSize]:
    sizes = []
    for layer in weights.layers:
        page = layer.pool.page_bytes
        precisions = {name: layer.with_variant(name) for name in layer.variants}
        variants = {name: layer.pages_in(p) * page for name, p in precisions.items() if p is not layer.full}
        sizes.append(LayerSize(layer.dtype, layer.pages * page, variants))
    return sizes


def resource_demands(weights: ModelWeights) -> list[ResourceDemand]:
    """Return the bytes of the layers, in whole pages, and of the modules right inside them, the largest first."""
    demands = []
    for layer in weights.layers:
        modules: Counter[str] = Counter()
        for name, slot in layer.slots.items():
            modules[name.partition(".")[0]] += slot.parameter.nbytes
        parts = {name: ResourceDemand(nbytes) for name, nbytes in modules.most_common() if nbytes * 10 > layer.nbytes}
        demands.append(ResourceDemand(layer.pages * layer.pool.page_bytes, parts=parts))
    return demands


def _instance_readings(runtime: Runtime, parts: ModelParts) -> InstanceReadings:
    """Return what the instance tells a policy; where there is one place only, nothing about places."""
    kv_stats, variants, events = _kv_stats(parts.kv), parts.weights.form(), runtime.events()[-EVENTS_SEEN:]
    if len(parts.pools) < 2:
        return InstanceReadings(kv_stats, variants, events=events)
    layers, by_layer = parts.weights.layers, parts.weights.residencies()
    residencies = tuple(
        (layer.pool.name, *(r.place for r in by_layer[layer.name][1:] if not r.part)) for layer in layers
    )
    apart = tuple(layer.index for layer in layers if any(r.part for r in by_layer[layer.name]))
    caches = {pool.pool.name: pool.status() for pool in parts.kv.pools}
    readings = []
    for pool in parts.pools:
        place, kv = pool.status(), caches[pool.name]
        sizes = (place.budget_bytes, place.free_bytes, kv.used_bytes, kv.capacity_bytes, kv.maximum_bytes)
        limit_bytes = kv.limit_bytes if kv.limit_bytes < kv.maximum_bytes else None
        readings.append(PlaceReading(place.name, *sizes, kv_limit_bytes=limit_bytes))
    return InstanceReadings(kv_stats, variants, residencies, tuple(readings), events, apart)


def _kv_stats(memory: KVMemory) -> MemoryStats:
    """Return the sizes of the whole cache, used as its fullest place is."""
    shares = memory.shares()
    statuses = {pool: pool.status() for pool in shares}

    def least(size: Callable[[KVPool], int]) -> int:
        return min(int(size(pool) / share) for pool, share in shares.items())

    capacity = least(lambda pool: statuses[pool].capacity_bytes)
    maximum = least(lambda pool: statuses[pool].maximum_bytes)
    limit = least(lambda pool: statuses[pool].limit_bytes)
    fullest = max(statuses.values(), key=lambda s: s.used_bytes / max(1, s.capacity_bytes))
    on_cuda = all(pool.pool.backend.device.type == "cuda" for pool in shares)
    return MemoryStats(
        used_bytes=fullest.used_bytes * capacity // fullest.capacity_bytes if capacity else fullest.used_bytes,
        capacity_bytes=capacity,
        maximum_bytes=maximum,
        limit_bytes=limit if limit < maximum else None,
        created_bytes=least(_created_bytes) if on_cuda else None,
    )


def _created_bytes(pool: KVPool) -> int:
    """Return the physical memory that caches have, or could have without any more being created."""
    kv, place = pool.status(), pool.pool.status()
    return kv.used_bytes + kv.idle_bytes + place.idle_bytes + place.parked_bytes
