"""From where the bytes of a unit come that goes to another place."""

from __future__ import annotations

from collections.abc import Iterable

from elastic.memory.copy_engine import Pair
from elastic.weights.layer import WeightUnit


def pairs(arriving: WeightUnit, units: Iterable[WeightUnit]) -> list[Pair]:
    """(target, source) for what `arriving` has of these units of its layer: from the pages where it is.

    From the host comes what is in no pages, or is packed otherwise for the device to which it goes.
    """
    form, found = arriving.precision, []
    targets = arriving.blocks[form.key].show(form.layout)
    for unit in units:
        names = [name for name in unit.slots if name in arriving.slots]
        if unit.absent:
            found += [(targets[name], unit.host_copies[name].tensor) for name in names]
            continue
        shown = unit.blocks[unit.precision.key].show(unit.precision.layout) if names else {}
        for name in names:
            if unit.precision.packings.get(name) is form.packings.get(name):
                found += [(targets[lies], shown[lies]) for lies in form.stored_names(name)]
            else:
                there = form.tensors_of(name, targets)
                found += [(there[part], tensor) for part, tensor in form.packings[name].parts.items()]
    return found
