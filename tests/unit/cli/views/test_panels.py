"""What the terminal shows of the ledger: each number is what its name says, and together they are the budget."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from elastic.cli.views.panels import bytes_by_owner
from support.architectures import build
from support.lossless_variant import HALF
from support.wrapped_model import small, tight


def shown(model: Any) -> dict[str, int]:
    """The rows of the only place, which must add up."""
    status = model.elastic.status()
    rows = bytes_by_owner(status.places[0], status.kv[0])
    assert min(rows.values()) >= 0, rows
    assert sum(rows.values()) == status.places[0].budget_bytes
    return rows


@pytest.mark.parametrize("kv_pages", [12, 20, 40])
def test_the_rows_add_up_and_none_is_below_zero_while_layers_come_and_go(kv_pages: int, wrapped: Any) -> None:
    model = build("llama-gqa")
    wrapped(model, tight(model, kv_pages, variants=[HALF]), variants=[HALF])
    rt = model.elastic
    staged = shown(model)["staging"]
    assert staged > 0
    actions = [
        lambda: rt.swap([0, 1], "half"),
        lambda: rt.swap([2], "half"),
        lambda: rt.restore([0]),
        lambda: rt.release([1]),
        lambda: model(torch.full((1, 8), 5)),
        rt.restore,
        rt.kv.trim,
    ]
    for first, second in itertools.product(actions, actions):
        for act in (first, second):
            act()
            shown(model)
    rt.restore()
    assert shown(model)["staging"] == staged


def test_pages_of_a_swapped_layer_that_staging_keeps_are_not_shown_as_free(wrapped: Any) -> None:
    model = build("llama-gqa")
    wrapped(model, tight(model, 4, variants=[HALF]), variants=[HALF])
    model.elastic.kv.trim()
    model.elastic.swap([0, 1, 2], "half")
    place = model.elastic.status().places[0]
    assert place.idle_bytes + place.parked_bytes <= place.free_bytes
    model.elastic.check()


def test_the_cache_of_another_model_at_the_same_place_is_shown_as_such(wrapped: Any) -> None:
    one, other = build("llama-gqa"), build("llama-gqa")
    for model in (one, other):
        wrapped(model, small(16 << 20))
    cache = other(torch.full((1, 8), 5)).past_key_values
    assert shown(one)["KV of others"] == other.elastic.kv.used_bytes > 0
    assert shown(other)["KV of others"] == shown(one)["KV used"] == 0
    del cache
