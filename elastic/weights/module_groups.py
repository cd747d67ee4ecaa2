"""Splitting and merging the units of one decoder layer, as modules of it move between places."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from elastic.memory.pages.page_pool import PagePool
from elastic.memory.weight_layout import LayerLayout
from elastic.weights.layer import WeightUnit


def merge_units(units: Sequence[WeightUnit], names: Collection[str], pool: PagePool, part: str = "") -> WeightUnit:
    """Make a unit, for a place, of some of the parameters that units of one layer have, in their present precisions.

    With a `part`, of modules whose layer computes where the first unit is; else the layer computes there. Nothing is
    there yet: its block is to be filled and shown.
    """
    owners = {name: unit for unit in units for name in unit.slots if name in names}
    first, device = units[0], pool.backend.device
    if first.layer.cut is not None:  # in the order of a layer that was never apart
        owners = {name: owners[name] for name in sorted(owners, key=first.layer.cut.parted.__contains__)}
    merged = WeightUnit(
        first.layer,
        pool,
        {name: unit.slots[name] for name, unit in owners.items()},
        LayerLayout.pack({name: unit.layout.parameters[name] for name, unit in owners.items()}),
        part=part,
        compute_device=first.compute_device if part else device,
        transfers=next((unit.transfers for unit in units if unit.pool.backend.device == device), None),
        variants=first.variants,
    )
    merged.host_copies = {n: unit.host_copies[n] for n, unit in owners.items() if n in unit.host_copies}
    merged.was_written = any(unit.written for unit in units)
    chosen = {name: unit.precision.variants[name] for name, unit in owners.items() if name in unit.precision.variants}
    merged.precision = merged.precisions.having(chosen)
    return merged


def remainder(unit: WeightUnit, names: Collection[str]) -> WeightUnit:
    """Make the unit that is left when some parameters go elsewhere: in the same block, where they lie now."""
    left = unit.precision.without(names)
    rest = WeightUnit(
        unit.layer,
        unit.pool,
        {name: slot for name, slot in unit.slots.items() if name not in names},
        unit.layout.without(names) if left.variants else left.layout,
        part=unit.part,
        compute_device=unit.compute_device,
        transfers=unit.transfers,
        variants=unit.variants,
    )
    rest.writes = unit.writes
    rest.was_written = unit.written
    rest.host_copies = {name: kept for name, kept in unit.host_copies.items() if name not in names}
    rest.precision = left if left.variants else rest.precisions.full
    rest.precisions.made[rest.precision.key] = rest.precision
    rest.blocks = {rest.precision.key: unit.blocks[unit.precision.key]}
    return rest
