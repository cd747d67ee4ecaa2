"""The sources of a unit's bytes on its way to another place."""

from __future__ import annotations

from collections.abc import Iterable

from elastic.memory.copy_engine import Pair
from elastic.weights.layer import WeightUnit


def copy_plan(arriving: WeightUnit, units: Iterable[WeightUnit]) -> list[Pair]:
    """List (target, source) tensors, of equal shape and dtype, for what `arriving` has of these units of its layer.

    The sources are the pages where it is; or the host, for what is in no pages, or is packed otherwise for the device
    to which it goes.
    """
    precision, copies = arriving.precision, []
    targets = arriving.blocks[precision.key].show(precision.layout)
    for unit in units:
        names = [name for name in unit.slots if name in arriving.slots]
        if unit.absent:
            copies += [(targets[name], unit.host_copies[name].tensor) for name in names]
            continue
        sources = unit.blocks[unit.precision.key].show(unit.precision.layout) if names else {}
        for name in names:
            if unit.precision.packings.get(name) is precision.packings.get(name):
                copies += [(targets[stored], sources[stored]) for stored in precision.stored_names(name)]
            else:
                packed = precision.tensors_of(name, targets)
                copies += [(packed[part], tensor) for part, tensor in precision.packings[name].parts.items()]
    return copies
