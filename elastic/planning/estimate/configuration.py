"""The configurations in which a model could be deployed. (iServe, sections 1 and 3)"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from elastic.errors import ConfigError, require
from elastic.planning.sharding.bounds import is_degree

FULL = "full"
"""The weights as the model has them, or keys and values in the model's dtype."""


@dataclass(frozen=True)
class Configuration:
    """One way to deploy a model on `tp * pp` ranks."""

    tp: int = 1
    """Ranks that share each layer."""
    pp: int = 1
    """Stages, one behind another."""
    weights: str = FULL
    """The variant of all decoder layers, such as "int4" or "2:4"."""
    kv: str = FULL
    """The form of keys and values."""

    def __post_init__(self) -> None:
        if not is_degree(self.tp) or self.pp < 1:
            raise ConfigError(f"tp={self.tp}, pp={self.pp} cannot be; tp is a power of two, pp at least 1")

    @property
    def ranks(self) -> int:
        """Devices that it takes."""
        return self.tp * self.pp

    @property
    def compressed(self) -> tuple[str, ...]:
        """What is not as the model has it, such as `int4` and `KV int8`."""
        forms = (self.weights, self.weights), (self.kv, f"KV {self.kv}")
        return tuple(name for form, name in forms if form != FULL)

    @property
    def form(self) -> str:
        """The form of weights, keys and values, on which the seconds of a layer depend."""
        return form_of(self.weights, self.kv)

    def __str__(self) -> str:
        """Return such as `TP2 PP1 int4`; keys and values are named where they have a form of their own."""
        return f"TP{self.tp} PP{self.pp} {self.form}"


def named_forms(names: str | Iterable[str], option: str) -> tuple[str, ...]:
    """Return the names of forms, of which one can stand alone.

    Raises `ConfigError` for none, for no names, and for one that is there twice.
    """
    listed = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, Iterable) else ()
    words = all(isinstance(name, str) for name in listed)
    unlike = words and bool(listed) and len(set(listed)) == len(listed)
    require(unlike, option, names, "a name of a form, such as 'int8', or several unlike ones")
    return listed


def form_of(weights: str, kv: str) -> str:
    """Return such as `int4`, or `int4 KV int8` where keys and values have a form of their own."""
    return weights if kv == FULL else f"{weights} KV {kv}"


def split_form(form: str) -> tuple[str, str]:
    """Return the form of the weights, and that of keys and values."""
    weights, _, kv = form.partition(" KV ")
    return weights, kv or FULL


def forms_of(weights: Sequence[str], kv: Sequence[str]) -> tuple[str, ...]:
    """Return each form of weights with each form of keys and values."""
    return tuple(form_of(*each) for each in itertools.product(weights, kv))


def configurations(
    devices: int, layers: int, weights: Sequence[str] = (FULL,), kv: Sequence[str] = (FULL,)
) -> Iterator[Configuration]:
    """Yield all configurations on up to so many devices, the fewest ranks first.

    Eight devices have 15 pairs of degrees, as in the paper; no stage is without a layer. Raises `ConfigError` for no
    device.
    """
    if devices < 1:
        raise ConfigError(f"devices={devices}: an estimate needs at least one")
    degrees = [1 << power for power in range(devices.bit_length())]
    pairs = [(tp, pp) for tp in degrees for pp in range(1, min(devices // tp, layers) + 1)]
    for tp, pp in sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[0])):
        for variant, form in itertools.product(weights, kv):
            yield Configuration(tp, pp, variant, form)
