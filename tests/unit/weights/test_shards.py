"""Parts of layers that leave the process and come back beside the others: laws 3, 4, 5 and 8; AMOEBA, section 3.2."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Container, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import elastic
from elastic import ConfigError, Drop, Fetch, Restore, StateError
from elastic.memory import copy_engine
from elastic.weights import batch_context, layer, parameter_slot
from elastic.weights.shards import layer_cut
from support.architectures import CONFIGS, build, prompt
from support.child_process import wait_for_the_janitor
from support.weights.sharded import LAYERS, SHARDS, place, wide
from support.wrapped_model import PAGE, assert_same_bits, bits, layers, small, tight


def held_pages(rt: Any, index: int) -> int:
    """Pages that the ledger says a layer has."""
    (pool,) = rt.pools
    return int(pool.pages_of(f"layer:{index}"))


def held_pages_at(rt: Any, name: str, index: int) -> int:
    return next(int(pool.pages_of(f"layer:{index}")) for pool in rt.pools if pool.name == name)


def require_same_parts(rt: Any, reference: Any, index: int) -> None:
    """The parts that are here have the same tensors, bit for bit, as those of a whole model."""
    parts = tuple(sorted(rt.shards_here[index]))
    mine, theirs = (runtime.weights.part_tensors(index, parts) for runtime in (rt, reference))
    for name, tensors in theirs.items():
        assert all(torch.equal(a, b) for a, b in zip(mine[name], tensors, strict=True)), name


@contextmanager
def plan(*computed: int) -> Iterator[None]:
    """Call the model as a stage does that computes these layers by itself, in whatever way."""

    class Plan:
        layers: Container[int] = computed

        def call(self, module: Any, args: Any, kwargs: Any) -> Any:
            return type(module).forward(module, *args, **kwargs)

    batch_context.thread.plan = Plan()
    try:
        yield
    finally:
        batch_context.thread.plan = None


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_model_that_is_cut_is_as_ever_and_each_shard_leaves_and_returns(architecture: str, wrapped: Any) -> None:
    model, before = build(architecture), bits(build(architecture))
    expected = model(**prompt(3)).logits
    strides = [p.stride() for p in model.parameters()]
    rt = wrapped(model, shards=SHARDS).elastic
    peer = wrapped(build(architecture), small(4 << 20, "cpu#peer"), shards=SHARDS).elastic
    assert (rt.shards, rt.shards_here[0]) == (SHARDS, frozenset(range(SHARDS)))
    torch.testing.assert_close(model(**prompt(3)).logits, expected, rtol=1e-4, atol=1e-4)
    assert_same_bits(model, before)
    resident = model(**prompt(3)).logits
    for part in range(SHARDS):
        assert rt.drop(shards=[part]).moved_bytes == 0
        assert rt.dropped_shards == (part,)
        require_same_parts(rt, peer, 0)
        with pytest.raises(StateError, match=rf"shards \({part},\) of .* are dropped"):
            model(**prompt())
        rt.fetch((), peer.weights_source(shards=[part]), shards=[part])
        rt.check()
    assert torch.equal(model(**prompt(3)).logits, resident)
    rt.release(0)
    assert torch.equal(model(**prompt(3)).logits, resident)
    rt.restore()
    elastic.unwrap(model)
    assert [p.stride() for p in model.parameters()] == strides
    assert torch.equal(model(**prompt(3)).logits, expected)


@pytest.mark.parametrize("page_bytes", [4096, 16384, 65536])
def test_the_ledger_and_the_system_have_exactly_the_pages_of_parts_that_leave(wrapped: Any, page_bytes: int) -> None:
    model = wide()
    rt = wrapped(model, place(page_bytes=page_bytes), shards=SHARDS).elastic
    peer = wrapped(wide(), place("cpu#b", page_bytes), shards=SHARDS).elastic
    (pool,) = rt.pools
    every, capacity = range(SHARDS), rt.kv.capacity_bytes
    pages = rt.shard_pages[0]
    assert held_pages(rt, 0) == rt.layer_pages[0] == pages.pages(every)
    ffn = 3 * 512 * 64 * 4 // page_bytes
    assert pages.pages(every) - pages.pages((0, 1)) == ffn // 2, "half of each matrix is whole pages"
    wait_for_the_janitor()
    pool.give_back_unused()
    created = pool.backend.created
    rt.digests(0)
    for gone in ((3,), (1, 2), (0,)):
        here = rt.shards_here[0]
        freed = pages.pages(here) - pages.pages(here - set(gone))
        (step,) = rt.plan(Drop(shards=gone))
        change = rt.drop(shards=gone)
        assert (change.released_bytes, change.retained_bytes, change.moved_bytes) == (freed * page_bytes, 0, 0)
        assert step.released_pages == freed
        assert held_pages(rt, 0) == pages.pages(here - set(gone))
        rt.check()
    assert rt.kv.capacity_bytes == capacity + pages.pages(every) * page_bytes
    wait_for_the_janitor()
    pool.give_back_unused()
    assert pool.backend.created == created - pages.pages(every)
    for come in ((1,), (0, 3), (2,)):
        before = held_pages(rt, 0)
        change = rt.fetch((), peer.weights_source(0), shards=come)
        assert change.released_bytes == (before - held_pages(rt, 0)) * page_bytes
        assert held_pages(rt, 0) == pages.pages(rt.shards_here[0])
        rt.check()
    assert rt.kv.capacity_bytes == capacity
    assert_same_bits(model, bits(wide()))


def test_a_part_that_leaves_is_not_read_and_no_byte_is_copied(wrapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide()
    rt, peer = wrapped(model, place(), shards=SHARDS).elastic, wrapped(wide(), place("cpu#b"), shards=SHARDS).elastic
    rt.digests(range(LAYERS))
    (pool,) = rt.pools
    addresses, created = [p.data_ptr() for p in layers(model)[0].self_attn.parameters()], pool.backend.created
    with monkeypatch.context() as patched:
        digests = [(module, "digest") for module in (layer, layer_cut, parameter_slot)]
        for module, name in (*digests, (copy_engine, "copy")):
            patched.setattr(module, name, lambda *args: pytest.fail("a drop read or copied weights"))
        rt.drop(shards=(2, 3, 4, 5))
    assert (rt.dropped, rt.shards_here) == ((0, 1), (frozenset((0, 1)), frozenset((2, 3))))
    assert [p.data_ptr() for p in layers(model)[0].self_attn.parameters()] == addresses
    assert pool.backend.created <= created
    assert rt.form() == ("float32[0,1/4]", "float32[2,3/4]")
    rt.fetch(range(LAYERS), peer.weights_source(range(LAYERS)))


def test_two_ranks_that_share_layers_give_each_other_their_parts_back(wrapped: Any) -> None:
    one, two = wide(), wide()
    before, expected = bits(one), one(**prompt()).logits
    a = wrapped(one, place(), shards=SHARDS).elastic
    b = wrapped(two, place("cpu#b", 16384), shards=SHARDS).elastic
    assert a.digests(shards=range(8)) == b.digests(shards=range(8))
    assert len(set(a.digests(shards=range(8)).values())) == 8
    mine, theirs = (0, 1, 4, 5), (2, 3, 6, 7)
    a.drop(shards=(0,))
    with pytest.raises(ConfigError, match="lies otherwise"):
        a.fetch((), b.weights_source(shards=(0,)), shards=(0,))
    elastic.unwrap(two)
    b = wrapped(two, place("cpu#b"), shards=SHARDS).elastic
    a.fetch((), b.weights_source(shards=(0,)), shards=(0,))
    a.drop(shards=theirs)
    b.drop(shards=mine)
    with pytest.raises(StateError, match=r"shards \(2,\) of .* are dropped"):
        a.weights_source(shards=(2,))
    b.drop(shards=(3,))
    with pytest.raises(ConfigError, match=r"parts \[3\] of .* are not in the source; it has \(0, 1\)"):
        b.fetch((), a.weights_source(shards=(0, 1)), shards=(3,))
    change = a.fetch((), b.weights_source(shards=(2, 6, 7)), shards=(2, 6, 7))
    assert change.moved_bytes == 3 * 3 * 128 * 64 * 4
    assert a.dropped_shards == (3,)
    assert a.shards_here[1] == frozenset(range(SHARDS))
    third = wrapped(wide(), place("cpu#c"), shards=SHARDS).elastic
    a.fetch((), third.weights_source(0), shards=(3,))
    assert_same_bits(one, before)
    assert torch.allclose(one(**prompt()).logits, expected, atol=1e-5)
    b.fetch(range(LAYERS), a.weights_source(range(LAYERS)))
    assert_same_bits(two, before)


def test_the_last_part_takes_the_rest_of_its_layer_along(wrapped: Any) -> None:
    model = wide()
    before = bits(model)
    rt, peer = wrapped(model, place(), shards=SHARDS).elastic, wrapped(wide(), place("cpu#b"), shards=SHARDS).elastic
    rt.drop(shards=(0, 1, 2))
    assert held_pages(rt, 0) == rt.shard_pages[0].pages((3,))
    rt.drop(shards=(3,))
    assert (held_pages(rt, 0), rt.form()[0]) == (0, "dropped")
    rt.fetch((), peer.weights_source(shards=(2,)), shards=(2,))
    assert held_pages(rt, 0) == rt.shard_pages[0].pages((2,)), "what the parts have in common has come with the first"
    assert torch.equal(layers(model)[0].input_layernorm.weight, before["model.layers.0.input_layernorm.weight"])
    rt.drop(0)
    assert held_pages(rt, 0) == 0
    rt.fetch(0, peer.weights_source(0))
    assert_same_bits(model, before)


def test_a_tensor_outside_keeps_the_pages_of_a_part_until_it_dies(wrapped: Any) -> None:
    model = wide()
    rt, peer = wrapped(model, place(), shards=SHARDS).elastic, wrapped(wide(), place("cpu#b"), shards=SHARDS).elastic
    (pool,) = rt.pools
    pages = rt.shard_pages[0]
    outside = layers(model)[0].mlp.gate_proj.weight.data
    known = outside.clone()
    gone = pages.pages(range(SHARDS)) - pages.pages((0, 1))
    change = rt.drop(shards=(2, 3))
    assert (change.released_bytes, change.retained_bytes) == (gone * 2 // 3 * PAGE, gone // 3 * PAGE)
    assert torch.equal(outside, known)
    rt.fetch((), peer.weights_source(shards=(2,)), shards=(2,))  # into pages that are still shown
    assert torch.equal(outside, known)
    rt.check()
    del outside
    wait_for_the_janitor()
    assert pool.pages_of("retained") == 0
    assert held_pages(rt, 0) == pages.pages((0, 1, 2))
    rt.check()
    rt.fetch(0, peer.weights_source(0))


@pytest.mark.parametrize("fault", ["gone", "overwritten", "none"])
def test_a_part_comes_from_the_checkpoint_where_its_source_has_gone(
    fault: str, wrapped: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, plain, other = wide(), wide(), wide()
    before = bits(model)
    model.save_pretrained(tmp_path)
    peer = wrapped(other, place("cpu#b"), shards=SHARDS).elastic
    source = peer.weights_source(0)
    if fault == "gone":
        source = replace(source, file=replace(source.file, inode=source.file.inode + 1))
    elif fault == "overwritten":
        layers(other)[0].mlp.down_proj.weight.zero_()
    kept = wrapped(model, place(), shards=SHARDS, checkpoint=str(tmp_path)).elastic
    bare = wrapped(plain, place("cpu#bare"), shards=SHARDS).elastic
    for rt in (kept, bare):
        rt.drop(shards=(1, 2))
    kept.fetch((), source, shards=(1, 2))
    assert ("is read from the checkpoint instead" in caplog.text) is (fault != "none")
    assert_same_bits(model, before)
    capacity, held = bare.kv.capacity_bytes, held_pages(bare, 0)
    with pytest.raises(StateError) if fault != "none" else nullcontext():
        bare.fetch((), source, shards=(1, 2))
    if fault != "none":
        assert (bare.dropped_shards, bare.kv.capacity_bytes, held_pages(bare, 0)) == ((1, 2), capacity, held)
        bare.fetch(0, kept.weights_source(0))
    assert_same_bits(plain, before)
    kept.drop(shards=(0, 3))
    kept.restore(shards=(3,))
    assert kept.dropped_shards == (0,)
    kept.restore()
    assert_same_bits(model, before)


def test_parts_that_find_no_pages_wait_for_caches_to_end(wrapped: Any) -> None:
    model = wide()
    rt = wrapped(model, tight(model, 60, shards=SHARDS), kv_layout="token_major", shards=SHARDS).elastic
    peer = wrapped(wide(), place("cpu#b"), shards=SHARDS).elastic
    rt.drop(shards=(1, 2, 5, 6))
    cache = elastic.ElasticCache(model)
    for index in range(LAYERS):
        cache.update(*torch.zeros(2, 1, 2, 600, 16), index)
    source = peer.weights_source(range(LAYERS))
    change = rt.fetch((), source, shards=(1, 2, 5, 6))
    assert change.status == "deferred"
    assert rt.kv.capacity_bytes < rt.kv.maximum_bytes, "new caches do not get what the parts wait for"
    rt.check()
    del cache
    gc.collect()
    wait_for_the_janitor()
    rt.apply(())
    assert rt.dropped == ()
    assert torch.isfinite(model(**prompt()).logits).all()


def test_what_was_prepared_for_parts_is_given_back_when_it_is_rolled_back(wrapped: Any) -> None:
    model = wide()
    before = bits(model)
    rt, peer = wrapped(model, place(), shards=SHARDS).elastic, wrapped(wide(), place("cpu#b"), shards=SHARDS).elastic
    for here in ((0, 3), ()):
        rt.drop(shards=[part for part in range(SHARDS) if part not in here])
        owners, capacity = rt.status().places[0].owners, rt.kv.capacity_bytes
        held = rt.prepare(Fetch((), (peer.weights_source(0),), shards=(1,)))
        assert held.pages > 0
        with pytest.raises(StateError, match="layer 0: held by the prepared transaction"):
            rt.drop(shards=(0,))
        rt.rollback(held.id)
        assert (rt.status().places[0].owners, rt.kv.capacity_bytes) == (owners, capacity)
        rt.check()
        rt.commit(rt.prepare(Fetch((), (peer.weights_source(0),), shards=(1,))).id)
        assert rt.shards_here[0] == {*here, 1}
        rt.fetch(0, peer.weights_source(0))
        assert_same_bits(model, before)
    held = rt.prepare(Drop(shards=(0,)))
    rt.rollback(held.id)
    assert rt.dropped == ()
    assert_same_bits(model, before)


def test_parts_leave_and_are_given_back_while_a_forward_pass_shows_others(
    wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rt, peer = wrapped(wide(), place(), shards=SHARDS).elastic, wrapped(wide(), place("cpu#b"), shards=SHARDS).elastic
    unit = rt.weights.layers[0]
    block, times = unit.blocks[unit.full.key], itertools.count()

    class Name(str):
        """A name in whose comparison a forward pass shows a run of bytes."""

        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            block.show_part(f"run {next(times)}", 0, 64, torch.uint8)
            return str.__eq__(self, other)

    common, pieces = unit.cut.common(unit.layout).parameters, list(unit.pieces(2))
    with monkeypatch.context() as patch:
        named = SimpleNamespace(parameters={Name(key): lies for key, lies in common.items()})
        patch.setattr(layer_cut.LayerCut, "common", lambda *args: named)
        rt.drop(0, shards=(2, 3))
    assert next(times)
    prepared, before = rt.prepare(Fetch((), (peer.weights_source(0),), shards=(2,))), next(times)
    with monkeypatch.context() as patch:
        patch.setattr(layer.WeightUnit, "pieces", lambda *args: [SimpleNamespace(key=Name(p.key)) for p in pieces])
        rt.rollback(prepared.id)
    assert next(times) > before + 1
    assert rt.shards_here[0] == {0, 1}
    rt.check()
    rt.fetch(0, peer.weights_source(0))


def test_what_needs_a_whole_layer_is_refused_in_words(wrapped: Any) -> None:
    model = wide()
    rt = wrapped(model, place(), shards=SHARDS, variants=["int8"]).elastic
    peer = wrapped(wide(), place("cpu#b"), shards=SHARDS).elastic
    rt.drop(shards=(1,))
    for refused in (lambda: rt.release(0), lambda: rt.swap(0, "int8"), lambda: elastic.unwrap(model)):
        with pytest.raises(StateError, match="dropped"):
            refused()
    with pytest.raises(StateError, match=r"rt\.fetch\(\(\), source, shards=\(1,\)\)"):
        layers(model)[0].mlp.up_proj.weight.clone()
    with pytest.raises(StateError, match=r"shards \(1,\)"):
        rt.weights.part_tensors(0, (0, 1))
    with pytest.raises(ConfigError, match="shard 8 is none of this model; they are 0 to 7, 4 of each layer"):
        rt.drop(shards=(8,))
    with pytest.raises(ConfigError, match=r"layers=\(0,\) are not those of shards=\(1, 5\)"):
        rt.drop(0, shards=(1, 5))
    with pytest.raises(ConfigError, match=r"would move layers \[0\] twice"):
        rt.apply([Drop(shards=(0,)), Restore(shards=(1,))])
    rt.fetch((), peer.weights_source(0), shards=(1,))
    rt.swap(0, "int8")
    with pytest.raises(StateError, match="in variant 'int8'; restore it"):
        rt.drop(shards=(0,))
    with pytest.raises(StateError, match="in variant 'int8'; restore it"):
        rt.weights.part_tensors(0, (0,))
    rt.restore(0)
    layers(model)[0].mlp.up_proj.weight.mul_(2)
    with pytest.raises(StateError, match="was written since the model was wrapped"):
        rt.drop(shards=(0,))


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        (3, "shards=3 cannot be; it must be a power of two"),
        (0, "shards=0 cannot be"),
        (True, "shards=True cannot be"),
        (64, r"shards=64: model.layers.0: mlp: 48 rows cannot be cut into 64 parts"),
    ],
)
def test_a_cut_that_cannot_be_is_refused_before_anything_is_done(shards: int, words: str) -> None:
    model = build("llama-gqa")
    with pytest.raises(ConfigError, match=words):
        elastic.wrap(model, places=small(4 << 20), shards=shards)
    assert not hasattr(model, "elastic")


def test_weights_that_others_use_too_cannot_be_cut() -> None:
    model = build("llama-gqa")
    first, second = model.model.layers[:2]
    first.mlp.down_proj.weight = second.mlp.down_proj.weight
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.down_proj\.weight is used elsewhere too"):
        elastic.wrap(model, places=small(4 << 20), shards=2)


def test_a_plan_may_call_a_layer_that_has_some_of_its_parts(wrapped: Any) -> None:
    model = wide()
    rt = wrapped(model, place(), shards=SHARDS).elastic
    hidden = torch.zeros(1, 3, 64)
    rt.drop(shards=(1, 4, 5, 6, 7))
    with plan(0, 1):
        with pytest.raises(StateError, match=r"shards \(1,\)"):  # it asks for the weights, as a whole layer does
            layers(model)[0](hidden, position_embeddings=model.model.rotary_emb(hidden, torch.arange(3)[None]))
        with pytest.raises(StateError, match=r"layers\.1 is dropped"):
            layers(model)[1](hidden)
    found = []
    watched = layers(model)[0].mlp.register_forward_pre_hook(lambda *_: found.append("reached"))
    with plan(0), pytest.raises(StateError):
        layers(model)[0](hidden, position_embeddings=model.model.rotary_emb(hidden, torch.arange(3)[None]))
    watched.remove()
    assert found == ["reached"], "attention is here"
    peer = wrapped(wide(), place("cpu#b"), shards=SHARDS).elastic
    rt.fetch(range(LAYERS), peer.weights_source(range(LAYERS)))


def test_a_layer_that_has_moved_is_cut_where_it_is_and_one_in_two_places_is_not(wrapped: Any) -> None:
    model = wide()
    expected = wrapped(model, [place(), place("cpu#b", 16384)], shards=SHARDS)(**prompt()).logits
    rt, peer = model.elastic, wrapped(wide(), place("cpu#p"), shards=SHARDS).elastic
    rt.migrate(1, "cpu#b")
    rt.drop(shards=(5,))
    assert held_pages_at(rt, "cpu#b", 1) == rt.shard_pages[1].pages((0, 2, 3))
    name = list(rt.status().residencies)[1]
    assert rt.status().residencies[name] == (elastic.Residency("cpu#b", "float32", shard="0,2,3/4"),)
    rt.fetch((), peer.weights_source(1), shards=(5,))
    rt.migrate("model.layers.0.mlp", "cpu#b")
    for refused in (lambda: rt.drop(shards=(0,)), lambda: rt.weights.part_tensors(0, (0,))):
        with pytest.raises(StateError, match=r"apart from its layer|has modules at another place"):
            refused()
    rt.migrate("model.layers.0.mlp", "cpu")
    rt.drop(shards=(0,))
    rt.fetch(0, peer.weights_source(0))
    rt.check()
    assert torch.equal(model(**prompt()).logits, expected)


STEPS = st.tuples(
    st.sampled_from(["drop", "fetch", "restore", "release", "back", "use"]),
    st.frozensets(st.integers(0, SHARDS * LAYERS - 1), min_size=1),
)


def test_any_shards_leave_and_return_in_any_order(wrapped: Any, tmp_path: Path) -> None:
    model = wide()
    model.save_pretrained(tmp_path)
    before = bits(model)
    rt = wrapped(model, place(), shards=SHARDS, checkpoint=str(tmp_path)).elastic
    peer = wrapped(wide(), place("cpu#b"), shards=SHARDS).elastic
    source, expected = peer.weights_source(range(LAYERS)), model(**prompt()).logits
    owners = rt.status().places[0].owners
    whole = frozenset(range(SHARDS))

    @settings(max_examples=25)
    @given(steps=st.lists(STEPS, min_size=1, max_size=10))
    def check(steps: list[tuple[str, frozenset[int]]]) -> None:
        here, host = [whole] * LAYERS, [False] * LAYERS
        for verb, chosen in steps:
            touched = {shard // SHARDS for shard in chosen}
            if verb == "drop":
                refused = any(host[index] for index in touched)
                with pytest.raises(StateError) if refused else nullcontext():
                    rt.drop(shards=chosen)
            elif verb == "release":
                refused = any(here[index] != whole and not host[index] for index in touched)
                with pytest.raises(StateError) if refused else nullcontext():
                    rt.release(touched)
            elif verb != "use":
                refused = False
                if verb == "back":
                    rt.restore(touched)
                else:
                    rt.fetch((), source, shards=chosen) if verb == "fetch" else rt.restore(shards=chosen)
            else:
                refused = True
            for index in touched if not refused else ():
                parts = frozenset(shard % SHARDS for shard in chosen if shard // SHARDS == index)
                if verb == "drop":
                    here[index] -= parts
                elif verb == "release":
                    here[index], host[index] = frozenset(), True
                elif verb == "back" or host[index]:
                    here[index], host[index] = whole, False
                else:
                    here[index] |= parts
            assert list(rt.shards_here) == here
            rt.check()
            for index in range(LAYERS):
                assert held_pages(rt, index) == rt.shard_pages[index].pages(here[index])
                if here[index]:
                    require_same_parts(rt, peer, index)
            if rt.dropped == ():
                assert torch.equal(model(**prompt()).logits, expected)
        rt.restore()
        assert_same_bits(model, before)
        assert {o: s for o, s in rt.status().places[0].owners.items() if o.startswith("layer")} == {
            o: s for o, s in owners.items() if o.startswith("layer")
        }

    check()
