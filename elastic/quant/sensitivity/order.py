"""Orders in which the layers of a model are swapped: measured, or by a rule."""

from __future__ import annotations

import random
from collections.abc import Callable

from elastic.errors import ConfigError
from elastic.quant.sensitivity.profile_file import Profile


def contiguous(layers: int) -> tuple[int, ...]:
    """Return an order that grows outward from the middle: at any time the swapped layers are neighbours."""
    middle = (layers - 1) / 2
    return tuple(sorted(range(layers), key=lambda i: (abs(i - middle), i)))


def random_order(layers: int, seed: int) -> tuple[int, ...]:
    """Return a random order, to compare with; the same for the same seed."""
    return tuple(random.Random(seed).sample(range(layers), layers))


RULES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "front_to_back": lambda layers: tuple(range(layers)),
    "last_first": lambda layers: tuple(reversed(range(layers))),
    "contiguous": contiguous,
}


def order(by: str | Profile, layers: int) -> tuple[int, ...]:
    """Return the layers of a model of so many, the first to swap first: by a profile, or by the name of a rule.

    Raises `ConfigError` for an unknown name, and for a profile of another number of layers.
    """
    if isinstance(by, Profile):
        if len(by.order) != layers:
            raise ConfigError(f"the profile orders {len(by.order)} layers, the model has {layers}")
        return by.order
    if by not in RULES:
        raise ConfigError(f"order={by!r} is not known; use a profile, or one of {', '.join(RULES)}")
    return RULES[by](layers)
