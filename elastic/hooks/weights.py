"""The weights of a model's decoder layers, as its hooks and its actions see them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from elastic.errors import ConfigError, StateError
from elastic.hooks.layer import LayerWeights
from elastic.hooks.streaming import Streamer
from elastic.types import HOST, Residency

ABSENT = "absent"


class ModelWeights:
    """Decoder layers by index, and the stages of each place."""

    def __init__(self, layers: Sequence[LayerWeights], streamers: Mapping[str, Streamer]) -> None:
        self.layers = tuple(layers)
        self.at_home = tuple(layer.index for layer in layers if not layer.absent)
        """The layers that were resident when the model was wrapped."""
        self.streamers = dict(streamers)
        self._homes = [(m._parameters, name, s) for w in layers for s in w.slots.values() for m, name in s.homes]

    def streamer(self, layer: LayerWeights) -> Streamer:
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
        for weights in self.layers:
            weights.slots = {}

    def residencies(self) -> dict[str, tuple[Residency, ...]]:
        """Where each layer exists."""
        return {w.name: (Residency(HOST if w.absent else w.pool.name, w.variant),) for w in self.layers}

    def form(self) -> tuple[str, ...]:
        """The variant of each layer; `absent` for one that is not at its place."""
        return tuple(ABSENT if w.absent else w.variant for w in self.layers)

    def find(self, layers: int | str | Iterable[int | str]) -> tuple[int, ...]:
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
                if not weights.has_part(part):
                    raise ConfigError(f"{module!r}: {weights.name} has no weights of its own under {part!r}")
                return weights.index, part
        return self._index(module), ""

    def at(self, layers: Iterable[int]) -> list[LayerWeights]:
        """The layers of these indices. Raises `ConfigError`."""
        return [self.layers[index] for index in self.find(layers)]

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
        changed = [weights.name for weights in self.layers if not weights.intact()]
        raise StateError(
            f"the weights of {', '.join(changed)} were replaced outside Elastic (a cast, a move, "
            "load_state_dict(assign=True), or another library); call elastic.unwrap(model) and wrap it again"
        )
