"""In which order devices are tried for a model. (iServe, section 6 and figure 10)"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from elastic.errors import ConfigError, is_number
from elastic.planning.deployment.devices import DeviceState

PolicyName = Literal["hybrid", "packing", "least-loaded"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
THETA = 0.15
"""The load from which on the hybrid policy packs nothing more onto a device.

At 0.15 it was at most 1.25 times as slow in the median as spreading, on 4 or 5 of 8 devices, in simulations at a mean
load of a tenth (benchmarks/placement.py); the busier devices are, the less it gains."""


def preferred(
    states: Sequence[DeviceState], policy: PolicyName = "hybrid", theta: float = THETA
) -> list[list[DeviceState]]:
    """Return lists of devices: a model goes to the first ones of the first list that has room for it.

    `least-loaded` spreads models, `packing` puts them onto the busiest devices. `hybrid` packs onto devices of a load
    below `theta`; where these have no room, it takes the least loaded ones of the others; at last some of both. Of
    equal load, packing prefers what has less free memory, and spreading what has more. Raises `ConfigError` for an
    unknown policy, and for a theta that is no load.
    """
    if policy not in POLICIES:
        raise ConfigError(f"policy={policy!r} is not known; use one of {', '.join(POLICIES)}")
    if not (is_number(theta) and theta >= 0):
        raise ConfigError(f"theta={theta!r} is no load; give 0 or more, such as {THETA}")
    busiest = sorted(states, key=lambda state: (-state.load, state.free_bytes))
    idlest = sorted(states, key=lambda state: (state.load, -state.free_bytes))
    if policy != "hybrid":
        return [busiest if policy == "packing" else idlest]
    packable = [state for state in busiest if state.load < theta]
    others = [state for state in idlest if state.load >= theta]
    return [each for each in (packable, others) if each] + ([[*packable, *others]] if packable and others else [])
