"""The rank of a scenario: what its steps cost and what memory it has, as was fitted, or by a data sheet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic.config import parse_bytes
from elastic.errors import ConfigError
from elastic.estimation.estimate import Estimator
from elastic.estimation.model_layout import layout_of
from elastic.model_files import reading
from elastic.planning.estimate.configuration import FULL, Configuration
from elastic.planning.estimate.devices import DeviceKind, require_memory, several, sheet
from elastic.planning.estimate.performance import InstanceCost, Load
from elastic.planning.estimate.roofline import BatchCost
from elastic.planning.pipeline.chunk_cost import ChunkCost
from elastic.sim.core.evicting import SCHEDULERS
from elastic.sim.core.fleet import RankModel
from elastic.sim.core.host import HostSharing
from elastic.sim.core.instance import EngineOptions, PlacePages
from elastic.sim.core.step_seconds import BehindPrompt
from elastic.sim.placement.rank_pages import rank_pages
from elastic.sim.roofline import DividedSteps, SheetSteps
from elastic.sim.tables import Table

COEFFICIENTS = ("prefix", "own", "token", "chunk", "shared", "read")
SHARES = 2
"""Of a layer, with which it is told what ranks divide and what each of them computes."""
MOST_NOISE = 10.0
"""Sigma of the logarithm, as of lengths."""
MOST_PARTS = 4096
"""Ranks that share layers, and parts of a layer, as devices of an estimate."""
_MOST_LAYERS = 10_000
MOST_TOKENS = 2048
"""Of a request, for which the memory of batches is estimated, where nothing is said."""


@dataclass(frozen=True)
class SheetMemory:
    """The memory of a device by its data sheet, in bytes."""

    nbytes: int
    taken: int
    """What one rank has of it."""


@dataclass(frozen=True)
class _RankCost:
    """What a rank's steps cost, and the pages that it has."""

    cost: BatchCost
    pages: PlacePages
    basis: str = "fitted"
    cut: BatchCost | None = None
    memory: SheetMemory | None = None


def read_rank_model(table: Table, folder: Path) -> tuple[RankModel, str, SheetMemory | None]:
    """Return what the ranks are, where their seconds are from, and the memory of each device, where a sheet tells it.

    Raises `ConfigError` naming a wrong key.
    """
    options = read_engine(table.table("engine"))
    simulation = table.table("simulation")
    stretch_s = simulation.number("stretch_s", 0.5)
    simulation.done()
    steps = table.table("steps")
    noise, sharing = steps.number("noise", 0.0, most=MOST_NOISE), _sharing(steps)
    behind_prompt = BehindPrompt(
        steps.number("behind_prompt_s", 0.0), steps.number("behind_prompt_kept", 0.0, most=1.0)
    )
    if "model" in table:
        rank = _by_sheet(table.table("model"), options, folder)
    else:
        rank = _RankCost(_fitted(steps), _memory(table.table("memory"), options))
    steps.done()
    model = RankModel(options, rank.pages, rank.cost, noise, stretch_s=stretch_s, sharing=sharing, cut=rank.cut)
    return replace(model, behind_prompt=behind_prompt), rank.basis, rank.memory


def _sharing(steps: Table) -> HostSharing:
    sharing = HostSharing(
        steps.number("contention", 0.0),
        steps.number("stages", 0.0),
        steps.number("frontend_s", 0.0),
        steps.whole("cores", 0, least=0),
    )
    if sharing.cores == 1:
        raise steps.wrong("cores", 1, "0, or at least 2: one of them is the fleet's while a message is taken")
    return sharing


def read_engine(engine: Table) -> EngineOptions:
    """Return what the engines of ranks are told. Raises `ConfigError` naming a wrong key."""
    options = EngineOptions(
        engine.whole("block_tokens", 32),
        engine.whole("max_requests", 64),
        engine.whole("max_batch_tokens", 512),
        engine.flag("share_prefixes"),
        engine.text("eviction", "none", among=tuple(SCHEDULERS)),
        engine.number("swap_token_s", 0.0),
    )
    if options.swap_token_s and options.eviction != "swap":
        raise ConfigError(
            f"{engine.name}.swap_token_s is said, but eviction is {options.eviction!r}; say 'swap', or take it away"
        )
    engine.done()
    return options


def _fitted(steps: Table) -> ChunkCost:
    cost = ChunkCost(*(steps.number(name, 0.0) for name in COEFFICIENTS))
    if cost.shared > cost.chunk or not cost.token + cost.chunk > 0:
        raise ConfigError(f"steps: {cost} cannot be: a chunk costs at least what is shared of it, and not nothing")
    return cost


def _memory(memory: Table, options: EngineOptions) -> PlacePages:
    """Return pages of which each is a block in one layer: as many as tokens fit, and weights of layers beside.

    `layer_kv_tokens`: for how many tokens in all layers there would be room where one layer's weights are.
    """
    layers, blocks = memory.whole("layers", 1, most=_MOST_LAYERS), memory.whole("kv_tokens") // options.block_tokens
    layer = memory.whole("layer_kv_tokens", 0, least=0) // options.block_tokens * layers
    memory.done()
    return PlacePages(layers * (layer + blocks), layers * layer, layers, 1, layers, layer)


def _by_sheet(table: Table, options: EngineOptions, folder: Path) -> _RankCost:
    kind = sheet(table.text("device"), option="model.device")
    size = parse_bytes(table.text("memory", str(kind.memory_bytes)), option="model.memory")
    require_memory(kind, size, "model.memory")
    memory = SheetMemory(kind.memory_bytes, size)
    kind, basis = read_rates(table, kind)
    configuration = Configuration(
        table.whole("tp", 1, most=MOST_PARTS), 1, table.text("weights", FULL), table.text("kv", FULL)
    )
    layout = layout_of(read_config(table if "path" in table else table.table("config"), folder))
    load = Load(1, table.whole("most_tokens", MOST_TOKENS, least=2) - 1)
    table.done()
    devices = several(kind, configuration.tp, size)
    estimator = Estimator(layout, devices, load, options.max_batch_tokens, options.block_tokens, 0, planned=True)
    candidate = estimator.candidate(configuration)
    assert candidate.cost is not None
    pages = rank_pages(estimator, configuration, range(len(layout.decoder.layers)), devices[0], options.max_requests)
    cut = _divided(estimator, configuration, candidate.cost)
    if layout.refusal:
        basis += f"; a model for its shapes alone, as the engine refuses it: {layout.refusal}"
    return _RankCost(SheetSteps.of(candidate.cost), pages, basis, cut, memory)


def read_rates(table: Table, kind: DeviceKind) -> tuple[DeviceKind, str]:
    """Return a kind of devices at the rates that are reached of its data sheet's, and where its seconds are from."""
    compute, memory = (table.number(name, 1.0, least=1e-3) for name in ("compute_share", "memory_share"))
    link_bytes_s = 1e9 * table.number("link_gb_s", kind.link_bytes_s / 1e9, least=1e-3)
    reached = replace(kind, flops_s=kind.flops_s * compute, bytes_s=kind.bytes_s * memory, link_bytes_s=link_bytes_s)
    return reached, f"data sheet of {kind.name}, {compute:g} of its operations and {memory:g} of its memory's rate"


def _divided(estimator: Estimator, configuration: Configuration, alone: InstanceCost) -> BatchCost | None:
    """Return what ranks that share layers divide; None for a model whose layers cannot be cut."""
    halves = replace(configuration, tp=SHARES * configuration.tp)
    stages = (range(len(estimator.layout.decoder.layers)),)
    try:
        shared = estimator.instance_cost(halves, stages)
    except ConfigError:
        return None
    return None if shared is None else DividedSteps.of(alone, shared, SHARES)


def read_config(table: Table, folder: Path) -> Any:
    """Return a model's config: that of the directory `path`, or the one written down in the table."""
    if "path" in table:
        return str(folder / table.text("path"))
    from transformers import AutoConfig

    values, name = table.rest(), table.name.removesuffix(".config")
    if "model_type" not in values:
        raise ConfigError(f"{name}.path is missing: name a model's directory, or write its [{table.name}] down")
    with reading(table.name, "write down what its config.json says"):
        return AutoConfig.for_model(values.pop("model_type"), **values)
