"""The weights of a model's decoder layers, as its hooks and its actions see them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from elastic.errors import ConfigError, StateError
from elastic.types import HOST, Residency
from elastic.weights.layer import WeightUnit
from elastic.weights.parameter_slot import ParameterSlot
from elastic.weights.streaming import WeightStreamer

ABSENT = "absent"


class ModelWeights:
    """Decoder layers by index, and the stages of each place.

    The weights of a layer are a unit of their own place; modules of it that are elsewhere are units beside it.
    """

    def __init__(self, layers: list[WeightUnit], streamers: Mapping[str, WeightStreamer]) -> None:
        self.layers = layers
        """Of each layer the unit that the hooks see to: with the modules that are at the layer's own place."""
        self.initially_resident: tuple[int, ...] = ()
        """The layers that were resident when the model was wrapped."""
        self.streamers = dict(streamers)
        self.replicas: dict[int, tuple[WeightUnit, ...]] = {}
        """Copies of layers at other places."""
        self._elsewhere: dict[int, tuple[WeightUnit, ...]] = {}
        for layer in layers:
            self.set_units(layer.index, (layer,))
        self._homes = [(m._parameters, name, s) for w in layers for s in w.slots.values() for m, name in s.homes]

    def units(self, layer: int) -> tuple[WeightUnit, ...]:
        """All that a layer consists of, its own unit first."""
        return (self.layers[layer], *self._elsewhere.get(layer, ()))

    def slots(self, layer: int) -> dict[str, ParameterSlot]:
        """All parameters of a layer that lie in pages, by their names in it."""
        return {name: slot for unit in self.units(layer) for name, slot in unit.slots.items()}

    def set_units(self, layer: int, units: Sequence[WeightUnit]) -> None:
        """A layer consists of these units from now on."""
        self.layers[layer], self._elsewhere[layer] = units[0], tuple(units[1:])
        for unit in units:
            unit.on_written = partial(self.streamer(unit).forget, unit)

    def streamer(self, layer: WeightUnit) -> WeightStreamer:
        """The stages of the place where a layer belongs."""
        return self.streamers[layer.pool.name]

    def begin_forward(self) -> None:
        """An outermost forward pass of this thread begins. Raises `StateError` if others replaced weights."""
        for streamer in self.streamers.values():
            streamer.leave_all()
        for parameters, name, slot in self._homes:
            parameter, address = slot.parameter, slot.address
            if parameters.get(name) is not parameter or (address is not None and parameter.data_ptr() != address):
                self._refuse()

    def let_go(self) -> None:
        """Hold no parameter of the model any more: it is gone."""
        self._homes = []
        for layer in range(len(self.layers)):
            for unit in self.units(layer):
                unit.slots = {}

    def residencies(self) -> dict[str, tuple[Residency, ...]]:
        """Where each layer exists."""
        return {
            layer.name: tuple(map(_residency, (*self.units(layer.index), *self.replicas.get(layer.index, ()))))
            for layer in self.layers
        }

    def require_alone(self, layer: int) -> None:
        """Raises `StateError` for a layer with replicas, which would not follow what is done to it."""
        places = [unit.pool.name for unit in self.replicas.get(layer, ())]
        if places:
            name = self.layers[layer].name
            raise StateError(f"{name} has a replica at {places[0]}; evict it first: rt.evict({layer}, {places[0]!r})")

    def form(self) -> tuple[str, ...]:
        """The variant of each layer; `absent` for one that is not at its place."""
        return tuple(map(self._form_of, range(len(self.layers))))

    def _form_of(self, layer: int) -> str:
        if self.layers[layer].absent:
            return ABSENT
        return "+".join(dict.fromkeys(unit.variant for unit in self.units(layer)))

    def layer_indices(self, layers: int | str | Iterable[int | str]) -> tuple[int, ...]:
        """Indices of decoder layers from indices (negative ones count from the end) or module names.

        Raises `ConfigError` naming the one that is no such layer.
        """
        if isinstance(layers, int | str):
            layers = (layers,)
        return tuple(dict.fromkeys(self._index(layer) for layer in layers))

    def find_parts(self, modules: int | str | Iterable[int | str]) -> dict[tuple[str, ...], tuple[int, ...]]:
        """Layers by the parts of them that are meant: `()` for whole layers, else names inside the layer.

        `modules` are indices or names of decoder layers, or names of modules or parameters inside one. Raises
        `ConfigError` naming the one that is neither.
        """
        if isinstance(modules, int | str):
            modules = (modules,)
        parts: dict[int, set[str]] = {}
        for module in modules:
            layer, part = self._locate(module)
            parts.setdefault(layer, set()).add(part)
        found: dict[tuple[str, ...], list[int]] = {}
        for index, names in parts.items():
            found.setdefault(() if "" in names else tuple(sorted(names)), []).append(index)
        return {names: tuple(indices) for names, indices in found.items()}

    def _locate(self, module: int | str) -> tuple[int, str]:
        """The layer, and the name inside it."""
        for weights in self.layers:
            if isinstance(module, str) and module.startswith(weights.name + "."):
                part = module.removeprefix(weights.name + ".")
                if not self.has_part(weights.index, part):
                    raise ConfigError(f"{module!r}: {weights.name} has no weights of its own under {part!r}")
                return weights.index, part
        return self._index(module), ""

    def units_of(self, layers: Iterable[int]) -> list[WeightUnit]:
        """The units of the layers of these indices. Raises `ConfigError`."""
        return [unit for index in self.layer_indices(layers) for unit in self.units(index)]

    def has_part(self, layer: int, part: str) -> bool:
        """Whether a layer has weights of its own under this name."""
        return any(unit.has_part(part) for unit in self.units(layer))

    def _index(self, layer: int | str) -> int:
        count = len(self.layers)
        if isinstance(layer, int) and not isinstance(layer, bool) and -count <= layer < count:
            return layer % count
        for weights in self.layers:
            if weights.name == layer:
                return weights.index
        raise ConfigError(
            f"layer {layer!r} is no decoder layer of this model; use 0 to {count - 1} or a name such as "
            f"{self.layers[0].name!r}"
        )

    def _refuse(self) -> None:
        changed = [w.name for w in self.layers if not all(unit.intact() for unit in self.units(w.index))]
        raise StateError(
            f"the weights of {', '.join(changed)} were replaced outside Elastic (a cast, a move, "
            "load_state_dict(assign=True), or another library); call elastic.unwrap(model) and wrap it again"
        )


def _residency(unit: WeightUnit) -> Residency:
    return Residency(HOST if unit.absent else unit.pool.name, unit.variant, part=unit.part)
