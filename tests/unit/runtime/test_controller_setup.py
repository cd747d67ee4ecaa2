"""The levels of a policy go from fine to coarse, whichever layers are packed in them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic import ConfigError, Policy
from elastic.controller.policies.precision_steps import LayerSize
from elastic.runtime import controller_setup

SMALL = LayerSize("float32", 100, {"int8": 30})
LARGE = LayerSize("float32", 10_000, {"int8": 2_900, "int4": 1_600})


def levels(monkeypatch: pytest.MonkeyPatch, *sizes: LayerSize) -> tuple[str, ...]:
    weights: Any = SimpleNamespace(layers=sizes)
    order = range(len(sizes))
    monkeypatch.setattr(controller_setup, "_layer_sizes", lambda weights: list(sizes))
    steps = controller_setup._precision(Policy(), None, order, weights)._path
    return tuple(dict.fromkeys(step.after for step in steps))


def test_a_variant_of_small_layers_too_is_no_coarser_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels(monkeypatch, LARGE) == ("int8", "int4")
    assert levels(monkeypatch, SMALL, SMALL, LARGE) == ("int8", "int4")


def layer(**variants: int) -> Any:
    """A layer that is full in the variants that are left out."""
    full = precision(1_000)
    packed = {name: precision(nbytes) for name, nbytes in variants.items()}
    return SimpleNamespace(full=full, with_variant=lambda name: packed.get(name, full))


def precision(nbytes: int) -> Any:
    return SimpleNamespace(layout=SimpleNamespace(parameters={"weight": SimpleNamespace(nbytes=nbytes)}))


def test_levels_between_which_a_layer_stays_full_in_one_are_compared_too() -> None:
    layers = [layer(a=500, b=400, c=100), layer(a=300, c=900)]
    controller_setup._require_falling(("a", "b"), layers)
    with pytest.raises(ConfigError, match="'c' has 1,000 bytes, 'a' before it has 800"):
        controller_setup._require_falling(("a", "b", "c"), layers)
