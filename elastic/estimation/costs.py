"""Where the seconds of an estimate are from: data sheets, or fingerprints that were measured on such a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

from elastic.errors import ConfigError
from elastic.estimation.kv_room import KVShape
from elastic.estimation.profile import CostProfile
from elastic.estimation.weight_pages import WeightPages
from elastic.estimation.work import layer_work, rest_work
from elastic.planning.estimate.configuration import form_of
from elastic.planning.estimate.devices import LINK_LATENCY_S, DeviceKind
from elastic.planning.estimate.layer_cost import LayerCost
from elastic.planning.estimate.performance import NO_HANDOVERS, Handovers
from elastic.planning.estimate.roofline import BatchCost, Roofline, sharded_cost
from elastic.planning.measured_cost import LinearLatency
from elastic.planning.sharding.heads import kv_shards

Parts = tuple[dict[str, BatchCost], BatchCost]
"""The cost of one layer of each kind, by its name, and of what is around the layers."""


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a model on a kind of device."""

    basis: str
    """Where they are from."""
    parts: Callable[[str, KVShape, int], Parts]
    """Gives them by the variant, keys and values, and how many ranks share a layer. Raises `ConfigError` for what was
    not measured."""
    link: LinearLatency
    """For so many bytes from one device to another."""
    link_basis: str
    """Where those of links are from: "measured", or "assumed" (their latency, if not their rate, is)."""
    handovers: Handovers = NO_HANDOVERS
    """What engines take around links."""
    contention: float = 0.0
    """By how much more slowly a rank reads for each other one that reads meanwhile."""


def costs_of(pages: WeightPages, device: DeviceKind, profile: CostProfile | None) -> Costs:
    """Return costs as a profile has them; without one those of the data sheet, no less than which it takes.

    Those of links are the data sheet's where they were not measured. Raises `ConfigError` for another device's profile.
    """
    link = LinearLatency(LINK_LATENCY_S, 1 / device.link_bytes_s)
    if profile is None:
        basis = "assumed" if device.source.startswith("assumed") else "data sheet"
        return Costs(basis, cache(partial(_by_sheet, pages, device)), link, "assumed")
    if profile.device != device.type:
        raise ConfigError(
            f"profile: it was measured on {profile.device}, the devices are {device.name}; measure it there"
        )
    link, link_basis = (link, "assumed") if profile.link is None else (profile.link, "measured")
    as_measured = partial(_as_measured, pages, profile)
    return Costs("measured", as_measured, link, link_basis, profile.handovers, profile.contention)


def among_ranks(cost: BatchCost, ranks: int, contention: float = 0.0) -> BatchCost:
    """Return a cost at one of so many ranks, of which others read: of several none replays decode steps."""
    if not isinstance(cost, LayerCost):
        return cost
    beside = cost.beside(contention)
    return replace(beside, replay_saving=0.0) if ranks > 1 else beside


def _by_sheet(pages: WeightPages, device: DeviceKind, weights: str, kv: KVShape, tp: int) -> Parts:
    """Return rooflines; what is around the layers is the head, whose weights are full, at every rank."""
    roofline = partial(Roofline, flops_s=device.flops_s, bytes_s=device.bytes_s)
    layers = {kind.name: roofline(layer_work(pages, kind, weights, kv, tp)) for kind in pages.layout.kinds}
    return {**layers}, roofline((rest_work(pages.layout),))


def _as_measured(pages: WeightPages, profile: CostProfile, weights: str, kv: KVShape, tp: int) -> Parts:
    """Return what was measured; ranks share it by their part of a layer's weights."""
    form, kv_parts = form_of(weights, kv.form), kv_shards(tp, kv.heads)
    layers: dict[str, BatchCost] = {}
    for kind in pages.layout.kinds:
        cost = profile.layers.get((kind.name, form))
        if cost is None:
            raise ConfigError(f"{kind.name} in {form} was not measured; profile it too")
        share = pages.cut_share(kind, tp)
        shared = cost.shared(share, tp, kv_parts) if isinstance(cost, LayerCost) else sharded_cost(cost, share, tp)
        layers[kind.name] = shared
    return layers, profile.around[form]
