"""AlpaServe's placement, for comparison: models into groups of devices, by simulating requests that are known before.

Every group has the same number of devices and the same degrees of parallelism. The faster of its two searches: a model
with the most requests out of their time goes to the least busy group that has room, until none fits; of all such groups
and degrees, what serves the most requests in time. (AlpaServe, section 4.2, algorithms 1 and 2)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baselines.queueing import FirstComeFirstServed
from elastic.planning.deployment.assign import assign
from elastic.planning.deployment.devices import DeviceState, Stage, after
from elastic.planning.deployment.placing import Deployment, Option
from elastic.planning.estimate.configuration import Configuration
from elastic.planning.estimate.performance import InstanceCost, Load


class TimedOption(Option, Protocol):
    """An option whose seconds are known for any request."""

    def cost(self, stages: Sequence[Stage]) -> InstanceCost:
        """Return the seconds of batches in such stages."""


@dataclass(frozen=True)
class KnownRequest:
    """A request of a trace."""

    at_s: float
    model: str
    load: Load
    slo_s: float
    """What it may take."""


@dataclass
class _Groups:
    """Models in groups of devices, all of one configuration."""

    states: list[tuple[DeviceState, ...]]
    """The devices of each group, with what is left of them."""
    options: Mapping[str, TimedOption]
    """The model's option in this configuration; not there: it does not allow it."""
    placed: dict[str, dict[int, Deployment]] = field(default_factory=dict)
    """Model -> group -> its instance there."""
    _seconds: dict[tuple[str, tuple[range, ...], Load], tuple[float, ...]] = field(default_factory=dict)

    def put(self, model: str, group: int) -> bool:
        """Put a model into a group; return whether it has room."""
        option = self.options.get(model)
        if option is None or group in self.placed.get(model, {}):
            return False
        stages = assign(option, self.states[group])
        if isinstance(stages, str):
            return False
        busy = option.busy(stages, 1)
        self.placed.setdefault(model, {})[group] = Deployment(
            option.configuration, stages, 1, option.judge(stages, 1), busy
        )
        self.states[group] = after(self.states[group], stages, busy, model)
        return True

    def serve(self, trace: Sequence[KnownRequest]) -> tuple[Counter[str], list[float]]:
        """Return how many requests of each model are not served in time, and for how long each group is busy."""
        queue = FirstComeFirstServed(state.name for group in self.states for state in group)
        late: Counter[str] = Counter(request.model for request in trace if request.model not in self.placed)
        taken = [
            (request, self._submit(queue, request, self.placed[request.model]))
            for request in trace
            if request.model in self.placed
        ]
        queue.advance()
        late.update(each.model for each, number in taken if queue.ends_s[number] - each.at_s > each.slo_s)
        end_s = max(queue.ends_s, default=0.0)
        return late, [sum(queue.busy_s(state.name, 0.0, end_s) for state in group) for group in self.states]

    def _submit(self, queue: FirstComeFirstServed, request: KnownRequest, groups: Mapping[int, Deployment]) -> int:
        """Give a request to the instance whose first devices are free the soonest; return its number."""
        queue.advance(request.at_s)
        chosen = min(groups.values(), key=lambda each: queue.free_s(each.stages[0].devices))
        key = request.model, tuple(stage.layers for stage in chosen.stages), request.load
        if key not in self._seconds:
            self._seconds[key] = self.options[request.model].cost(chosen.stages).alone_s(request.load)
        pairs = zip(chosen.stages, self._seconds[key], strict=True)
        return queue.submit(request.at_s, [(stage.devices, seconds) for stage, seconds in pairs])


def alpaserve(
    options: Mapping[str, Sequence[TimedOption]],
    states: Sequence[DeviceState],
    trace: Sequence[KnownRequest],
    *,
    drop: bool = True,
) -> dict[str, tuple[Deployment, ...]]:
    """Return the instances of each model on devices, with full weights; a model may have several, or none.

    `trace`: the requests, in the order of their arrival. `drop=False`: as many models as fit are placed before any has
    a second instance (AlpaServe*, iServe section 8); else models may be left out for the sake of others.
    """
    best: tuple[int, dict[str, tuple[Deployment, ...]]] | None = None
    for configuration, groups in _configurations(len(states)):
        own = {
            model: option
            for model, ranked in options.items()
            for option in ranked
            if option.configuration == configuration and not option.estimate.why_not
        }
        size = len(states) // groups
        together = [tuple(states[first : first + size]) for first in range(0, len(states), size)]
        for late, placed in _search(_Groups(together, own), list(options), trace, drop=drop):
            missing = 0 if drop else len(trace) * sum(model not in placed for model in options)
            if best is None or missing + late < best[0]:
                best = missing + late, placed
    return best[1] if best is not None else {}


def _search(
    groups: _Groups, models: Sequence[str], trace: Sequence[KnownRequest], *, drop: bool
) -> Iterator[tuple[int, dict[str, tuple[Deployment, ...]]]]:
    """Yield how many requests are late, and the placement, after each model that was put somewhere."""
    late, busy_s = groups.serve(trace)
    while True:
        wanted = sorted((model for model in models if late[model]), key=lambda model: -late[model])
        if not drop:
            wanted = [*(model for model in models if model not in groups.placed), *wanted]
        order = sorted(range(len(groups.states)), key=lambda group: busy_s[group])
        if not any(groups.put(model, group) for model in wanted for group in order):
            return
        late, busy_s = groups.serve(trace)
        yield late.total(), {model: tuple(each.values()) for model, each in groups.placed.items()}


def _configurations(devices: int) -> Iterator[tuple[Configuration, int]]:
    """Yield the degrees of a group, and how many such groups there are."""
    for size in range(1, devices + 1):
        for tp in (1 << power for power in range(size.bit_length())):
            if devices % size == 0 and size % tp == 0:
                yield Configuration(tp, size // tp), devices // size
