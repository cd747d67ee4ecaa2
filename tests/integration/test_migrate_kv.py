"""The KV cache of layers moves to another place under running generations (CoCoServe; laws 1, 2, 4, 5, 8)."""

from __future__ import annotations

import copy as copy_module
import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import elastic
from elastic import CapacityError, ConfigError, StateError
from elastic.memory import checksum, copy_engine, places
from support.architectures import CONFIGS, build, prompt
from support.child_process import wait_for_the_janitor
from support.faulty_backend import CALLS, FaultyBackend
from support.wrapped_model import PAGE, small

ROOMY = 64 << 20
PLACES = ["cpu#a", "cpu#b"]
LAYOUTS = ["head_major", "batch_major", "token_major"]


def two_places(budget: int = ROOMY) -> list[elastic.Place]:
    return [small(ROOMY, "cpu#a"), small(budget, "cpu#b")]


class Between(LogitsProcessor):
    """Does something after each forward pass of a generation, where beams are chosen."""

    def __init__(self, do: Callable[[], object]) -> None:
        self.do = do

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.do()
        return scores


def generate(model: Any, inputs: dict[str, torch.Tensor], do: Callable[[], object] = bool, **options: Any) -> Any:
    """Tokens and logits of greedy generation, or of beams; the cache is gone."""
    out = model.generate(
        **inputs,
        max_new_tokens=6,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        logits_processor=LogitsProcessorList([Between(do)]),
        pad_token_id=0,
        **options,
    )
    return out.sequences, *out.logits


def assert_same(out: Any, expected: Any) -> None:
    assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))


def move_at_random(rt: Any, choose: random.Random) -> None:
    """KV alone, weights with it, or weights alone."""
    layers = choose.sample(range(rt.status().layers), choose.randint(1, 3))
    place = choose.choice(PLACES)
    kind = choose.choice(["kv", "both", "weights", "module"])
    if kind == "kv":
        rt.migrate_kv(layers, place)
    elif kind == "module":
        name = list(rt.status().residencies)[choose.choice(layers)]
        rt.migrate([name], place, kv=False)
    else:
        rt.migrate(layers, place, kv=kind == "both")


def digests(cache: Any) -> list[tuple[int, int]]:
    return [(checksum.digest(layer.keys), checksum.digest(layer.values)) for layer in cache.layers]


def used(rt: Any) -> list[int]:
    return [kv.used_bytes for kv in rt.status().kv]


FEW: list[tuple[int, dict[str, int]]] = [(3, {}), (2, {"num_beams": 3})]
MANY: list[tuple[int, dict[str, int]]] = [*FEW, (1, {}), (8, {})]


@pytest.mark.parametrize("batches", [FEW, pytest.param(MANY, marks=pytest.mark.long)], ids=["few", "many"])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_tokens_and_logits_are_the_plain_models(
    architecture: str, batches: list[tuple[int, dict[str, int]]], wrapped: Any
) -> None:
    model, choose = build(architecture), random.Random(architecture)
    rt = wrapped(model, two_places(), kv_layout=choose.choice(LAYOUTS)).elastic
    for batch, options in batches:
        expected = generate(model, prompt(batch), **options)  # nothing moves
        assert_same(generate(model, prompt(batch), lambda: move_at_random(rt, choose), **options), expected)
        rt.check()
        gc.collect()
        assert rt.kv.used_bytes == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("architecture", ["llama-gqa", "mistral-sliding", "deepseek-v3"])
def test_what_caches_hold_goes_with_its_pages(architecture: str, layout: str, wrapped: Any) -> None:
    model = build(architecture)
    rt = wrapped(model, two_places(), kv_layout=layout).elastic
    expected = [model(**prompt(3, length, seed)).logits for seed, length in ((1, 24), (2, 40))]
    caches = [model(**prompt(3, length, seed)).past_key_values for seed, length in ((1, 24), (2, 40))]
    before, held = [digests(cache) for cache in caches], used(rt)
    step = rt.plan(elastic.MigrateKV((0, 1, 2), "cpu#b"))[0]
    change = rt.migrate_kv([0, 1, 2], "cpu#b")
    assert (change.status, change.layers, change.retained_bytes) == ("applied", (0, 1, 2), 0)
    assert (
        change.moved_bytes
        == step.moved_bytes
        == sum(la.keys.nbytes + la.values.nbytes for c in caches for la in c.layers)
    )
    assert used(rt) == [0, step.transient_pages * PAGE] == [0, held[0]]
    assert rt.status().kv[0].idle_bytes == held[0]  # for the next caches there, and whoever needs pages
    rt.kv.trim()
    assert rt.status().kv[0].idle_bytes == 0
    assert "kv" not in {owner for owner, size in rt.status().places[0].owners.items() if size}
    assert [digests(cache) for cache in caches] == before
    assert rt.migrate_kv([0, 1, 2], "cpu#b").layers == ()
    assert torch.equal(model(**prompt(3)).logits, expected[0])  # a new cache
    rt.migrate_kv([0, 2], "cpu#a")
    assert [digests(cache) for cache in caches] == before
    caches.clear()
    gc.collect()
    assert used(rt) == [0, 0]


@pytest.mark.parametrize("architecture", ["llama-gqa", "mistral-sliding"])
def test_conversations_go_on_after_many_migrations(architecture: str, wrapped: Any) -> None:
    model, choose = build(architecture), random.Random(0)
    rt = wrapped(model, two_places()).elastic
    turns = torch.randint(3, 90, (12, 2, 7), generator=torch.Generator().manual_seed(0))
    still, moving = elastic.ElasticCache(model), elastic.ElasticCache(model)
    expected = [model(turn, past_key_values=still).logits for turn in turns]
    for turn, logits in zip(turns, expected, strict=True):
        move_at_random(rt, choose)
        assert torch.equal(model(turn, past_key_values=moving).logits, logits)
    rt.check()


def test_whole_layers_take_their_kv_along(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, two_places()).elastic
    cache = model(**prompt()).past_key_values
    before, of_layer = digests(cache), used(rt)[0] // 3
    rt.migrate(0, "cpu#b", kv=False)
    rt.migrate("model.layers.1.self_attn", "cpu#b")
    assert used(rt) == [3 * of_layer, 0]
    rt.migrate([0, "model.layers.2", "model.layers.1.mlp"], "cpu#b")
    assert used(rt) == [of_layer, 2 * of_layer]
    rt.migrate(range(3), "cpu#a", wait=False).result()
    assert (used(rt), digests(cache)) == ([3 * of_layer, 0], before)
    kinds = [type(event.action).__name__ for event in rt.events() if event.ok]
    assert kinds == ["Migrate", "Migrate", "Migrate", "Migrate", "MigrateKV", "Migrate", "MigrateKV"]


def test_what_cannot_be_done_is_said_and_nothing_changes(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, two_places(20 * PAGE)).elastic
    cache = model(**prompt(8)).past_key_values
    before = digests(cache), used(rt), rt.status().residencies, owners(rt)
    with pytest.raises(ConfigError, match=r"'cpu#c' is none of this model's.*cpu#a.*cpu#b"):
        rt.migrate_kv(0, "cpu#c")
    with pytest.raises(ConfigError, match="layer 3 is no decoder layer of this model; use 0 to 2"):
        rt.apply([elastic.MigrateKV((3,), "cpu#b")])
    with pytest.raises(ConfigError, match=r"move layers \[1\] twice"):
        rt.apply([elastic.MigrateKV((1,), "cpu#b"), elastic.MigrateKV((0, 1), "cpu#a")])
    with pytest.raises(CapacityError, match=r"cpu#b has no room for the KV cache of layers \[0\]") as error:
        rt.migrate_kv(0, "cpu#b")
    assert (error.value.requested_bytes, error.value.free_bytes) == (used(rt)[0] // 3, 20 * PAGE)
    with pytest.raises(CapacityError):
        rt.plan(elastic.MigrateKV((0,), "cpu#b"))
    with pytest.raises(CapacityError):
        rt.migrate(0, "cpu#b")  # its weights would fit
    assert (digests(cache), used(rt), rt.status().residencies, owners(rt)) == before


def owners(rt: Any) -> list[dict[str, int]]:
    return [{owner: size for owner, size in place.owners.items() if size} for place in rt.status().places]


def test_pages_that_a_tensor_outside_shows_are_retained(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, two_places()).elastic
    cache = model(**prompt(2)).past_key_values
    view = cache.layers[1].keys
    copy = view.clone()
    change = rt.migrate_kv(range(3), "cpu#b")
    assert change.retained_bytes == used(rt)[1] // 3
    assert owners(rt)[0]["retained"] == change.retained_bytes
    model(torch.full((2, 5), 5), past_key_values=cache)
    assert torch.equal(view, copy)
    rt.check()
    del view
    wait_for_the_janitor()
    rt.kv.trim()
    assert owners(rt)[0].keys() <= {f"layer:{i}" for i in range(3)} | {"staging"} | {
        o for o in owners(rt)[0] if "fixed" in o
    }
    assert rt.status().kv[0].idle_bytes == 0


def test_caches_in_host_memory_change_their_home(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, two_places()).elastic
    cache = model(**prompt(2)).past_key_values
    expected = model(torch.full((2, 5), 5), past_key_values=model(**prompt(2)).past_key_values).logits
    for layer in cache.layers:
        assert layer.move_to_host(layer.copy_to_host())
    gc.collect()
    assert rt.migrate_kv(range(3), "cpu#b").moved_bytes == 0
    assert used(rt) == [0, 0]
    assert torch.equal(model(torch.full((2, 5), 5), past_key_values=cache).logits, expected)
    assert used(rt)[0] == 0 < used(rt)[1]


def test_a_running_cache_grows_past_the_limit_of_the_place_it_came_to(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, two_places()).elastic
    cache = model(**prompt()).past_key_values
    rt.kv.resize(used(rt)[0], place="cpu#b")
    rt.migrate_kv(range(3), "cpu#b")
    model(torch.full((1, 150), 5), past_key_values=cache)
    assert used(rt)[1] > rt.kv.limit_bytes
    assert rt.kv.resize(0).status == "deferred"
    model(torch.full((1, 150), 5), past_key_values=cache)
    with pytest.raises(CapacityError, match="limit on cpu#b"):
        model(**prompt())
    rt.kv.resize(0, place="cpu#a")
    with pytest.raises(CapacityError, match="cpu#a has no room"):
        rt.migrate_kv(0, "cpu#a")
    del cache
    gc.collect()
    wait_for_the_janitor()
    assert rt.events()[-1].outcome == "applied after being deferred"


MEANWHILE: dict[str, Callable[[Any], object]] = {
    "append": lambda cache: [layer.update(*torch.ones(2, 2, 2, 9, 8)) for layer in cache.layers],
    "crop": lambda cache: cache.crop(-3),
    "crop and append": lambda cache: (cache.crop(-3), MEANWHILE["append"](cache)),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(3),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "reset": lambda cache: cache.reset(),
    "to the host": lambda cache: [layer.move_to_host(layer.copy_to_host()) for layer in cache.layers],
}


def interrupt(monkeypatch: Any, nth: int, do: Callable[[], object], fails: bool) -> None:
    """Have something done in the middle of the nth copy, which may fail then."""
    real, left = copy_engine.copy, [nth]

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        left[0] -= 1
        if not left[0]:
            real(target[..., ::2], source[..., ::2])
            do()
            if fails:
                raise CapacityError("injected", requested_bytes=0, free_bytes=0, total_bytes=0)
        real(target, source)

    monkeypatch.setattr(copy_engine, "copy", copy)


def contents(cache: Any) -> list[tuple[int, Any, Any]]:
    return [(la.get_seq_length(), la.keys.tolist(), la.values.tolist()) for la in cache.layers if la.get_seq_length()]


def record_past(cache: Any) -> None:
    """Windows cannot be cropped otherwise."""
    for layer in cache.layers:
        if layer.is_sliding:
            layer.activate_past_recording()


@pytest.mark.parametrize(("fails", "nth"), [(False, 1), (False, 8), (True, 8)])
@pytest.mark.parametrize("name", MEANWHILE)
@pytest.mark.parametrize("architecture", ["llama-gqa", "mistral-sliding"])
def test_what_happens_to_caches_on_their_way_is_not_lost(
    architecture: str, name: str, fails: bool, nth: int, monkeypatch: Any, wrapped: Any
) -> None:
    model = build(architecture)
    rt = wrapped(model, two_places()).elastic
    caches = [model(**prompt(2, 40)).past_key_values for _ in range(2)]
    for cache in caches:
        record_past(cache)
    copies = copy_module.deepcopy(caches)
    interrupt(monkeypatch, nth, lambda: [MEANWHILE[name](cache) for cache in caches], fails)
    if fails:
        with pytest.raises(CapacityError, match="injected"):
            rt.migrate_kv([0, 1, 2], "cpu#b")
    else:
        rt.migrate_kv([0, 1, 2], "cpu#b")
    monkeypatch.undo()
    for cache, copy in zip(caches, copies, strict=True):
        MEANWHILE[name](copy)
        assert contents(cache) == contents(copy)
    assert used(rt)[not fails] > 0 or name in ("reset", "to the host")
    assert used(rt)[fails] == 0
    rt.check()
    del cache, copy
    caches.clear()
    copies.clear()
    gc.collect()
    assert used(rt) == [0, 0]


@pytest.mark.parametrize("name", MEANWHILE)
def test_caches_that_change_between_a_failed_commit_and_its_rollback_go_back(
    name: str, monkeypatch: Any, wrapped: Any
) -> None:
    """Their homes do, so that a cache left at the new place would be none of either."""
    model = build("llama-gqa")
    rt = wrapped(model, two_places()).elastic
    cache = model(**prompt(2, 40)).past_key_values
    copy = copy_module.deepcopy(cache)
    handler: Any = rt._executor.runner.handler(elastic.MigrateKV((0,), "cpu#b"))
    commit = handler.commit

    def commit_then_fail(prepared: Any) -> None:
        commit(prepared)
        MEANWHILE[name](cache)
        raise RuntimeError("injected")

    monkeypatch.setattr(handler, "commit", commit_then_fail)
    with pytest.raises(RuntimeError, match="injected"):
        rt.migrate_kv([0, 1, 2], "cpu#b")
    assert used(rt)[1] == 0
    MEANWHILE[name](copy)
    assert contents(cache) == contents(copy)
    assert used(rt)[1] == 0
    rt.check()


@pytest.mark.parametrize("fails", [False, True])
def test_caches_that_die_on_their_way_are_dropped(fails: bool, monkeypatch: Any, wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, two_places()).elastic
    caches = [model(**prompt(2)).past_key_values for _ in range(3)]
    before = digests(caches[1])
    interrupt(monkeypatch, 8, lambda: (caches.pop(0), caches.pop(1)), fails)
    try:
        rt.migrate_kv([0, 1, 2], "cpu#b")
    except CapacityError:
        assert fails
    monkeypatch.undo()
    assert digests(caches[0]) == before
    caches.clear()
    gc.collect()
    wait_for_the_janitor()
    assert used(rt) == [0, 0]
    assert rt.status().kv[0].retained_bytes == rt.status().kv[1].retained_bytes == 0
    rt.check()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("nth", [1, 4])
@pytest.mark.parametrize("begun", [False, True])
def test_a_driver_that_fails_leaves_caches_where_they_were(
    call: str, nth: int, begun: bool, monkeypatch: Any, wrapped: Any
) -> None:
    """Also at the safe point, where a cache that was begun meanwhile is copied."""
    make = places.make_backend
    monkeypatch.setattr(places, "make_backend", lambda place: FaultyBackend(make(place)))
    model = wrapped(build("llama-gqa"), two_places())
    rt, caches = model.elastic, [model(**prompt(3)).past_key_values]
    before, held = digests(caches[0]), used(rt)

    def begin_another() -> None:
        caches.append(model(**prompt(3)).past_key_values)

    def arm() -> None:
        for pool in rt.pools:
            pool.backend.fail(call, nth)

    mechanism: Any = rt._executor.runner.handler(elastic.MigrateKV((0,), "cpu#b"))
    prepare = mechanism.prepare

    def prepare_then(action: Any) -> Any:
        if not begun:
            arm()
        prepared = prepare(action)
        if begun:
            begin_another()
            arm()
        return prepared

    monkeypatch.setattr(mechanism, "prepare", prepare_then)
    moved = True
    try:
        rt.migrate([0, 1, 2], "cpu#b")
    except CapacityError:
        moved = False
    for pool in rt.pools:
        pool.backend.disarm()
    assert [where[0].place for where in rt.status().residencies.values()] == ["cpu#b" if moved else "cpu#a"] * 3
    assert not moved or (call, nth) != ("map", 1)
    assert {home.pool.name for home in rt.kv.memory.homes} == {"cpu#b" if moved else "cpu#a"}
    assert all(digests(cache) == before for cache in caches)
    assert used(rt)[moved] == held[0] * len(caches)
    rt.check()
    monkeypatch.undo()
    rt.migrate([0, 1, 2], "cpu#b")
    rt.migrate([0, 1, 2], "cpu#a")
    assert all(digests(cache) == before for cache in caches)
    caches.clear()
    gc.collect()
    assert used(rt) == [0, 0]
    rt.check()


def test_weights_and_kv_move_together_or_not_at_all(monkeypatch: Any, wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, two_places()).elastic
    cache = model(**prompt(2)).past_key_values
    before = digests(cache), used(rt), rt.status().residencies
    actions = [elastic.MigrateKV((0, 1, 2), "cpu#b"), elastic.Migrate((1,), "cpu#b")]
    mechanism: Any = rt._executor.runner.handler(actions[1])
    monkeypatch.setattr(mechanism, "commit", lambda prepared: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rt.apply(actions)
    assert (digests(cache), used(rt), rt.status().residencies) == before
    model(torch.full((2, 5), 5), past_key_values=cache)
    assert used(rt)[1] == 0
    rt.check()


def test_an_engine_keeps_its_blocks_at_one_place(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, two_places()).elastic
    with elastic.ContinuousEngine(model):
        with pytest.raises(StateError, match=r"continuous batching engine.*kv=False"):
            rt.migrate(0, "cpu#b")
        with pytest.raises(StateError, match="continuous batching engine"):
            rt.migrate_kv(0, "cpu#b")
        assert rt.migrate(0, "cpu#b", kv=False).layers == (0,)
        assert rt.migrate(0, "cpu#a").layers == (0,)  # where its KV cache is
    assert rt.migrate(0, "cpu#b").layers == (0,)
