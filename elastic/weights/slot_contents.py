"""The contents of a unit's slots: made beside forward passes, so that a switch at the safe point is short."""

from __future__ import annotations

import torch

from elastic.weights.layer import Absence, WeightUnit
from elastic.weights.parameter_slot import Content
from elastic.weights.precision import LayerPrecision
from elastic.weights.prepacked.source import ResidentSource, join_products
from elastic.weights.proxy.dropped_source import DroppedSource
from elastic.weights.proxy.remote_source import RemoteSource
from elastic.weights.proxy.tensor import WeightProxy


def resident_contents(unit: WeightUnit, precision: LayerPrecision) -> dict[str, Content]:
    """Make the contents of a unit whose block for this precision is filled, by parameter."""
    tensors = unit.blocks[precision.key].show(precision.layout)
    contents: dict[str, Content] = {}
    for name, slot in unit.slots.items():
        if name in precision.packings:
            full = slot.in_host_memory(unit, name, precision.variants[name])
            contents[name] = precision.packings[name].content(slot.parameter, precision.tensors_of(name, tensors), full)
        else:
            contents[name] = slot.resident(unit, name, tensors[name])
    sources = {name: content.source for name, content in contents.items() if isinstance(content, WeightProxy)}
    if prepacked := {name: each for name, each in sources.items() if isinstance(each, ResidentSource)}:
        join_products(prepacked)
    if unit.compute_device == unit.pool.backend.device:
        return contents
    return {n: WeightProxy(slot.parameter, RemoteSource(unit, contents[n])) for n, slot in unit.slots.items()}


def absent_contents(
    unit: WeightUnit, absence: Absence = Absence.HOST, shards: frozenset[int] = frozenset()
) -> dict[str, Content]:
    """Make the contents of an absent unit, by parameter: proxies of what the host store has, or of nothing.

    Of a dropped one that still has some parts, what these have in common stays as it is.
    """
    if absence is Absence.HOST:
        return {name: WeightProxy(slot.parameter, slot.in_host_memory(unit, name)) for name, slot in unit.slots.items()}
    nothing = DroppedSource(unit.name, unit.index, sorted(unit.every - shards), len(unit.every))
    kept: dict[str, torch.Tensor] = {}
    if shards and unit.cut is not None:
        kept = unit.blocks[unit.full.key].show(unit.cut.common(unit.layout))
    return {
        name: slot.plain(kept[name]) if name in kept else WeightProxy(slot.parameter, nothing)
        for name, slot in unit.slots.items()
    }


def reinstate(unit: WeightUnit, precision: LayerPrecision, absent: Absence | None, shards: frozenset[int]) -> None:
    """Have a unit's slots as they were before a switch, when it had these parts; the bytes are still there."""
    if absent:
        unit.hide(absent_contents(unit, absent, shards), absent, shards)
    else:
        unit.show(resident_contents(unit, precision), precision)
