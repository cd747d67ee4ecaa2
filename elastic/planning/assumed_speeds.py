"""A calibration without measuring, from what is assumed of kinds of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from elastic.config import Place
from elastic.planning.measured_cost import Calibration, LinearLatency


@dataclass(frozen=True)
class Speed:
    """The assumed speed of a kind of device."""

    flops: float
    """Operations a second."""
    memory: float
    """Bytes a second from its memory."""
    link: float
    """Bytes a second to another device."""
    handing_s: float
    """Seconds to have another place begin."""


ASSUMED = {"cpu": Speed(5e10, 1e10, 5e9, 5e-5), "cuda": Speed(2e14, 2e12, 2e10, 2e-5)}
"""By type of device: one core, and a large GPU; within a few times of most."""


def assume(places: Sequence[Place], layer_bytes: int, layer_parameters: int) -> Calibration:
    """Make a calibration without measuring: a layer reads its weights once, and computes twice their number a token.

    Places of one CPU are taken to have a core each, those of one GPU to share it.
    """
    speeds = {place.name: ASSUMED[place.device.type] for place in places}
    layers = {name: LinearLatency(layer_bytes / s.memory, 2 * layer_parameters / s.flops) for name, s in speeds.items()}
    links = {}
    for a, b in combinations(places, 2):
        slower = min((speeds[a.name], speeds[b.name]), key=lambda speed: speed.link)
        rate = slower.memory if a.device == b.device else slower.link
        links[a.name, b.name] = LinearLatency(slower.handing_s, 1 / rate)
    gpus = {place.name.partition("#")[0]: layers[place.name] for place in places if place.device.type == "cuda"}
    return Calibration(layers, links, {name: [line.times(2.0)] for name, line in gpus.items()})
