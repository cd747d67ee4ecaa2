"""Where the seconds of an estimate are from: data sheets, or fingerprints that were measured on such a device."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from elastic.errors import ConfigError
from elastic.estimation.kv_room import KVShape
from elastic.estimation.model_layout import LayerKind
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


class Costs(Protocol):
    """Seconds of the parts of a model on a kind of device."""

    basis: str
    """Where they are from."""
    link: LinearLatency
    """For so many bytes from one device to another."""
    link_basis: str
    """Where those of links are from: "measured", or "assumed" (their latency, if not their rate, is)."""
    handovers: Handovers
    """What engines take around links."""

    def layer(self, kind: LayerKind, weights: str, kv: KVShape, tp: int) -> BatchCost:
        """Return the cost of a layer in a variant at one of `tp` ranks. Raises `ConfigError` where it is not known."""

    def rest(self, weights: str, kv: KVShape) -> BatchCost:
        """Return the cost of what is around the layers."""

    def beside(self, cost: BatchCost, others: int) -> BatchCost:
        """Return a cost while so many other devices compute."""


class SheetCosts:
    """Seconds at the rates of a data sheet: no less than these."""

    link_basis = "assumed"
    handovers = NO_HANDOVERS

    def __init__(self, pages: WeightPages, device: DeviceKind) -> None:
        self.pages = pages
        self.device = device
        self.link = _link(device)
        self.basis = "assumed" if device.source.startswith("assumed") else "data sheet"
        self._layers: dict[tuple[str, str, KVShape, int], Roofline] = {}

    def layer(self, kind: LayerKind, weights: str, kv: KVShape, tp: int) -> BatchCost:
        """Return the cost of one layer in a variant at one of `tp` ranks."""
        key = kind.name, weights, kv, tp
        if key not in self._layers:
            work = layer_work(self.pages, kind, weights, kv, tp)
            self._layers[key] = Roofline(work, self.device.flops_s, self.device.bytes_s)
        return self._layers[key]

    def rest(self, weights: str, kv: KVShape) -> BatchCost:
        """Return the cost of the head; weights are full there."""
        return Roofline((rest_work(self.pages.layout),), self.device.flops_s, self.device.bytes_s)

    def beside(self, cost: BatchCost, others: int) -> BatchCost:
        """Return it as it is: each device has memory of its own."""
        return cost


class MeasuredCosts:
    """Seconds that were fitted to measurements of fingerprints; those of links are `device`'s where they were not."""

    basis = "measured"

    def __init__(self, pages: WeightPages, device: DeviceKind, profile: CostProfile) -> None:
        self.pages = pages
        self.profile = profile
        self.link = _link(device) if profile.link is None else profile.link
        self.link_basis = "assumed" if profile.link is None else "measured"
        self.handovers = profile.handovers

    def layer(self, kind: LayerKind, weights: str, kv: KVShape, tp: int) -> BatchCost:
        """Return the cost of a layer in a variant at one of `tp` ranks, which share it by their part of its weights."""
        form = form_of(weights, kv.form)
        cost = self.profile.layers.get((kind.name, form))
        if cost is None:
            raise ConfigError(f"{kind.name} in {form} was not measured; profile it too")
        share, parts = self.pages.cut_share(kind, tp), kv_shards(tp, kv.heads)
        return cost.shared(share, tp, parts) if isinstance(cost, LayerCost) else sharded_cost(cost, share, tp)

    def rest(self, weights: str, kv: KVShape) -> BatchCost:
        """Return the cost of what is around the layers."""
        return self.profile.around[form_of(weights, kv.form)]

    def beside(self, cost: BatchCost, others: int) -> BatchCost:
        """Return a cost while so many others read the same memory."""
        return cost.beside(self.profile.contention * others) if isinstance(cost, LayerCost) else cost


def without_replays(cost: BatchCost) -> BatchCost:
    """Return the cost at one of several ranks, which replay no decode steps."""
    return replace(cost, replay_saving=0.0) if isinstance(cost, LayerCost) else cost


def _link(device: DeviceKind) -> LinearLatency:
    return LinearLatency(LINK_LATENCY_S, 1 / device.link_bytes_s)
