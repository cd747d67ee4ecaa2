"""Scenarios: what is simulated, read from a TOML file."""

from __future__ import annotations

import difflib
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, cast, get_args

from elastic.cluster.fleet.planning.router import Routing
from elastic.errors import ConfigError, require_whole
from elastic.estimation.device_list import parse_devices
from elastic.estimation.estimate import WEIGHTS
from elastic.estimation.placement import ModelSpace
from elastic.planning.deployment.policies import POLICIES, THETA, PolicyName
from elastic.planning.estimate.configuration import FULL, named_forms
from elastic.planning.estimate.devices import Device, shown_bytes
from elastic.planning.estimate.intent import OBJECTIVES, Intent, Objective
from elastic.planning.estimate.performance import Load
from elastic.sim.core.fleet import RankModel
from elastic.sim.core.instance import EngineOptions
from elastic.sim.placement.deployments import PlacementScenario
from elastic.sim.policies import Mechanisms, read_mechanisms
from elastic.sim.published import PublishedFigure, read_published
from elastic.sim.rank_model import MOST_NOISE, SheetMemory, read_config, read_engine, read_rank_model, read_rates
from elastic.sim.sources import read_source
from elastic.sim.tables import Table
from elastic.sim.workload import RequestSource

_MOST_INSTANCES = 100_000
SHIPPED = resources.files("elastic.sim") / "scenarios"


@dataclass(frozen=True)
class FleetOptions:
    """The fleets that requests go to."""

    instances: int
    """Of each fleet."""
    fleets: int = 1
    """Fleets side by side, each with a dispatcher of its own; requests come to one of them by chance."""
    routing: Routing = "prefix"
    max_queue: int | None = None
    queues: str = "fleet"
    """Where requests wait: at the fleet, until an instance has room, or at "instances", where they go as they come."""


@dataclass(frozen=True)
class SimulatedModel:
    """A model that is served, by fleets of its own."""

    fleet: FleetOptions
    rank: RankModel
    mechanisms: Mechanisms | None = None
    """What instances do besides serving."""
    name: str = ""
    devices: tuple[tuple[int, ...], ...] = ()
    """Of each instance, by number, those that it computes at, which instances of other models may have, too; (): each
    has its own."""
    basis: str = "fitted"
    """Where the seconds of steps are from."""
    memory: SheetMemory | None = None
    """Of each device; None: no data sheet tells it."""


@dataclass(frozen=True)
class Scenario:
    """A simulation that is to be run."""

    title: str
    duration_s: float
    """While requests come."""
    models: tuple[SimulatedModel, ...]
    sources: tuple[RequestSource, ...]
    drain_s: float = 600.0
    """How long requests may still take after that."""
    samples: int = 240
    """Moments at which room and queues are told."""
    seed: int = 0
    predicts: str = ""
    """Of what the figures are a prediction, and which hardware numbers were used; "": of nothing."""
    published: tuple[PublishedFigure, ...] = ()
    """Figures of a paper, to be told beside."""
    placement: PlacementScenario | None = None
    """Models that a planner places; there are no others then."""

    @property
    def basis(self) -> str:
        """Where the seconds of steps are from, of all models."""
        if self.placement is not None:
            return self.placement.basis
        return "; ".join(dict.fromkeys(model.basis for model in self.models))

    @property
    def instances(self) -> int:
        """Instances of all models; of those that are placed, if all have a place."""
        if self.placement is not None:
            return len(self.placement.order) * self.placement.replicas
        return sum(model.fleet.instances * model.fleet.fleets for model in self.models)


def shipped() -> tuple[str, ...]:
    """Return the names of the scenarios that come with the package."""
    return tuple(sorted(file.name.removesuffix(".toml") for file in SHIPPED.iterdir() if file.name.endswith(".toml")))


def read_scenario(source: str | Path, *, seed: int | None = None) -> Scenario:
    """Read a scenario from a file, or one that is shipped, by its name. `seed`: another one than the file's.

    Raises `ConfigError` for a file that cannot be read, and for what is wrong in it, by its key.
    """
    return parse_scenario(_document(str(source)), Path(source).parent, seed=seed)


def _document(source: str, before: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a scenario's tables, with those of the one that it `extends` where it has none of that name."""
    if source in before:
        raise ConfigError(f"scenario {source} extends itself, by {', '.join(before)}")
    if not source.strip():
        raise ConfigError(f"scenario {source!r} is no name; give a file, or one of {', '.join(shipped())}")
    try:
        shown = SHIPPED / f"{source}.toml" if source in shipped() else Path(source)
        values = tomllib.loads(shown.read_text(encoding="utf-8"))
    except OSError as error:
        near = difflib.get_close_matches(source.removesuffix(".toml"), shipped(), 1)
        told = f"did you mean {near[0]}?" if near else f"there come {', '.join(shipped())} with the package"
        raise ConfigError(f"scenario {source[:80]} cannot be read: {error.strerror}; {told}") from error
    except (ValueError, RecursionError) as error:  # also bytes that are no text, and numbers too long to be read
        raise ConfigError(f"scenario {source} is no TOML: {error}") from error
    other = values.pop("extends", None)
    if other is None:
        return values
    if not isinstance(other, str):
        raise ConfigError(f"extends = {other!r} must be the name of a scenario, or of a file")
    name = other if other in shipped() else str(Path(source).parent / other)
    return {**_document(name, (*before, source)), **values}


def parse_scenario(values: dict[str, Any], folder: Path = Path(), *, seed: int | None = None) -> Scenario:
    """Return the scenario of a document. Files in it are relative to `folder`. Raises `ConfigError`."""
    if seed is not None:
        require_whole(seed, "seed", least=0)
    table = Table(values, "")
    try:
        return _scenario(table, folder, seed)
    except ConfigError as error:
        if "did you mean" not in str(error) and (hint := table.misspelt()):
            raise ConfigError(f"{error}{hint}") from error
        raise


def _scenario(table: Table, folder: Path, seed: int | None) -> Scenario:
    """Return the scenario of all tables. Raises `ConfigError`."""
    own_seed = table.whole("seed", 0, least=0)
    placement = read_placement(table, folder) if "placement" in table else None
    models = _models(table, folder) if placement is None else ()
    sources = tuple(read_source(each, folder) for each in table.tables("requests"))
    if not sources:
        raise ConfigError("requests are missing: give one [[requests]] table or more")
    if len({each.name for each in sources}) < len(sources):
        raise ConfigError("two [[requests]] have the same name; name each")
    names = [model.name for model in models] if placement is None else ["", *placement.names]
    for each in sources:
        if each.model not in names:
            among = ", ".join(filter(None, names)) or "[[models]], of which there are none: leave it out"
            raise ConfigError(f"requests {each.name!r}: model = {each.model!r} must be one of {among}")
    scenario = Scenario(
        table.text("title", ""),
        table.number("duration_s", least=1e-3),
        models,
        sources,
        table.number("drain_s", 600.0),
        table.whole("samples", 240, most=1_000_000),
        own_seed if seed is None else seed,
        table.text("predicts", ""),
        tuple(map(read_published, table.tables("published"))),
        placement,
    )
    table.done()
    return scenario


def read_placement(table: Table, folder: Path) -> PlacementScenario:
    """Return the models that a planner is to place, and on what. Raises `ConfigError` naming a wrong key."""
    engine, steps, simulation = read_engine(table.table("engine")), table.table("steps"), table.table("simulation")
    if engine.eviction != "none":
        raise ConfigError(f"engine.eviction = {engine.eviction!r} is not for models that are placed; drop one")
    noise, stretch_s = steps.number("noise", 0.0, most=MOST_NOISE), simulation.number("stretch_s", 0.5)
    steps.done()
    simulation.done()
    configs = _configs(table.table("configs"), folder)
    order = table.texts("deploy", among=tuple(configs))
    if not order:
        raise ConfigError("deploy is missing: give the names of [configs], in the order in which they are deployed")
    own = table.table("placement")
    if "every_s" in own and "together" not in own:
        raise ConfigError("placement.every_s is said, but models come all at once; say together, or take it away")
    devices, basis = _cluster(own)
    scenario = PlacementScenario(
        devices,
        configs,
        order,
        _space(own, engine),
        cast(PolicyName, own.text("policy", "hybrid", among=POLICIES)),
        own.number("theta", THETA),
        own.whole("replicas", 1),
        own.optional("together"),
        own.number("every_s", 180.0),
        engine,
        noise,
        stretch_s,
        basis,
    )
    own.done()
    return scenario


def _configs(named: Table, folder: Path) -> dict[str, Any]:
    """Return directories, or configs, by the names of their tables."""
    configs = {}
    for name in named:
        table = named.table(name)
        configs[name] = read_config(table, folder)
        table.done()
    if not configs:
        raise ConfigError("configs are missing: give a table [configs.NAME] for each model that is to be deployed")
    return configs


def _cluster(table: Table) -> tuple[list[Device], str]:
    """Return devices at the rates that they reach, and where their seconds are from."""
    devices = parse_devices(table.text("devices"))
    kind, basis = read_rates(table, devices[0].kind)
    if any(device.kind != devices[0].kind for device in devices):
        raise ConfigError("placement.devices are of several kinds: models are placed on devices of one kind")
    return [replace(device, kind=kind) for device in devices], basis


def _space(table: Table, engine: EngineOptions) -> ModelSpace:
    """Return what is considered of each model."""
    objective = table.text("intent", "cost", among=[name.replace("_", "-") for name in OBJECTIVES])
    intent = Intent(cast(Objective, objective.replace("-", "_")), tolerance=table.number("tolerance", 0.0))
    load = Load(table.whole("prompt", 512), table.whole("new", 128), table.number("rate", 0.0))
    return ModelSpace(
        load,
        intent,
        named_forms(table.texts("weights") or WEIGHTS, "placement.weights"),
        named_forms(table.texts("kv") or (FULL,), "placement.kv"),
        table.flag("planned"),
        step_tokens=engine.max_batch_tokens,
        block_tokens=engine.block_tokens,
        any_model=True,
    )


def _models(table: Table, folder: Path) -> tuple[SimulatedModel, ...]:
    """Return the models of `[[models]]`, or the one that the scenario's own tables are about."""
    tables = table.tables("models")
    if not tables:
        table.expect("model")
        return (_model(table, folder, ""),)
    models = []
    for each in tables:
        models.append(_model(each, folder, each.text("name")))
        each.done()
    if len({model.name for model in models}) < len(models):
        raise ConfigError("two [[models]] have the same name; name each otherwise")
    _require_memory(models)
    return tuple(models)


def _require_memory(models: Sequence[SimulatedModel]) -> None:
    """Raise `ConfigError` where models have more of a device together than its data sheet says that it has."""
    taken: defaultdict[int, list[tuple[str, SheetMemory]]] = defaultdict(list)
    for model in models:
        for device in (number for numbers in model.devices for number in numbers):
            if model.memory is not None:
                taken[device].append((model.name, model.memory))
    for device, memories in taken.items():
        size = min(memory.nbytes for _, memory in memories)
        if sum(memory.taken for _, memory in memories) > size:
            shares = ", ".join(f"{name} has {shown_bytes(memory.taken)}" for name, memory in memories)
            raise ConfigError(f"model.memory: device {device} has {shown_bytes(size)}, of which {shares}; give less")


def _model(table: Table, folder: Path, name: str) -> SimulatedModel:
    fleet = _fleet(table.table("fleet"))
    rank, basis, memory = read_rank_model(table, folder)
    mechanisms = read_mechanisms(table.table("mechanisms"), rank, fleet.instances)
    if rank.engine.eviction != "none" and mechanisms is not None:
        raise ConfigError(f"engine.eviction = {rank.engine.eviction!r} is for fleets without [mechanisms]; drop one")
    return SimulatedModel(fleet, rank, mechanisms, name, _devices(table, fleet), basis, memory)


def _devices(table: Table, fleet: FleetOptions) -> tuple[tuple[int, ...], ...]:
    """Return the devices of each instance: as many for one as for another, in order."""
    if "devices" not in table:
        return ()
    numbers, instances = table.numbers("devices"), fleet.instances
    whole = all(number.is_integer() and number >= 0 for number in numbers)
    if fleet.fleets > 1 or not whole or not numbers or len(numbers) % instances:
        raise table.wrong(
            "devices", list(numbers), f"device numbers, as many for each of {instances} instances, of one fleet"
        )
    each = len(numbers) // instances
    of_instances = tuple(tuple(map(int, numbers[i : i + each])) for i in range(0, len(numbers), each))
    if any(len(set(devices)) < each for devices in of_instances):
        raise table.wrong("devices", list(numbers), "other devices for each part of an instance")
    return of_instances


def _fleet(table: Table) -> FleetOptions:
    options = FleetOptions(
        table.whole("instances", most=_MOST_INSTANCES),
        table.whole("fleets", 1, most=_MOST_INSTANCES),
        cast(Routing, table.text("routing", "prefix", among=get_args(Routing))),
        table.optional("max_queue"),
        table.text("queues", "fleet", among=("fleet", "instances")),
    )
    table.done()
    return options
