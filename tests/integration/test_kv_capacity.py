"""The KV cache of one model at several places: what may be held before the first of them is full (law 7)."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest
import torch

import elastic
from elastic import CapacityError, ConfigError
from support.architectures import build
from support.lossless_variant import HALF
from support.wrapped_model import PAGE, small, tight

LAYERS = 3


def two_places(pages: int) -> list[elastic.Place]:
    return [small(8 << 20, "cpu#a"), small(pages * PAGE, "cpu#b")]


def by_place(rt: Any, field: str) -> list[int]:
    return [getattr(kv, field) for kv in rt.status().kv]


@pytest.mark.parametrize("moved", [(), (0,), (0, 2), (0, 1, 2)])
def test_the_place_that_is_full_first_bounds_all_layers(moved: tuple[int, ...], wrapped: Any) -> None:
    rt = wrapped(build("llama-gqa"), two_places(60)).elastic
    rt.migrate_kv(moved, "cpu#b")
    used_places = [(kv, n) for kv, n in zip(rt.status().kv, (LAYERS - len(moved), len(moved)), strict=True) if n]
    for field in ("capacity_bytes", "limit_bytes", "maximum_bytes"):
        assert getattr(rt.kv, field) == min(getattr(kv, field) * LAYERS // n for kv, n in used_places)


def test_what_is_promised_can_be_had(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, two_places(48)).elastic
    rt.migrate_kv(1, "cpu#b")
    promised, cache, turn = rt.kv.capacity_bytes, elastic.ElasticCache(model), torch.full((4, 64), 5)
    grown = 16 * LAYERS * PAGE  # one page for the keys, and for the values, of each head of each row
    model(turn, past_key_values=cache)
    while rt.kv.used_bytes + grown <= promised:
        model(turn, past_key_values=cache)
    assert rt.kv.used_bytes == promised
    model(turn, past_key_values=cache)  # into what is mapped already
    with pytest.raises(CapacityError, match="cpu#b"):
        model(turn, past_key_values=cache)
    snapshot = rt.snapshot().kv
    full = rt.status().kv[1]
    assert snapshot.use == pytest.approx(full.used_bytes / full.capacity_bytes, abs=1e-3)
    assert snapshot.capacity_bytes == rt.kv.capacity_bytes
    assert rt.kv.used_bytes == sum(by_place(rt, "used_bytes"))


def test_a_limit_is_shared_out_by_layers(wrapped: Any) -> None:
    rt, choose = wrapped(build("llama-gqa"), two_places(300)).elastic, random.Random(0)
    for moved in itertools.chain.from_iterable(itertools.combinations(range(LAYERS), n) for n in (1, 2)):
        rt.migrate_kv(range(LAYERS), "cpu#a")
        rt.migrate_kv(moved, "cpu#b")
        size = choose.randrange(rt.kv.maximum_bytes)
        assert rt.kv.resize(size).status == "applied"
        shares = (size * (LAYERS - len(moved)) // LAYERS, size * len(moved) // LAYERS)
        assert by_place(rt, "limit_bytes") == [share // PAGE * PAGE for share in shares]
        assert size - LAYERS * PAGE < rt.kv.limit_bytes <= size
        maximum = rt.kv.maximum_bytes
        assert rt.kv.resize(maximum).limit_bytes == rt.kv.limit_bytes == maximum
        rt.release(1)  # a limit at the maximum follows it
        assert by_place(rt, "limit_bytes") == by_place(rt, "maximum_bytes")
        rt.restore()
        with pytest.raises(CapacityError):
            rt.kv.resize(maximum + LAYERS * PAGE)
        assert rt.kv.limit_bytes == maximum


def test_the_maximum_is_said_by_a_word_and_followed(wrapped: Any) -> None:
    rt = wrapped(build("llama-gqa"), two_places(300)).elastic
    rt.migrate_kv(2, "cpu#b")
    before = rt.kv.maximum_bytes
    assert rt.kv.resize(0).limit_bytes == rt.kv.limit_bytes == 0
    assert rt.kv.resize("max").limit_bytes == rt.kv.limit_bytes == before
    rt.release(1)
    assert by_place(rt, "limit_bytes") == by_place(rt, "maximum_bytes")
    rt.restore()
    assert rt.kv.resize(0, place="cpu#b").limit_bytes == rt.kv.limit_bytes == 0
    (step,) = rt.plan([elastic.ResizeKV("cpu#b", None)])
    assert step.status == "applied"
    assert rt.kv.resize("max", place="cpu#b").status == "applied"
    assert rt.kv.limit_bytes == before
    with pytest.raises(ConfigError, match="'most' is not a size"):
        rt.kv.resize("most")


def test_a_limit_of_one_place(wrapped: Any) -> None:
    rt = wrapped(build("llama-gqa"), two_places(300)).elastic
    rt.migrate_kv(2, "cpu#b")
    assert rt.kv.resize(10 * PAGE, place="cpu#b").limit_bytes == 10 * PAGE
    assert rt.kv.limit_bytes == 30 * PAGE
    rt.migrate_kv(2, "cpu#a")
    assert rt.kv.limit_bytes == rt.kv.maximum_bytes == by_place(rt, "maximum_bytes")[0]


@pytest.mark.parametrize(
    ("architecture", "moved", "share"),
    [("qwen3-next", 3, 1), ("qwen3-next", 0, 0), ("qwen2-sliding", 0, 1), ("qwen2-sliding", 1, 1 / 3)],
)
def test_layers_without_a_growing_cache_promise_nothing(
    architecture: str, moved: int, share: float, wrapped: Any
) -> None:
    """Of Qwen3-Next's layers here only the last has a cache; of Qwen2's here only the first has no window."""
    rt = wrapped(build(architecture), two_places(60)).elastic
    before = rt.kv.capacity_bytes
    rt.migrate_kv(moved, "cpu#b")
    there = by_place(rt, "capacity_bytes")[1]
    assert rt.kv.capacity_bytes == (int(there / share) if share else before)


def test_a_deferred_limit_is_settled_when_the_cache_moves_away(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, two_places(300)).elastic
    cache = model(torch.full((2, 64), 5)).past_key_values
    assert rt.kv.resize(0, place="cpu#a").status == "deferred"
    rt.migrate_kv(range(LAYERS), "cpu#b")
    outcomes = [event.outcome for event in rt.events() if isinstance(event.action, elastic.ResizeKV)]
    assert outcomes == ["deferred", "applied after being deferred"]
    assert by_place(rt, "used_bytes")[0] == rt.status().places[0].owners.get("kv", 0) == 0
    assert cache.get_seq_length() == 64


def fill(model: Any, cache: Any) -> None:
    for _ in range(30):
        model(torch.full((1, 16), 5), past_key_values=cache)


def test_layers_that_wait_for_pages_return_when_the_cache_moves_away(wrapped: Any) -> None:
    model = build("llama-gqa")
    place = tight(model, kv_pages=32, variants=[HALF])
    place = elastic.Place("cpu#a", place.device, place.budget_bytes, page_bytes=PAGE)
    rt = wrapped(model, [place, small(8 << 20, "cpu#b")], variants=[HALF]).elastic
    rt.swap(range(LAYERS), "half")
    cache = elastic.ElasticCache(model)
    with pytest.raises(CapacityError):
        fill(model, cache)
    length = cache.get_seq_length()
    assert rt.restore().status == "deferred"
    rt.migrate_kv(range(LAYERS), "cpu#b")
    for _ in range(6000):
        if rt.busy:
            time.sleep(0.01)
    assert set(rt.form()) == {"float32"}
    assert cache.get_seq_length() == length
    rt.check()


def test_the_status_says_what_share_of_the_cache_is_where(wrapped: Any) -> None:
    rt = wrapped(build("llama-gqa"), [small(16 << 20, "cpu#a"), small(16 << 20, "cpu#b")]).elastic
    assert [kv.share for kv in rt.status().kv] == [1.0, 0.0]
    rt.migrate_kv([0], "cpu#b")
    assert [kv.share for kv in rt.status().kv] == pytest.approx([2 / 3, 1 / 3])


def test_what_torch_has_no_memory_for_gets_the_pages_that_nobody_needs(
    wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama-gqa")
    expected = model(torch.full((2, 64), 5)).logits
    rt = wrapped(model, small(8 << 20)).elastic
    model(torch.full((2, 64), 5))  # its cache is idle now
    idle = rt.status().kv[0].idle_bytes
    created = rt.pools[0].backend.created

    def fail(x: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(model.model.layers[1].mlp.act_fn, "forward", fail)
        with pytest.raises(torch.OutOfMemoryError) as error:
            model(torch.full((2, 64), 5))
    assert "given back" in error.value.__notes__[0]
    assert idle > 0
    assert rt.pools[0].backend.created <= created - idle // PAGE
    assert torch.equal(model(torch.full((2, 64), 5)).logits, expected)
