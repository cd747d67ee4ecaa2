"""What tests of a wrapped model's weights share."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import elastic
from elastic.memory import copy_engine

PAGE = 4096


def small(nbytes: int, name: str = "cpu") -> elastic.Place:
    """A place with small pages, so that a tiny model has many."""
    return elastic.Place(name, torch.device("cpu"), nbytes, page_bytes=PAGE)


def tight(model: Any, kv_pages: int, **options: Any) -> elastic.Place:
    """A place with room for the model, what is reserved, and some pages for the KV cache."""
    elastic.wrap(model, places=small(64 << 20, "cpu#probe"), **options)
    place = model.elastic.status().places[0]
    elastic.unwrap(model)
    return small(sum(place.owners.values()) + kv_pages * PAGE)


def bits(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_bits(model: Any, before: dict[str, torch.Tensor]) -> None:
    after = model.state_dict()
    assert list(after) == list(before)
    assert [name for name, tensor in before.items() if not torch.equal(after[name], tensor)] == []


def pickled(thing: Any) -> Any:
    """What comes of it by `torch.save` and `torch.load`."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@contextmanager
def written_while_copied(weight: torch.nn.Parameter) -> Iterator[None]:
    """Have somebody write a weight as soon as anything is copied."""
    real = copy_engine.copy

    def copy_then_write(target: torch.Tensor, source: torch.Tensor) -> None:
        real(target, source)
        with torch.no_grad():
            weight.copy_(weight + 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_engine, "copy", copy_then_write)
        yield


def layers(model: Any) -> list[torch.nn.Module]:
    return [model.get_submodule(name) for name in model.elastic.status().residencies]


def modules_of(model: Any, layer: int) -> list[str]:
    """The names of a layer, and of everything in it that has weights of its own in pages."""
    prefix = list(model.elastic.status().residencies)[layer]
    unit = model.elastic.weights.layers[layer]
    inside = {name.rsplit(".", i)[0] for name in unit.slots for i in range(name.count(".") + 1)}
    return [prefix, *(f"{prefix}.{name}" for name in sorted(inside))]
