"""A fleet in simulated time: the real dispatcher, in front of instances that only take time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.instance import Instance
from elastic.cluster.fleet.planning.router import Routing
from elastic.cluster.fleet.records.event_log import EventLog
from elastic.cluster.fleet.records.requests import RequestRecord
from elastic.cluster.rank.spec import RankSpec
from elastic.controller.sensors.request_metrics import RequestMetrics
from elastic.engines.base import Listener, Request
from elastic.planning.estimate.roofline import BatchCost
from elastic.sim.core.clock import VirtualClock, random_stream
from elastic.sim.core.executor import LocalExecutor
from elastic.sim.core.host import ALONE, Computer, HostSharing, SharedHost
from elastic.sim.core.instance import EngineOptions, PlacePages, SimulatedInstance
from elastic.sim.core.step_seconds import WARM, BehindPrompt, MeasuredPace, MeasuredStep, Noise, StepNoise

BEAT_S = 0.25
"""As ranks do."""


@dataclass(frozen=True)
class RankModel:
    """What instances of a fleet are, all alike."""

    engine: EngineOptions
    pages: PlacePages
    cost: BatchCost
    noise: float | tuple[MeasuredStep, ...] = 0.0
    """Of the seconds of a step: sigma of the logarithm, or measured steps."""
    message_s: float = 0.0
    """From the fleet to an instance."""
    stretch_s: float = 0.0
    """How long a stretch of decode steps may be one event; 0: none is."""
    sharing: HostSharing = ALONE
    """What ranks of a fleet, which are on one host, take from each other. If that is anything no stretch is one event.
    """
    cut: BatchCost | None = None
    """Of a step's seconds, those that ranks which share layers divide among them; None: all that are in layers."""
    behind_prompt: BehindPrompt = WARM
    """What steps of single tokens take longer behind a prompt."""
    paces: Mapping[str, MeasuredPace] = field(default_factory=dict)
    """By their names, ranks whose pace is that of real ones; the others have noise."""


class EagerInstance(Instance):
    """An instance that is given requests at once; they wait there until it has room."""

    def holds(self, record: RequestRecord, cached: int, reserved: int = 0) -> bool:
        """Return whether it will ever have room for a request."""
        return self.fits_alone(record.request)


class SimulatedFleet:
    """Some instances of one model, and the dispatcher that has them.

    `answers`: request -> the tokens of its answer, where they are fewer than its `max_tokens`; who submits notes them
    there, and takes them away.
    """

    _watched = False
    """Whether instances tell that they are alive while no request waits, too."""

    def __init__(
        self,
        clock: VirtualClock,
        model: RankModel,
        instances: int,
        *,
        routing: Routing = "prefix",
        max_queue: int | None = None,
        at_once: bool = False,
        seed: int = 0,
        name: str = "r",
        devices: Sequence[Computer] = (),
    ) -> None:
        """`at_once`: requests go to an instance as they come, and wait there, not here until one has room.

        `devices`: where the first instances compute, if others do so there, too.
        """
        self.clock, self.model, self.seed = clock, model, seed
        self.host = SharedHost(clock, model.sharing)
        self._devices = devices
        self.counters, self.log = RequestMetrics(), EventLog()
        self.dispatcher = Dispatcher(routing, max_queue, self.counters, self.log, clock)
        self.answers: dict[str, int] = {}
        self.instances: dict[str, SimulatedInstance] = {}
        """Those that were ever there."""
        self.on_lost: Callable[[Instance, str], None] = lambda instance, why: None
        """Told when an instance has ended."""
        self._instance = EagerInstance if at_once else Instance
        self._beating = False
        self._name = name
        for _ in range(instances):
            self.add()

    def add(self) -> SimulatedInstance:
        """Have one more instance."""
        number, model = len(self.instances), self.model
        name = f"{self._name}{number}"
        pace = model.paces.get(name)
        drawn = Noise(model.noise, random_stream(self.seed, f"noise {name}"))
        noise = drawn if pace is None else pace.noise(self.clock)
        made = self._make(name, self._executor(number, noise))
        spec = RankSpec(name, "simulated")
        now = self.clock.now
        instance = self._instance(name, made, spec, "simulated", [], True, heard_s=now, progress_s=now)  # type: ignore[arg-type]
        self.instances[name] = made
        self.dispatcher.instances[name] = instance
        made.listen(partial(self._heard, instance), lambda why: self.on_lost(instance, why))
        return made

    def _executor(self, number: int, noise: StepNoise) -> LocalExecutor:
        host = self._devices[number] if number < len(self._devices) else self.host
        return LocalExecutor(self.clock, self.model.cost, noise, self.answers, host, self.model.behind_prompt)

    def _make(self, name: str, executor: LocalExecutor) -> SimulatedInstance:
        model = self.model
        return SimulatedInstance(
            self.clock, name, model.engine, model.pages, executor, model.stretch_s, model.message_s
        )

    def submit(self, request: Request, listener: Listener) -> None:
        """Take a request. Raises `CapacityError` and `Overloaded` as a fleet does."""
        self.dispatcher.submit(request, listener)
        self._watch()

    def check(self) -> None:
        """Recount. Raises `IntegrityError`."""
        self.dispatcher.check()
        for instance in self.instances.values():
            instance.blocks.check()
            instance.memory.check()

    def _heard(self, instance: Instance, message: object) -> None:
        self.host.take_message()
        self.dispatcher.heard(instance, message)  # type: ignore[arg-type]
        self._watch()

    def _watch(self) -> None:
        """Have instances tell what room they have while requests wait, or somebody watches."""
        if (self._watched or self.dispatcher.queue) and not self._beating:
            self._beating = True
            self.clock.after(BEAT_S, self._beat)

    def _beat(self) -> None:
        self._beating = False
        for instance in list(self.instances.values()):
            instance.beat()
        self._watch()
