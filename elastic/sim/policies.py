"""What the fleets of a scenario do by themselves, and what befalls them: its table `[mechanisms]`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

from elastic.cluster.fleet.planning.policies import FleetPolicies, FleetPolicy, chosen
from elastic.config import Lengths, Overload
from elastic.errors import ConfigError, nearest
from elastic.sim.core.fleet import RankModel, SimulatedFleet
from elastic.sim.core.instance import PlacePages
from elastic.sim.core.threads import SimulatedThreads
from elastic.sim.mechanisms.fleet import START_S, ElasticFleet, ScheduledVerbs
from elastic.sim.mechanisms.model import LayeredModel, Links, Packed
from elastic.sim.rank_model import MOST_PARTS
from elastic.sim.tables import Table

T = TypeVar("T")
POLICIES = ("balance", "drop", "lengths")


@dataclass(frozen=True)
class Fault:
    """A rank that ends, or hangs."""

    at_s: float
    kind: str
    instance: int
    """Which of the first fleet's."""


@dataclass(frozen=True)
class Mechanisms:
    """What instances do besides serving."""

    policies: FleetPolicies
    model: LayeredModel
    stages: int = 1
    """So many instances are a pipeline from the beginning, and never part."""
    tp: int = 1
    """So many instances share their layers from the beginning, and never part."""
    faults: tuple[Fault, ...] = ()
    replaces: bool = False
    moves: bool = False
    start_s: float = START_S


def read_mechanisms(table: Table, rank: RankModel, instances: int) -> Mechanisms | None:
    """Return what a table says of a fleet; None: there is nothing in it. Raises `ConfigError` naming what is wrong."""
    if not table.left:
        return None
    names = table.texts("policies", among=POLICIES)
    overload, lengths = table.table("overload"), table.table("lengths")
    for name, own in (("drop", overload), ("lengths", lengths)):
        if own.left and name not in names:
            raise ConfigError(f"{own.name} is said, but policies have no {name!r}; add it, or take the table away")
    settings: dict[str, FleetPolicy] = {"balance": "balance"}
    settings["drop"], settings["lengths"] = _record(Overload, overload), _record(Lengths, lengths)
    policies = chosen([settings[name] for name in names])
    packed = table.table("packed")
    kv_shards = table.whole("kv_shards", 1, most=MOST_PARTS)
    model = LayeredModel(
        replace(rank, pages=_in_parts(rank.pages, kv_shards)),
        table.whole("shards", kv_shards, most=MOST_PARTS),
        kv_shards,
        table.whole("page_bytes", 2 << 20),
        table.whole("token_bytes", 8192),
        table.number("rest", 0.05),
        _record(Links, table.table("links")),
        _record(Packed, packed) if packed.left else None,
        table.number("beside_s", 0.0),
        table.number("beside_chunk_s", 0.0),
    )
    faults = tuple(map(_fault, table.tables("faults")))
    stages, tp = table.whole("stages", 1), table.whole("tp", 1)
    mechanisms = Mechanisms(
        policies,
        model,
        stages,
        tp,
        faults,
        table.flag("replaces"),
        table.flag("moves"),
        table.number("start_s", START_S),
    )
    _check_together(mechanisms, table.name, instances)
    if model.packed is not None and "drop" not in names:
        raise ConfigError(
            f"{packed.name} is said, but policies have no 'drop', which swaps to it; add it, or take it away"
        )
    table.done()
    return mechanisms


def _check_together(mechanisms: Mechanisms, name: str, instances: int) -> None:
    """Raise `ConfigError` where so many instances cannot compute together from the beginning as is said."""
    stages, tp, model = mechanisms.stages, mechanisms.tp, mechanisms.model
    if stages > 1 and tp > 1:
        raise ConfigError(f"{name}: stages = {stages} and tp = {tp} cannot be at the same time; take one of them")
    if instances % (stages * tp):
        said = f"stages = {stages}" if stages > 1 else f"tp = {tp}"
        raise ConfigError(f"{name}: {said} does not divide {instances} instances; give a multiple of it")
    if stages > model.layers:
        raise ConfigError(f"{name}: stages = {stages} are more than the {model.layers} layers; give fewer")
    if model.shards % tp:
        raise ConfigError(
            f"{name}: tp = {tp} ranks cannot share layers in {model.shards} parts; say shards = {tp}, or a multiple"
        )
    least = -(-model.kv.block_bytes * model.rank.pages.blocks_per_sector // model.part_pages)
    if model.page_bytes < least:
        raise ConfigError(
            f"{name}.page_bytes = {model.page_bytes} has no room for a block of {model.rank.engine.block_tokens} "
            f"tokens; give {least} or more"
        )


def make_fleet(
    threads: SimulatedThreads,
    rank: RankModel,
    mechanisms: Mechanisms | None,
    instances: int,
    **options: Any,
) -> SimulatedFleet:
    """Return a fleet that does what was said, from the first event on; `options` are those of any `SimulatedFleet`."""
    if mechanisms is None:
        return SimulatedFleet(threads.events, rank, instances, **options)
    made = ElasticFleet(
        threads,
        mechanisms.model,
        instances,
        mechanisms.policies,
        watch=bool(mechanisms.faults),
        replaces=mechanisms.replaces,
        moves=mechanisms.moves,
        start_s=mechanisms.start_s,
        **options,
    )
    names = tuple(made.instances)
    if mechanisms.tp > 1:
        made.call(partial(_share, names, mechanisms.tp))
    if mechanisms.stages > 1:
        made.call(partial(_pipelines, names, mechanisms.stages, mechanisms.model.layers))
    made.start()
    return made


def schedule_faults(fleet: ElasticFleet, faults: tuple[Fault, ...]) -> None:
    """Have faults come to a fleet in time. Raises `ConfigError` for an instance that it has not."""
    names = tuple(fleet.instances)
    for fault in faults:
        if not fault.instance < len(names):
            raise ConfigError(f"mechanisms.faults: there is no instance {fault.instance}; there are {len(names)}")
        act: Callable[[str], object] = fleet.kill if fault.kind == "kill" else fleet.hang
        fleet.clock.at(fault.at_s, partial(act, names[fault.instance]))


def _share(names: tuple[str, ...], tp: int, verbs: ScheduledVerbs) -> None:
    for first in range(0, len(names) - tp + 1, tp):
        verbs.reshard(names[first : first + tp], tp=tp)


def _pipelines(names: tuple[str, ...], stages: int, layers: int, verbs: ScheduledVerbs) -> None:
    """Have each so many instances keep consecutive layers, and drop the others."""
    bounds = [layers * stage // stages for stage in range(stages + 1)]
    for first in range(0, len(names) - stages + 1, stages):
        kept = {name: range(bounds[i], bounds[i + 1]) for i, name in enumerate(names[first : first + stages])}
        verbs.drop(layers={name: [layer for layer in range(layers) if layer not in run] for name, run in kept.items()})


def _fault(table: Table) -> Fault:
    fault = Fault(table.number("at_s"), table.text("kind", among=("kill", "hang")), table.whole("instance", least=0))
    table.done()
    return fault


def _record(kind: type[T], table: Table) -> T:
    """Return a record of a table's values. Raises `ConfigError` for one that it has not."""
    values, names = table.rest(), [field.name for field in fields(kind)]  # type: ignore[arg-type]
    unknown = next((key for key in values if key not in names), None)
    if unknown is not None:
        raise ConfigError(f"{table.name}.{unknown} is not known; {nearest(unknown, names)}")
    return kind(**values)


def _in_parts(pages: PlacePages, parts: int) -> PlacePages:
    """Return the pages with sectors that each of so many parts of a layer's keys and values has pages of its own of."""
    if pages.sector % (pages.layers * parts) == 0:
        return pages
    return replace(pages, sector=pages.sector * parts, blocks_per_sector=pages.blocks_per_sector * parts)
