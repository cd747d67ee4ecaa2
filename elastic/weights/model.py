"""The weights of a model's decoder layers: units by layer, and questions about them."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from elastic.errors import ConfigError, StateError, require
from elastic.memory.backends.rank_memory import Peers
from elastic.memory.rate_limit import YieldingPace
from elastic.planning.sharding.cut_plan import CutPlan
from elastic.types import DROPPED, Action, Drop, Fetch, RankMemory, Residency, ResizeKV, Restore, Swap, WeightsSource
from elastic.weights.layer import Absence, WeightUnit, combined
from elastic.weights.parameter_slot import ParameterSlot, is_under
from elastic.weights.shards.part_views import Views
from elastic.weights.streaming import WeightStreamer

ABSENT = "absent"


class ModelWeights:
    """Decoder layers by index, and the prefetch buffers of each place.

    The weights of a layer are a unit of their own place; modules of it that are elsewhere are units beside it.
    """

    def __init__(self, layers: list[WeightUnit], streamers: Mapping[str, WeightStreamer]) -> None:
        self.layers = layers
        """Of each layer the unit that the hooks see to: with the modules that are at the layer's own place."""
        self.shards = max((layer.layer.cut.plan.parts for layer in layers if layer.layer.cut), default=1)
        """The number of parts of each layer. Part p of layer l is shard `l * shards + p`."""
        self.initially_resident: tuple[int, ...] = ()
        """The layers that were resident when the model was wrapped."""
        self.streamers = dict(streamers)
        self.replicas: dict[int, tuple[WeightUnit, ...]] = {}
        """Copies of layers at other places."""
        self.kept_full: frozenset[int] = frozenset()
        """Layers that are computed in parts, together with other ranks: of their full weights."""
        self.peers: Peers | None = None
        """The ranks that weights are fetched from, and that read those here; None: processes of this host alone."""
        self.pace: YieldingPace | None = None
        """Of fetches that let what computes go first."""
        self._elsewhere: dict[int, tuple[WeightUnit, ...]] = {}
        self._homes = [(m._parameters, name, s) for w in layers for s in w.slots.values() for m, name in s.homes]
        self._content = _Content([], -1)

    def units(self, layer: int) -> tuple[WeightUnit, ...]:
        """Return all units of a layer, its own first."""
        return (self.layers[layer], *self._elsewhere.get(layer, ()))

    def units_of(self, layers: Iterable[int]) -> list[WeightUnit]:
        """Return the units of the layers of these indices. Raises `ConfigError`."""
        return [unit for index in self.layer_indices(layers) for unit in self.units(index)]

    def set_units(self, layer: int, units: Sequence[WeightUnit]) -> None:
        """Have a layer consist of these units, its own first. At a safe point."""
        self.layers[layer], self._elsewhere[layer] = units[0], tuple(units[1:])

    def slots(self, layer: int) -> dict[str, ParameterSlot]:
        """Return all parameters of a layer that lie in pages, by their names in it."""
        return {name: slot for unit in self.units(layer) for name, slot in unit.slots.items()}

    def streamer(self, unit: WeightUnit) -> WeightStreamer:
        """Return the prefetch buffers of a unit's place."""
        return self.streamers[unit.pool.name]

    def require_intact(self, commits: int) -> None:
        """Raise `StateError` if others replaced parameters; `commits` safe points have passed, where we do."""
        if self._content.commits != commits:
            self._content = _Content(self._homes, commits)
        if self._content.present():
            return
        changed = [w.name for w in self.layers if not all(s.intact() for s in self.slots(w.index).values())]
        raise StateError(
            f"the weights of {', '.join(changed)} were replaced outside Elastic (a cast, a move, "
            "load_state_dict(assign=True), or another library); call elastic.unwrap(model) and wrap it again"
        )

    def require_alone(self, layer: int) -> None:
        """Raise `StateError` for a layer with replicas, which would not follow what is done to it."""
        places = [unit.pool.name for unit in self.replicas.get(layer, ())]
        if places:
            name = self.layers[layer].name
            raise StateError(f"{name} has a replica at {places[0]}; evict it first: rt.evict({layer}, {places[0]!r})")

    def require_not_in_parts(self, layer: int) -> None:
        """Raise `StateError` for a layer of which ranks compute parts: its full weights have to stay where they are."""
        if layer in self.kept_full:
            raise StateError(
                f"{self.layers[layer].name} is computed in parts with other ranks, of its full weights; have them part "
                "first: fleet.reshard(names, tp=1)"
            )

    @property
    def dropped(self) -> tuple[int, ...]:
        """The layers whose weights, or some parts of them, are nowhere in this process."""
        return tuple(layer.index for layer in self.layers if layer.absent is Absence.DROPPED)

    @property
    def dropped_shards(self) -> tuple[int, ...]:
        """The shards whose weights are nowhere in this process."""
        dropped, shards = (self.layers[index] for index in self.dropped), self.shards
        return tuple(unit.index * shards + part for unit in dropped for part in sorted(unit.every - unit.shards_here))

    # -- the parts that layers are cut into

    def cut_plan(self, layer: int) -> CutPlan | None:
        """Return how a layer is cut; None: it is one part."""
        cut = self.layers[layer].layer.cut
        return None if cut is None else cut.plan

    def part_tensors(self, layer: int, parts: tuple[int, ...]) -> Views:
        """Return the tensors of some parts of a layer, for each parameter of its cut plan.

        Those of a parameter, one after another along the dimension that is cut, are what the parts have of it, of each
        fused matrix in turn; parts that lie side by side are one tensor. They are made once, so ask again rather than
        keep them: pages of what is kept do not come free. Raises `StateError` for a part that is not here in full.
        """
        return self.layers[layer].part_tensors(parts)

    def streamed(self, place: str) -> int:
        """Count the layers of a place that are in host memory: they are streamed when they are called."""
        return sum(layer.absent is Absence.HOST for layer in self.layers if layer.pool.name == place)

    def digests(self, layers: Sequence[int]) -> dict[int, int]:
        """Return a checksum of the full weights of each layer; it is computed once, unless somebody writes them."""
        return {
            layer: combined({name: value for unit in self.units(layer) for name, value in unit.measure().items()})
            for layer in layers
        }

    def shard_digests(self, shards: Sequence[int]) -> dict[int, int]:
        """Return a checksum of the full weights of each shard, with what its layer's shards have in common."""
        return {
            shard: self.layers[layer].part_digest(part)
            for layer, parts in self.parts_by_layer(shards).items()
            for shard, part in ((layer * self.shards + part, part) for part in sorted(parts))
        }

    def parts_by_layer(self, shards: Iterable[int]) -> dict[int, frozenset[int]]:
        """Group shards by their layer: the parts of it, from 0. Raises `ConfigError` naming one that is none."""
        by_layer: dict[int, set[int]] = {}
        count, of = len(self.layers) * self.shards, self.shards
        for shard in shards:
            if not isinstance(shard, int) or isinstance(shard, bool) or not 0 <= shard < count:
                raise ConfigError(
                    f"shard {shard!r} is none of this model; they are 0 to {count - 1}, {of} of each layer"
                )
            by_layer.setdefault(shard // of, set()).add(shard % of)
        return {layer: frozenset(parts) for layer, parts in by_layer.items()}

    def normalized(self, action: Action) -> Action:
        """Return an action with its layers by index: those of shards need not be said. Raises `ConfigError`."""
        if isinstance(action, ResizeKV) or not isinstance(action, Action):
            return action  # who does actions says which there are
        if isinstance(action, Swap):
            require(isinstance(action.variant, str), "variant", action.variant, "the name of one")
        said = tuple(map(self._index, _each(action.layers)))
        if isinstance(action, Drop | Fetch | Restore) and action.shards:
            layers = tuple(self.parts_by_layer(action.shards))
            if said and set(said) != set(layers):
                raise ConfigError(f"layers={said} are not those of shards={action.shards}; give one of the two")
            said = layers
        return action if said == action.layers else replace(action, layers=said)

    def source(self, parts: Mapping[int, frozenset[int] | None]) -> WeightsSource:
        """Say where other processes find the full weights of layers, of which these parts must be here; None: all.

        Raises `StateError` for layers that have none at their place, or at several, for prepacked ones, and for the
        memory of a GPU that no rank serves.
        """
        layers = tuple(parts)
        units = self.units_of(layers)
        self.require_plain_order(layers)
        pages = tuple(unit.pages_of_full(parts[unit.index]) for unit in units)
        pools = {unit.pool for unit in units}
        if len(pools) != 1:
            raise StateError(f"layers {tuple(layers)} are at {len(pools)} places; ask for those of one place")
        pool = pools.pop()
        file = pool.backend.shared_file()
        if file is None and self.peers is None:
            raise StateError(f"the memory of {pool.name} is in no file that another process could read")
        served = None if self.peers is None else RankMemory(self.peers.name, pool.name)
        return WeightsSource(file, pool.page_bytes, pages, served)

    def require_plain_order(self, layers: Sequence[int]) -> None:
        """Raise `StateError` for layers whose matrices are prepacked: other processes would read them as plain ones."""
        for unit in self.units_of(tuple(layers)):
            if any(slot.prepacked for slot in unit.slots.values()):
                raise StateError(f"{unit.name} is prepacked, which others cannot read; wrap its model without prepack")

    def let_go(self) -> None:
        """Hold no parameter of the model any more: it is gone."""
        self._homes, self._content = [], _Content([], -1)
        for layer in range(len(self.layers)):
            for unit in self.units(layer):
                unit.slots = {}

    def residencies(self) -> dict[str, tuple[Residency, ...]]:
        """Return where each layer exists, by name: its units, then its replicas."""
        return {
            layer.name: tuple(map(_residency, (*self.units(layer.index), *self.replicas.get(layer.index, ()))))
            for layer in self.layers
        }

    def form(self) -> tuple[str, ...]:
        """Return the variant of each layer; `absent` for one in host memory, `dropped` for one that is nowhere."""
        forms = []
        for layer in self.layers:
            if not layer.absent:
                forms.append("+".join(dict.fromkeys(unit.variant for unit in self.units(layer.index))))
            elif layer.shards_here:
                forms.append(f"{layer.dtype}[{_shards_in_words(layer)}]")
            else:
                forms.append(DROPPED if layer.absent is Absence.DROPPED else ABSENT)
        return tuple(forms)

    def layer_indices(self, layers: int | str | Iterable[int | str]) -> tuple[int, ...]:
        """Return indices of decoder layers from indices (negative ones count from the end) or module names.

        Raises `ConfigError` naming the one that is no such layer.
        """
        return tuple(dict.fromkeys(map(self._index, _each(layers))))

    def find_parts(self, modules: int | str | Iterable[int | str]) -> dict[tuple[str, ...], tuple[int, ...]]:
        """Group layers by the parts of them that are meant: `()` for whole layers, else names inside the layer.

        `modules` are indices or names of decoder layers, or names of modules or parameters inside one. Raises
        `ConfigError` naming the one that is neither.
        """
        parts: dict[int, set[str]] = {}
        for module in _each(modules):
            layer, part = self._locate(module)
            parts.setdefault(layer, set()).add(part)
        layers: dict[tuple[str, ...], tuple[int, ...]] = {}
        for index, names in parts.items():
            key = () if "" in names else tuple(sorted(names))
            layers[key] = (*layers.get(key, ()), index)
        return layers

    def parameters_under(self, layer: int, parts: Collection[str]) -> set[str]:
        """Return the parameters of a layer that lie in pages and under these names inside it; for none, all.

        Raises `ConfigError` for a name that none lies under.
        """
        names = set(self.slots(layer))
        for part in parts:
            if not any(is_under(name, (part,)) for name in names):
                raise ConfigError(f"{self.layers[layer].name} has no weights of its own under {part!r}")
        return {name for name in names if is_under(name, parts)} if parts else names

    def _locate(self, module: int | str) -> tuple[int, str]:
        """Return the layer, and the name inside it."""
        for layer in self.layers:
            if isinstance(module, str) and module.startswith(layer.name + "."):
                part = module.removeprefix(layer.name + ".")
                try:
                    self.parameters_under(layer.index, (part,))
                except ConfigError as error:
                    raise ConfigError(f"{module!r}: {error}") from None
                return layer.index, part
        return self._index(module), ""

    def _index(self, layer: int | str) -> int:
        count = len(self.layers)
        with suppress(TypeError):  # it is no integer, of Python's or of a library's
            if not isinstance(layer, bool) and -count <= (index := operator.index(layer)) < count:  # type: ignore[arg-type]
                return index % count
        for unit in self.layers:
            if isinstance(layer, str) and unit.name == layer:
                return unit.index
        raise ConfigError(
            f"layer {layer!r} is no decoder layer of this model; use 0 to {count - 1} or a name such as "
            f"{self.layers[0].name!r}"
        )


def _each(layers: int | str | Iterable[int | str]) -> tuple[int | str, ...]:
    """Return what was named, one or several."""
    if isinstance(layers, str):
        return (layers,)
    try:
        return tuple(layers)  # type: ignore[arg-type]
    except TypeError:
        return (layers,)  # type: ignore[return-value]


class _Content:
    """What is in all slots of a model between two commits: each forward pass looks for what others replaced."""

    def __init__(self, homes: Sequence[tuple[dict[str, Any], str, ParameterSlot]], commits: int) -> None:
        self.commits = commits
        """The safe points that had passed."""
        self._owners, self._names = [owner for owner, _, _ in homes], [name for _, name, _ in homes]
        self._parameters = [slot.parameter for _, _, slot in homes]
        plain = {id(slot): slot for _, _, slot in homes if slot.address is not None}.values()
        self._plain, self._addresses = [slot.parameter for slot in plain], [slot.address for slot in plain]

    def present(self) -> bool:
        """Return whether all modules have these parameters, with their bytes."""
        held = map(dict.get, self._owners, self._names)
        return (
            all(map(operator.is_, held, self._parameters))
            and list(map(torch.Tensor.data_ptr, self._plain)) == self._addresses
        )


def _residency(unit: WeightUnit) -> Residency:
    if not unit.absent or not unit.shards_here:
        return Residency(unit.absent.value if unit.absent else unit.pool.name, unit.variant, part=unit.part)
    return Residency(unit.pool.name, unit.variant, shard=_shards_in_words(unit))


def _shards_in_words(unit: WeightUnit) -> str:
    """Say which parts of a layer are here, such as `0,1/4`."""
    return f"{','.join(map(str, sorted(unit.shards_here)))}/{len(unit.every)}"
