"""`elastic plan`: where the layers of models could be, with which replicas, and what that gains. Nothing is loaded but
their configs, unless it is asked to measure."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from elastic.cli.inputs.model_files import read_config, reading
from elastic.cli.inputs.model_loading import load_model
from elastic.cli.views.layer_grid import layers_at
from elastic.cli.views.panels import mib
from elastic.config import Place
from elastic.errors import ConfigError
from elastic.memory.places import free_bytes
from elastic.planning.assumed_speeds import assume
from elastic.planning.cost_model import CostModel, cost, speedup
from elastic.planning.local_search import PlannedModel, plan_together
from elastic.planning.measured_cost import Calibration, MeasuredCostModel, WeightedCost
from elastic.planning.placement import PlaceCapacity, Placement, ResourceDemand
from elastic.runtime.layer_benchmark import measure
from elastic.weights.decoder import Decoder, find_decoder


@dataclass(frozen=True)
class Sizes:
    """Of a model, in bytes."""

    layers: tuple[int, ...]
    fixed: int
    """Embedding, head, norms: at the first place."""
    kv_token: int
    """KV cache of one token in one layer."""
    hidden: int
    """Hidden state of one token."""
    parameters: int
    """Of the largest layer, how many."""


@dataclass(frozen=True)
class PlanRequest:
    """One of the models that are planned."""

    name: str
    home: Placement
    needs: tuple[ResourceDemand, ...]
    forwards: dict[str, CostModel]
    """What is predicted, by name; `all` is what placements are chosen by."""

    @property
    def instance(self) -> PlannedModel:
        return PlannedModel(self.home, tuple(map(_half_kv, self.needs)), self.forwards["all"])


def plan(options: Namespace) -> int:
    """Print the placements, the predicted speed-ups, and the memory of each place.

    Of several models each begins at a place of its own, in the order of both; replicas are planned together.
    """
    places = _places(options)
    rooms = [PlaceCapacity(p.name, _budget(p), _budget(p), margin=options.margin) for p in places]
    models = []
    for number, path in enumerate(options.models):
        first = number % len(places)
        one, rooms = _asked(options, path, number, [*places[first:], *places[:first]], rooms)
        models.append(one)
    found = plan_together({one.name: one.instance for one in models}, rooms, t_up=0.0)
    console = Console()
    for one in models:
        if len(models) > 1:
            console.print(Text(one.name))
        console.print(layers_at([p.name for p in places], found[one.name].layers))
    console.print(_memory([(one, found[one.name]) for one in models], rooms))
    for one in models:
        console.print(_speed(found[one.name], one.forwards, one.name if len(models) > 1 else ""))
    kind = "measured here" if options.measure else "assumed; --measure measures them"
    console.print(f"speeds are {kind}; {options.batch} sequences at once; compute is taken to be idle", soft_wrap=True)
    return 0


def _asked(
    options: Namespace, path: str, number: int, places: Sequence[Place], rooms: Sequence[PlaceCapacity]
) -> tuple[PlanRequest, list[PlaceCapacity]]:
    """A model with its layers at places in this order, and the rooms that are left then, in their own order."""
    model = _meta_model(path, places)
    sizes = sizes_of(find_decoder(model), model)
    calibration = _calibration(options, path, places, sizes)
    needs = [
        ResourceDemand(nbytes, kv_bytes=options.batch * _tokens(options) * sizes.kv_token) for nbytes in sizes.layers
    ]
    known = {room.name: room for room in rooms}
    home, left = spread([known[place.name] for place in places], needs, sizes.fixed)
    step = MeasuredCostModel(calibration, options.batch, 1, sizes.hidden)
    prompt = MeasuredCostModel(calibration, options.batch, options.tokens, sizes.hidden)
    whole = WeightedCost((1.0, prompt), (float(options.new_tokens), step))
    forwards: dict[str, CostModel] = {f"prompt of {options.tokens}": prompt, "one token more": step, "all": whole}
    known |= {room.name: room for room in left}
    name = f"{number + 1}: {Path(path).resolve().name}"
    return PlanRequest(name, home, tuple(needs), forwards), [known[room.name] for room in rooms]


def _half_kv(need: ResourceDemand) -> ResourceDemand:
    """Of a replica, which has half of the rows at most."""
    return ResourceDemand(need.nbytes, kv_bytes=-(-need.kv_bytes // 2))


def sizes_of(decoder: Decoder, model: Any) -> Sizes:
    """From shapes alone: the model may be on the meta device."""
    layers = tuple(sum(p.nbytes for p in layer.parameters()) for layer in decoder.layers)
    total = sum(p.nbytes for p in model.parameters())  # tied ones once
    config, itemsize = decoder.config, next(iter(decoder.layers[0].parameters())).element_size()
    heads = getattr(config, "num_attention_heads", None) or 1
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    parameters = max(sum(p.numel() for p in layer.parameters()) for layer in decoder.layers)
    hidden = config.hidden_size * itemsize
    return Sizes(layers, total - sum(layers), 2 * kv_heads * head_dim * itemsize, hidden, parameters)


def spread(
    rooms: Sequence[PlaceCapacity], needs: Sequence[ResourceDemand], fixed: int
) -> tuple[Placement, list[PlaceCapacity]]:
    """Every layer at a place of its own, in their order, and the rooms that are left.

    Raises `ConfigError` if they do not fit below the margins.
    """
    left = [room.having(ResourceDemand(fixed)) if i == 0 else room for i, room in enumerate(rooms)]
    homes: list[tuple[str]] = []
    here = 0
    for need in needs:
        while here < len(left) and not left[here].fits(need):
            here += 1
        if here == len(left):
            wanted, have = fixed + sum(need.total_bytes for need in needs), sum(room.total_bytes for room in rooms)
            raise ConfigError(
                f"the model needs {wanted:,} bytes with its KV cache; the places have {have:,} less their margins, and "
                "no layer is split: give larger places, a smaller --batch or fewer --tokens"
            )
        left[here] = left[here].having(need)
        homes.append((left[here].name,))
    return Placement(tuple(homes)), left


def _places(options: Namespace) -> list[Place]:
    places = [Place.parse(text) for text in options.places.split(",")]
    if len({place.name for place in places}) < len(places):
        raise ConfigError(f"--places {options.places} names a place twice; write cpu#a=1GiB,cpu#b=1GiB")
    for name in ("batch", "tokens", "new_tokens"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)} must be at least 1")
    if not 0 <= options.margin < 1:
        raise ConfigError(f"--margin {options.margin} must be a share from 0 to below 1")
    return places


def _budget(place: Place) -> int:
    return place.budget_bytes if place.budget_bytes is not None else free_bytes(place.device)


def _tokens(options: Namespace) -> int:
    return int(options.tokens + options.new_tokens)


def _meta_model(path: str, places: Sequence[Place]) -> Any:
    """The model without memory, in the dtype that it would be loaded in."""
    from transformers import AutoModelForCausalLM

    config = read_config(path, option="MODEL")
    on_cpu = places[0].device.type == "cpu"
    dtype = torch.float32 if on_cpu else getattr(config, "dtype", None) or torch.bfloat16
    with torch.device("meta"), reading(f"MODEL {path}", "see that its config.json is whole"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _calibration(options: Namespace, path: str, places: Sequence[Place], sizes: Sizes) -> Calibration:
    if not options.measure:
        return assume(places, max(sizes.layers), sizes.parameters)
    model, _ = load_model(path, places[0].device, option="MODEL")
    return measure(find_decoder(model.to(places[0].device)), places, (1, options.batch, 8 * options.batch))


def _memory(found: Sequence[tuple[PlanRequest, Placement]], left: Sequence[PlaceCapacity]) -> Table:
    """What each place has; `left` is what own layers leave, replicas come on top."""
    table = Table("place", "budget", "own", "replicas", "free", title="memory, KV cache included")
    for room in left:
        own = room.total_bytes - room.free_bytes
        more = sum(
            _half_kv(need).total_bytes
            for one, placement in found
            for need, places in zip(one.needs, placement.layers, strict=True)
            if room.name in places[1:]
        )
        table.add_row(room.name, *map(mib, (room.total_bytes, own, more, room.free_bytes - more)))
    return table


def _speed(found: Placement, models: dict[str, CostModel], of: str) -> Table:
    """Predicted seconds of the decoder layers, without and with replicas."""
    title = f"predicted, {of}" if of else "predicted"
    table = Table("forward pass", "without replicas, s", "with, s", "speed-up", title=title)
    for name, model in models.items():
        seconds = [cost(model, found.alone_at_home), cost(model, found)]
        table.add_row(name, *(f"{s:.4g}" for s in seconds), f"{speedup(model, found):.2f}")
    return table
