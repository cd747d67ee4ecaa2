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


@dataclass(frozen=True)
class ExpertShare:
    """The experts of a layer, of which a token meets some."""

    of_weights: float = 0.0
    """The share of the layer's weights that are experts'."""
    chosen: float = 1.0
    """The share of the experts that a token is sent to."""

    def met(self, tokens: int) -> float:
        """Return the share of the layer's weights that so many tokens meet, which choose experts independently."""
        return 1 - self.of_weights * (1 - self.chosen) ** tokens


NO_EXPERTS = ExpertShare()


def assume(
    places: Sequence[Place],
    layer_bytes: int,
    layer_parameters: int,
    experts: ExpertShare = NO_EXPERTS,
    tokens: tuple[int, int] = (1, 1),
) -> Calibration:
    """Make a calibration without measuring: a layer reads the weights that are met, and computes twice a token's.

    With experts it is one for batches of so many tokens, the fewest and the most. Places of one CPU are taken to have a
    core each, those of one GPU to share it.
    """
    speeds = {place.name: ASSUMED[place.device.type] for place in places}
    fewest, most = tokens
    more = (experts.met(most) - experts.met(fewest)) / max(1, most - fewest)
    always, each = layer_bytes * (experts.met(fewest) - more * fewest), layer_bytes * more
    flops = 2 * layer_parameters * experts.met(1)
    layers = {
        name: LinearLatency(always / speed.memory, each / speed.memory + flops / speed.flops)
        for name, speed in speeds.items()
    }
    links = {}
    for a, b in combinations(places, 2):
        slower = min((speeds[a.name], speeds[b.name]), key=lambda speed: speed.link)
        rate = slower.memory if a.device == b.device else slower.link
        links[a.name, b.name] = LinearLatency(slower.handing_s, 1 / rate)
    gpus = {place.name.partition("#")[0]: layers[place.name] for place in places if place.device.type == "cuda"}
    return Calibration(layers, links, {name: [line.times(2.0)] for name, line in gpus.items()})
