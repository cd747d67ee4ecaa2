"""The first configuration of a ranking that devices have room for, and where it goes. (iServe, section 6)"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from typing import Protocol

from elastic.planning.deployment.assign import RankDemand, assign
from elastic.planning.deployment.devices import DeviceState, Stage, overloaded
from elastic.planning.deployment.policies import THETA, PolicyName, preferred
from elastic.planning.estimate.configuration import Configuration
from elastic.planning.estimate.ranking import Estimate

MOST_REQUESTS = 256
"""That an instance runs at a time, at the most."""


class Option(RankDemand, Protocol):
    """One configuration of a model, with what is expected of it."""

    @property
    def estimate(self) -> Estimate:
        """With even stages on devices that have nothing else; it says why the configuration cannot be used at all."""

    def judge(self, stages: Sequence[Stage], requests: int) -> Estimate:
        """Return what is expected of stages with room for so many requests."""

    def busy(self, stages: Sequence[Stage], requests: int) -> tuple[float, ...]:
        """Return for each stage the share of time that it would compute."""


@dataclass(frozen=True)
class Deployment:
    """A model on devices: an instance of a configuration, or several alike, which share its requests."""

    configuration: Configuration
    """Of each instance."""
    stages: tuple[Stage, ...]
    """Of one instance after another."""
    requests: int
    """That each instance has room for at a time."""
    estimate: Estimate
    """Of the slowest instance, with its share of the requests. Seconds are those of the model alone: what shares its
    devices comes on top."""
    busy: tuple[float, ...]
    """For each stage, the share of time that its devices compute for this model at the expected rate."""
    passed_over: tuple[tuple[Configuration, str], ...] = ()
    """What the intent prefers, and why it could not be."""
    instances: tuple[tuple[Stage, ...], ...] = field(init=False, repr=False, compare=False)
    """The stages of each instance: one begins with the first layer."""
    devices: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """All devices that it is on."""
    nbytes: int = field(init=False, repr=False, compare=False)
    """Bytes that it takes of all devices together."""

    def __post_init__(self) -> None:
        starts = [number for number, stage in enumerate(self.stages) if not stage.layers.start]
        bounds = pairwise([*starts, len(self.stages)])
        object.__setattr__(self, "instances", tuple(self.stages[a:b] for a, b in bounds))
        object.__setattr__(self, "devices", tuple(name for stage in self.stages for name in stage.devices))
        object.__setattr__(self, "nbytes", sum(stage.nbytes * len(stage.devices) for stage in self.stages))

    @property
    def links(self) -> tuple[tuple[str, str], ...]:
        """Pairs of devices whose ranks exchange what they compute: those of a stage, and of a stage and the next."""
        pairs = dict[tuple[str, str], None]()
        for stages in self.instances:
            pairs |= dict.fromkeys(pair for stage in stages for pair in combinations(stage.devices, 2))
            rounds = [*stages, stages[0]] if len(stages) > 2 else stages  # the last one gives tokens to the first
            for stage, following in pairwise(rounds):
                pairs |= dict.fromkeys(zip(stage.devices, following.devices, strict=True))
        return tuple(pairs)


@dataclass(frozen=True)
class Refusal:
    """A model that has no place."""

    reasons: tuple[tuple[Configuration, str], ...]
    """Of each configuration, the best first."""

    def __str__(self) -> str:
        """Return the reason of what the intent would have liked best."""
        if not self.reasons:
            return "there is no configuration to try"
        configuration, why = self.reasons[0]
        return f"none of {len(self.reasons)} configurations fits; {configuration}: {why}"


def place(
    options: Iterable[Option],
    states: Sequence[DeviceState],
    policy: PolicyName = "hybrid",
    theta: float = THETA,
    replicas: int = 1,
) -> Deployment | Refusal:
    """Put a model onto devices, in the first of its options that they have room for; `options` are the best first.

    Each of its replicas gets devices of its own; options are for the share of the load that one has. The devices
    themselves are chosen by the policy. Raises `ConfigError` for an unknown policy.
    """
    lists = preferred(states, policy, theta)
    reasons: list[tuple[Configuration, str]] = []
    for option in options:
        why = option.estimate.why_not
        for devices in [] if why else lists:
            placed = _put_replicas(option, devices, replicas, reasons)
            if isinstance(placed, Deployment):
                return placed
            why = placed
        reasons.append((option.configuration, why or "there is no device"))
    return Refusal(tuple(reasons))


def _put_replicas(
    option: Option, states: Sequence[DeviceState], replicas: int, passed_over: Sequence[tuple[Configuration, str]]
) -> Deployment | str:
    """Put one option onto devices so many times, each time onto others."""
    parts: list[Deployment] = []
    for number in range(1, replicas + 1):
        taken = {name for part in parts for name in part.devices}
        placed = _put(option, [state for state in states if state.name not in taken], passed_over)
        if isinstance(placed, str):
            return placed if replicas == 1 else f"replica {number} of {replicas}: {placed}"
        parts.append(placed)
    return replace(
        parts[0],
        stages=tuple(stage for part in parts for stage in part.stages),
        requests=min(part.requests for part in parts),
        estimate=max((part.estimate for part in parts), key=lambda each: each.latency_s),
        busy=tuple(share for part in parts for share in part.busy),
    )


def _put(
    option: Option, states: Sequence[DeviceState], passed_over: Sequence[tuple[Configuration, str]]
) -> Deployment | str:
    """Put one option onto the first of these devices of which none would compute more than all of its time."""
    why = ""
    while True:
        placed = _put_first(option, states, passed_over)
        if isinstance(placed, str):
            return why or placed
        hot = overloaded(states, placed.stages, placed.busy)
        if not hot:
            return placed
        why = why or f"{hot[0].name} would compute {hot[0].load:.3g} of the time"
        names = [state.name for state in hot]
        states = [state for state in states if state.name not in names]


def _put_first(
    option: Option, states: Sequence[DeviceState], passed_over: Sequence[tuple[Configuration, str]]
) -> Deployment | str:
    """Put one option onto the first of these devices, with room for as many requests as its rate needs.

    Uneven stages take longer from token to token, so that more may have to run than with even ones.
    """
    requests = max(1, option.estimate.running)
    while True:
        stages = assign(option, states, requests)
        if isinstance(stages, str):
            return stages
        estimate = option.judge(stages, requests)
        if estimate.fits:
            busy = option.busy(stages, requests)
            return Deployment(option.configuration, stages, requests, estimate, busy, tuple(passed_over))
        if estimate.running or requests >= MOST_REQUESTS:
            return estimate.why_not
        requests = min(MOST_REQUESTS, 2 * requests)
