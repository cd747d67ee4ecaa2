"""One run of a scenario."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

from elastic.errors import CapacityError, Overloaded, StateError
from elastic.sim.core.clock import VirtualClock, random_stream
from elastic.sim.core.fleet import SimulatedFleet
from elastic.sim.core.host import ComputeTurn, SharedDevices, SharedHost
from elastic.sim.core.threads import SimulatedThreads
from elastic.sim.mechanisms.fleet import ElasticFleet
from elastic.sim.placement.deployments import SimulatedDeployments
from elastic.sim.policies import make_fleet, schedule_faults
from elastic.sim.report import Report
from elastic.sim.scenario import Scenario, SimulatedModel
from elastic.sim.workload import RequestArrival, request_of


@dataclass(frozen=True)
class SimulationSpeed:
    """How fast a run was."""

    wall_s: float
    events: int
    steps: int
    """Steps of all instances."""
    simulated_s: float

    @property
    def events_per_s(self) -> float:
        """Events in a second of the simulator's own."""
        return self.events / self.wall_s if self.wall_s else 0.0


class Run:
    """A scenario that is being run, on one clock."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.clock = VirtualClock()
        self.threads = SimulatedThreads(self.clock)
        self.report = Report()
        self._devices = {
            number: ComputeTurn(SharedHost(self.clock))
            for model in scenario.models
            for devices in model.devices
            for number in devices
        }
        self._by_model = {model.name: self._fleets_of(model) for model in scenario.models}
        placement = scenario.placement
        self.deployments = None if placement is None else SimulatedDeployments(self.clock, placement, scenario.seed)
        self._models = {source.name: source.model for source in scenario.sources}
        jobs = (source.jobs(scenario.seed, scenario.duration_s) for source in scenario.sources)
        self._jobs = heapq.merge(*jobs, key=lambda job: job.at_s)
        self._numbers = count()
        self._choose = random_stream(scenario.seed, "fleets")
        self._choose_model = random_stream(scenario.seed, "models")

    @property
    def fleets(self) -> list[SimulatedFleet]:
        """All that are there now."""
        fleets = [fleet for each in self._by_model.values() for fleet in each]
        return fleets if self.deployments is None else [*fleets, *self.deployments.fleets.values()]

    def play(self, progress: Callable[[float], object] = lambda at_s: None) -> SimulationSpeed:
        """Have all requests come, and all end; what has not `drain_s` after the last could come, does not.

        `progress` is told the time of the run now and then. Nothing of the run goes on behind it, whatever it raises.
        """
        began = time.perf_counter()
        try:
            self._serve(progress)
            self._tell()
        finally:
            self.close()
        steps = sum(instance.scheduler.steps for fleet in self.fleets for instance in fleet.instances.values())
        return SimulationSpeed(time.perf_counter() - began, self.clock.events, steps, self.clock.now)

    def close(self) -> None:
        """End what fleets do by themselves; nothing happens any more then. Can be called twice."""
        self.threads.close()
        for fleet in self.fleets:
            if isinstance(fleet, ElasticFleet):
                fleet.finish()

    def _serve(self, progress: Callable[[float], object]) -> None:
        """Have time pass until no request is left, or none may be any more."""
        scenario = self.scenario
        self._await_next()
        self._sample()
        every_s = scenario.duration_s / scenario.samples
        end_s = scenario.duration_s + scenario.drain_s
        while self.clock.now < end_s:
            self.threads.run(min(end_s, self.clock.now + every_s))
            if self.clock.now > scenario.duration_s and not any(fleet.dispatcher.records for fleet in self.fleets):
                break
            self._sample()
            progress(self.clock.now)
            if len(self.report.samples) % (2 * scenario.samples) == 0:
                every_s *= 2  # what is left takes longer than requests came: moments do not grow with it

    def _tell(self) -> None:
        """Recount, and report what was not told as it happened. Raises `IntegrityError`."""
        for fleet in self.fleets:
            fleet.check()
            if isinstance(fleet, ElasticFleet):
                self.report.stages |= fleet.stage_times()
        if self.deployments is not None:
            self.report.placements = self.deployments.placements()
            ended = not self.report.counts()["unfinished"]
            self.report.devices = self.deployments.use(self.report.last_s if ended else self.clock.now)

    def _fleets_of(self, model: SimulatedModel) -> list[SimulatedFleet]:
        """Make the fleets of a model. Instances that share devices take turns there."""
        options, several = model.fleet, len(self.scenario.models) > 1
        devices = [SharedDevices(self.clock, [self._devices[n] for n in numbers]) for numbers in model.devices]
        fleets = [
            make_fleet(
                self.threads,
                model.rank,
                model.mechanisms,
                options.instances,
                routing=options.routing,
                max_queue=options.max_queue,
                at_once=options.queues == "instances",
                seed=self.scenario.seed,
                name=(f"{model.name} " if several else "") + (f"{number}." if options.fleets > 1 else "r"),
                devices=devices,
            )
            for number in range(options.fleets)
        ]
        for fleet in fleets:
            fleet.log.on_event = self.report.event
        if model.mechanisms is not None and isinstance(fleets[0], ElasticFleet):
            schedule_faults(fleets[0], model.mechanisms.faults)
        return fleets

    def _await_next(self) -> None:
        """Have the next request come when it is due: no later one is drawn before."""
        job = next(self._jobs, None)
        if job is not None:
            self.clock.at(max(self.clock.now, job.at_s), partial(self._come, job))

    def _come(self, job: RequestArrival) -> None:
        self._submit(job)
        self._await_next()

    def _submit(self, job: RequestArrival) -> None:
        number, model = next(self._numbers), self._model_of(job)
        fleet = self._fleet_of(model)
        if fleet is None:
            self.report.listener(job, model=model)
            self.report.refused(model)
            return
        request = request_of(job, number)
        if job.answer < job.most:
            fleet.answers[request.id] = job.answer
        listener = self.report.listener(job, lambda: fleet.answers.pop(request.id, None), model=model)
        try:
            fleet.submit(request, listener)
        except (CapacityError, Overloaded, StateError):
            fleet.answers.pop(request.id, None)
            self.report.refused(model)

    def _model_of(self, job: RequestArrival) -> str:
        """Return to which model a request is: one of those that were deployed by now, by chance, if none was said."""
        model = self._models[job.source]
        if model or self.deployments is None:
            return model
        return self._choose_model.choice(list(self.deployments.outcomes))

    def _fleet_of(self, model: str) -> SimulatedFleet | None:
        """Return one of a model's fleets; None: it has no place."""
        if self.deployments is not None:
            return self.deployments.fleets.get(model)
        fleets = self._by_model[model]
        return fleets[0] if len(fleets) == 1 else fleets[self._choose.randrange(len(fleets))]

    def _sample(self) -> None:
        loads = [instance.load for fleet in self.fleets for instance in fleet.dispatcher.instances.values()]
        total = sum(load.total_blocks for load in loads)
        use = 1 - sum(load.free_blocks for load in loads) / total if total else 0.0
        queued = sum(load.waiting for load in loads) + sum(len(fleet.dispatcher.queue) for fleet in self.fleets)
        self.report.sample(self.clock.now, use, sum(load.running for load in loads), queued)
