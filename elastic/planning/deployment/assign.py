"""Layers to devices: adjacent ones side by side, evenly where there is room, else as room is. (iServe, section 6)

The paper counts mem_base / (N_TP * layers) for a layer; here each rank's bytes are asked for, as embedding and head are
whole at every one, layers may be unlike, and keys and values need room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from elastic.planning.deployment.devices import DeviceState, Stage
from elastic.planning.estimate.configuration import Configuration
from elastic.planning.estimate.devices import shown_bytes
from elastic.planning.sharding.share import even_stages


class RankDemand(Protocol):
    """What the ranks of a model need in one configuration."""

    @property
    def configuration(self) -> Configuration:
        """The degrees of parallelism, and the forms of weights, keys and values."""

    @property
    def layers(self) -> int:
        """Decoder layers of the model."""

    def need(self, layers: range, requests: int) -> int:
        """Return the bytes of each rank of a stage with these layers, and room for so many requests.

        More layers, and more requests, never need less.
        """


def assign(demand: RankDemand, states: Sequence[DeviceState], requests: int = 1) -> tuple[Stage, ...] | str:
    """Put all layers onto the first K = TP * PP devices that have room for an even share each; return the stages.

    Where fewer have, the K with the most free memory get as many layers as they have room for. Every device gets one at
    least. The text instead of stages says why that cannot be.
    """
    tp, pp = demand.configuration.tp, demand.configuration.pp
    count = tp * pp
    if len(states) < count:
        return f"{count} devices are needed, of {len(states)}"
    share = max(demand.need(layers, requests) for layers in even_stages(demand.layers, pp))
    roomy = [state for state in states if state.free_bytes >= share][:count]
    freest = sorted(roomy if len(roomy) == count else states, key=lambda state: -state.free_bytes)[:count]
    groups = [freest[first : first + tp] for first in range(0, count, tp)]
    rooms = [min(state.free_bytes for state in group) for group in groups]
    cut = cut_into_stages(demand.layers, rooms, lambda layers: demand.need(layers, requests))
    if cut is None:
        return _shortage(demand, freest, requests)
    return tuple(
        Stage(layers, tuple(state.name for state in group), demand.need(layers, requests))
        for layers, group in zip(cut, groups, strict=True)
    )


def cut_into_stages(layers: int, rooms: Sequence[int], need: Callable[[range], int]) -> tuple[range, ...] | None:
    """Cut layers into one stage for each room, in this order, none empty; None where they do not fit.

    Evenly where that fits; else each stage has what is nearest to an even share of the rest and leaves one that fits
    into the rooms behind it. `need`: the bytes of some layers, never less of more of them.
    """
    if layers < len(rooms):
        return None
    even = even_stages(layers, len(rooms))
    if all(need(stage) <= room for stage, room in zip(even, rooms, strict=True)):
        return even
    ends = _possible_ends(layers, rooms, need)
    stages: list[range] = []
    first = 0
    for number, possible in enumerate(ends):
        if first not in possible:
            return None
        share = (layers - first) / (len(rooms) - number)
        end = min(possible[first], key=lambda each: (abs(each - first - share), each))
        stages.append(range(first, end))
        first = end
    return tuple(stages)


def _possible_ends(layers: int, rooms: Sequence[int], need: Callable[[range], int]) -> list[dict[int, list[int]]]:
    """Return for each room, by the first layer of its stage, where this may end so that the rest fits behind it."""
    by_stage: list[dict[int, list[int]]] = []
    fitting = {layers}  # first layers from which on all fit into the rooms behind
    for room in reversed(rooms):
        possible, end = {}, 0
        for first in range(layers):
            end = max(end, first)
            while end < layers and need(range(first, end + 1)) <= room:
                end += 1
            if ends := [each for each in range(first + 1, end + 1) if each in fitting]:
                possible[first] = ends
        by_stage.append(possible)
        fitting = set(possible)
    return by_stage[::-1]


def _shortage(demand: RankDemand, states: Sequence[DeviceState], requests: int) -> str:
    """Say what would be needed of the devices with the most free memory."""
    shares = even_stages(demand.layers, demand.configuration.pp)
    needed = max(demand.need(layers, requests) for layers in shares)
    running = f"{requests} requests at a time" if requests > 1 else "one request at a time"
    tight = min(states, key=lambda state: state.free_bytes)
    return (
        f"an even share of the layers needs {shown_bytes(needed)} with room for {running}; "
        f"of the {len(states)} devices with the most room {tight.name} has {shown_bytes(tight.free_bytes)}, "
        "and uneven shares do not fit either"
    )
