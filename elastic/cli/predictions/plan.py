"""`elastic plan`: placements of the layers of models, with replicas, and the speed-up that they promise.

Only configs are loaded, unless the speeds are to be measured.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from elastic.cli.views.layer_grid import layers_at
from elastic.cli.views.panels import plain_console
from elastic.cli.views.sizes import mib
from elastic.config import Place
from elastic.errors import ConfigError
from elastic.estimation.model_layout import meta_model
from elastic.estimation.work import chosen_share
from elastic.kvcache.attention_heads import cached_elements
from elastic.memory.places import free_bytes
from elastic.model_files import load_weights
from elastic.planning.assumed_speeds import ExpertShare, assume
from elastic.planning.cost_model import CostModel, cost, speedup
from elastic.planning.local_search import PlannedModel, plan_together
from elastic.planning.measured_cost import MeasuredCostModel, WeightedCost
from elastic.planning.placement import PlaceCapacity, Placement, ResourceDemand
from elastic.quant.variants.eligible import LayerParameters, expert_shapes
from elastic.runtime.layer_benchmark import measure
from elastic.weights.decoder import Decoder, context_length, find_decoder


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, in bytes."""

    layers: tuple[int, ...]
    fixed: int
    """The embedding, head and norms, which are at the first place."""
    kv_token: tuple[int, ...]
    """The KV cache of one token in each layer."""
    hidden: int
    """The hidden state of one token."""
    parameters: int
    """The number of parameters of the largest layer."""
    experts: ExpertShare
    """Those of the largest layer."""


@dataclass(frozen=True)
class PlanRequest:
    """A model to plan for."""

    name: str
    home: Placement
    """The place of each layer without replicas."""
    replica_needs: tuple[ResourceDemand, ...]
    """The bytes of each layer's replica, which has half of the KV rows at most."""
    forwards: Mapping[str, CostModel]
    """The forward passes to predict, by name; placements are chosen by `all`."""


def plan(options: Namespace) -> int:
    """Print the placements, the predicted speed-ups, and the memory of each place.

    Of several models each begins at a place of its own, in the order of both; replicas are planned together.
    """
    places = _places(options)
    budgets = [free_bytes(p.device) if p.budget_bytes is None else p.budget_bytes for p in places]
    capacities = [
        PlaceCapacity(p.name, nbytes, nbytes, margin=options.margin) for p, nbytes in zip(places, budgets, strict=True)
    ]
    models = []
    for number, path in enumerate(options.models):
        first = number % len(places)
        request, capacities = _request(options, path, number, [*places[first:], *places[:first]], capacities)
        models.append(request)
    planned = {m.name: PlannedModel(m.home, m.replica_needs, m.forwards["all"]) for m in models}
    placements = plan_together(planned, capacities, t_up=0.0)
    console = plain_console()
    for model in models:
        if len(models) > 1:
            console.print(Text(model.name))
        console.print(layers_at([p.name for p in places], placements[model.name].layers))
    console.print(_memory_table([(model, placements[model.name]) for model in models], capacities))
    for model in models:
        title = f"predicted, {model.name}" if len(models) > 1 else "predicted"
        console.print(_speed_table(placements[model.name], model.forwards, title))
    kind = "measured here" if options.measure else "assumed; --measure measures them"
    console.print(f"speeds are {kind}; {options.batch} sequences at once; compute is taken to be idle", soft_wrap=True)
    return 0


def _request(
    options: Namespace, path: str, number: int, places: Sequence[Place], capacities: Sequence[PlaceCapacity]
) -> tuple[PlanRequest, list[PlaceCapacity]]:
    """Return a model with its layers at places in this order, and what is free then, in the order of capacities."""
    model = meta_model(path, torch.float32 if places[0].device.type == "cpu" else None)
    decoder = find_decoder(model)
    most, tokens = context_length(decoder.config), options.tokens + options.new_tokens
    if most and tokens > most:
        raise ConfigError(f"--tokens and --new-tokens are {tokens} together; {path} was made for {most}, give fewer")
    sizes = sizes_of(decoder, model)
    kv_bytes = [options.batch * tokens * nbytes for nbytes in sizes.kv_token]
    needs = [ResourceDemand(own, kv_bytes=kv) for own, kv in zip(sizes.layers, kv_bytes, strict=True)]
    replica_needs = [ResourceDemand(own, kv_bytes=-(-kv // 2)) for own, kv in zip(sizes.layers, kv_bytes, strict=True)]
    by_name = {capacity.name: capacity for capacity in capacities}
    home, remaining = spread([by_name[place.name] for place in places], needs, sizes.fixed)
    if options.measure:
        loaded = load_weights(path, places[0].device, option="MODEL")
        decoder = find_decoder(loaded.to(places[0].device))
        measured = measure(decoder, places, (1, options.batch, 8 * options.batch))
        calibrations = [measured, measured]
    else:
        calibrations = [
            assume(places, max(sizes.layers), sizes.parameters, sizes.experts, (tokens, options.batch * tokens))
            for tokens in (1, options.tokens)
        ]
    step = MeasuredCostModel(calibrations[0], options.batch, 1, sizes.hidden)
    prompt = MeasuredCostModel(calibrations[1], options.batch, options.tokens, sizes.hidden)
    whole = WeightedCost(((1.0, prompt), (float(options.new_tokens), step)))
    forwards: dict[str, CostModel] = {f"prompt of {options.tokens}": prompt, "one token more": step, "all": whole}
    by_name |= {capacity.name: capacity for capacity in remaining}
    name = f"{number + 1}: {Path(path).resolve().name}"
    request = PlanRequest(name, home, tuple(replica_needs), forwards)
    return request, [by_name[capacity.name] for capacity in capacities]


def sizes_of(decoder: Decoder, model: Any) -> Sizes:
    """Compute the sizes of a model from shapes alone: it may be on the meta device."""
    layers = tuple(sum(p.nbytes for p in layer.parameters()) for layer in decoder.layers)
    total = sum(p.nbytes for p in model.parameters())  # tied ones once
    config, itemsize = decoder.config, next(iter(decoder.layers[0].parameters())).element_size()
    parameters = max(sum(p.numel() for p in layer.parameters()) for layer in decoder.layers)
    largest = layers.index(max(layers))
    layer = LayerParameters.of(decoder.layers[largest])
    routed = expert_shapes(layer)
    share = sum(layer.parameters[name][1].nbytes for name in routed) / layers[largest]
    experts = ExpertShare(share, chosen_share(config, largest, routed.values()))
    hidden = config.hidden_size * itemsize
    kv_token = tuple(elements * itemsize for elements in cached_elements(config))
    return Sizes(layers, total - sum(layers), kv_token, hidden, parameters, experts)


def spread(
    capacities: Sequence[PlaceCapacity], needs: Sequence[ResourceDemand], fixed: int
) -> tuple[Placement, list[PlaceCapacity]]:
    """Give every layer one place, filling the places in their order; return what is free then, too.

    Raises `ConfigError` if the layers do not fit below the margins.
    """
    free = [capacities[0].having(ResourceDemand(fixed)), *capacities[1:]]
    homes: list[tuple[str]] = []
    place = 0
    for need in needs:
        while place < len(free) and not free[place].fits(need):
            place += 1
        if place == len(free):
            wanted, total = fixed + sum(n.total_bytes for n in needs), sum(c.total_bytes for c in capacities)
            raise ConfigError(
                f"the model needs {wanted:,} bytes with its KV cache; the places have {total:,} less their margins, "
                "and no layer is split: give larger places, a smaller --batch or fewer --tokens"
            )
        free[place] = free[place].having(need)
        homes.append((free[place].name,))
    return Placement(tuple(homes)), free


def _places(options: Namespace) -> list[Place]:
    """Return the places of `--places`. Raises `ConfigError` for them and for other numbers out of range."""
    places = [Place.parse(text) for text in options.places.split(",")]
    if len({place.name for place in places}) < len(places):
        raise ConfigError(f"--places {options.places} names a place twice; write cpu#a=1GiB,cpu#b=1GiB")
    for name in ("batch", "tokens", "new_tokens"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)} must be at least 1")
    if not 0 <= options.margin < 1:
        raise ConfigError(f"--margin {options.margin} must be a share from 0 to below 1")
    return places


def _memory_table(models: Sequence[tuple[PlanRequest, Placement]], capacities: Sequence[PlaceCapacity]) -> Table:
    """Tabulate the bytes of each place, whose capacity counts the models' own layers; replicas come on top."""
    table = Table("place", "budget", "own", "replicas", "free", title="memory, KV cache included")
    for capacity in capacities:
        replicas = sum(
            need.total_bytes
            for model, placement in models
            for need, places in zip(model.replica_needs, placement.layers, strict=True)
            if capacity.name in places[1:]
        )
        used, free = capacity.total_bytes - capacity.free_bytes, capacity.free_bytes - replicas
        table.add_row(capacity.name, *map(mib, (capacity.total_bytes, used, replicas, free)))
    return table


def _speed_table(placement: Placement, forwards: Mapping[str, CostModel], title: str) -> Table:
    """Tabulate predicted seconds of the decoder layers, without and with replicas."""
    table = Table("forward pass", "without replicas, s", "with, s", "speed-up", title=title)
    for name, model in forwards.items():
        seconds = [cost(model, placement.alone_at_home), cost(model, placement)]
        table.add_row(name, *(f"{s:.4g}" for s in seconds), f"{speedup(model, placement):.2f}")
    return table
