"""Dropped layers come back from the memory of another process: here that of another model, found by /proc as well."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections import Counter
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic
from elastic import ConfigError, Fetch, RankLost, StateError
from elastic.memory import copy_engine
from elastic.memory.backends.rank_memory import Pieces
from elastic.memory.backends.shared_file import OpenFile
from elastic.memory.rate_limit import YieldingPace
from elastic.types import RankMemory, SharedFile
from elastic.weights import layer
from elastic.weights.layer import combined
from support.architectures import CONFIGS, build, prompt
from support.child_process import Forked, wait_for_the_janitor
from support.wrapped_model import PAGE, assert_same_bits, bits, layers, small, tight

COARSE = elastic.Place("cpu#peer", torch.device("cpu"), 64 << 20, page_bytes=3 * PAGE)
"""Pages of another size than `wrapped` gives."""


@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_layer_returns_from_another_model_bit_for_bit(architecture: str, wrapped: Any) -> None:
    model = build(architecture)
    before, expected = bits(model), model(**prompt(3)).logits
    peer, rt = wrapped(build(architecture), COARSE).elastic, wrapped(model).elastic
    every = range(rt.status().layers)
    source = pickle.loads(pickle.dumps(peer.weights_source(every)))
    assert rt.digests(every) == peer.digests(every) == {pages.layer: pages.digest for pages in source.layers}
    rt.drop(every)
    change = rt.fetch(every, source)
    assert (change.layers, change.moved_bytes) == (tuple(every), sum(pages.nbytes for pages in source.layers))
    assert torch.equal(model(**prompt(3)).logits, expected)
    assert_same_bits(model, before)
    assert rt.events()[-1].action == Fetch(tuple(every), (source,))


def test_the_bytes_go_straight_from_the_file_to_the_pages(wrapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    peer, rt = wrapped(build("llama-gqa"), COARSE).elastic, wrapped(build("llama-gqa")).elastic
    source, host = peer.weights_source([1]), rt.status().host
    rt.drop(1)
    monkeypatch.setattr(copy_engine, "copy", lambda *args: pytest.fail("a copy through host memory"))
    rt.fetch(1, source)
    assert rt.status().host == host


@pytest.mark.parametrize("fault", ["gone", "on another host", "overwritten", "cut short"])
def test_without_the_other_process_the_checkpoint_is_read_or_nothing_changes(
    fault: str, wrapped: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = build("llama-gqa"), build("llama-gqa")
    before = bits(model)
    model.save_pretrained(tmp_path)
    other = build("llama-gqa")
    peer = wrapped(other, COARSE).elastic
    source = peer.weights_source([0, 1])
    faults: dict[str, SharedFile] = {
        "gone": replace(source.file, inode=source.file.inode + 1),
        "on another host": replace(source.file, host="elsewhere"),
    }
    source = replace(source, file=faults.get(fault, source.file))
    if fault == "overwritten":
        layers(other)[1].mlp.down_proj.weight.zero_()
    if fault == "cut short":
        beyond = tuple(page + 100_000 for page in source.layers[1].pages)
        source = replace(source, layers=(source.layers[0], replace(source.layers[1], pages=beyond)))
    kept, bare = wrapped(model, checkpoint=str(tmp_path)).elastic, wrapped(plain, small(4 << 20, "cpu#bare")).elastic
    kept.drop([0, 1])
    kept.fetch([0, 1], source)
    assert_same_bits(model, before)
    assert "is read from the checkpoint instead" in caplog.text
    bare.drop([0, 1])
    status = bare.status()
    with pytest.raises(StateError, match=r"is on host elsewhere|another file by now|is not what it was|has .* bytes"):
        bare.fetch([0, 1], source)
    assert bare.dropped == (0, 1)
    assert bare.status().places[0].owners == status.places[0].owners
    assert bare.kv.capacity_bytes == status.kv[0].capacity_bytes
    bare.fetch([0, 1], kept.weights_source([0, 1]))
    assert_same_bits(plain, before)


class OtherRank:
    """`Peers` with one rank, whose answers come from its memory file until it is lost."""

    name, waits, device = "here", True, torch.device("cpu")

    def __init__(self, file: SharedFile) -> None:
        self._file = file
        self.lost = False
        self.asked: list[bool] = []

    def open_memory(self, memory: RankMemory, device: torch.device, *, coordinated: bool) -> OtherRank:
        assert memory == RankMemory("there", "cpu#peer")
        self.asked.append(coordinated)
        return self

    def read(self, address: int, pieces: Pieces) -> None:
        if self.lost:
            raise RankLost("rank 'there' has gone", rank="there")
        with closing(OpenFile(self._file)) as file:
            file.read(address, pieces)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("coordinated", [True, False])
def test_layers_return_from_a_rank_of_another_host_in_chunks(wrapped: Any, coordinated: bool) -> None:
    model = build("llama-gqa")
    before = bits(model)
    peer, rt = wrapped(build("llama-gqa"), COARSE).elastic, wrapped(model).elastic
    assert peer.weights_source([1]).memory is None
    peer.exchange_with(OtherRank(peer.weights_source([1]).file), YieldingPace(lambda seconds: True, lambda: 0.0))
    source = replace(peer.weights_source([0, 1]), file=None)
    assert source.memory == RankMemory("here", "cpu#peer")
    source = replace(source, memory=RankMemory("there", "cpu#peer"))
    rank, waited = OtherRank(peer.weights_source([0]).file), list[float]()
    rt.exchange_with(rank, YieldingPace(lambda seconds: not waited.append(seconds), lambda: 60.0))
    rt.drop([0, 1])
    rt.apply([Fetch((0, 1), (source,), coordinated)])
    assert_same_bits(model, before)
    assert rank.asked == [coordinated, coordinated]
    assert bool(waited) is coordinated


def test_a_rank_that_is_lost_while_it_is_read_leaves_a_layer_to_the_checkpoint(wrapped: Any, tmp_path: Path) -> None:
    model, plain = build("llama-gqa"), build("llama-gqa")
    before = bits(model)
    model.save_pretrained(tmp_path)
    peer = wrapped(build("llama-gqa"), COARSE).elastic
    known = peer.weights_source([1])
    rank, source = OtherRank(known.file), replace(known, file=None, memory=RankMemory("there", "cpu#peer"))
    kept, bare = wrapped(model, checkpoint=str(tmp_path)).elastic, wrapped(plain, small(4 << 20, "cpu#bare")).elastic
    for rt in (kept, bare):
        rt.drop(1)
        with pytest.raises(StateError, match="only its own process") if rt is bare else nullcontext():
            rt.fetch(1, source)  # it knows no other rank
        rt.exchange_with(rank, YieldingPace(lambda seconds: True, lambda: 0.0))
    assert_same_bits(model, before)
    kept.drop(1)
    rank.lost = True
    kept.fetch(1, source)
    assert_same_bits(model, before)
    with pytest.raises(StateError, match="has gone"):
        bare.fetch(1, source)
    assert bare.dropped == (1,)
    rank.lost = False
    bare.fetch(1, source)
    assert_same_bits(plain, before)


def test_another_model_or_other_weights_are_refused_before_anything_is_read(wrapped: Any) -> None:
    rt = wrapped(build("llama-gqa")).elastic
    wider = wrapped(build("llama-mha"), small(4 << 20, "cpu#wider")).elastic
    others = wrapped(build("llama-gqa", seed=7), small(4 << 20, "cpu#others")).elastic
    same = wrapped(build("llama-gqa"), small(4 << 20, "cpu#same")).elastic
    rt.drop([0, 1])
    with pytest.raises(ConfigError, match=r"model.layers.0 lies otherwise in the source \([\d,]+ bytes, layout"):
        rt.fetch([0, 1], wider.weights_source([0, 1]))
    with pytest.raises(StateError, match=r"other weights of model\.layers\.0 than were dropped here"):
        rt.fetch([0, 1], others.weights_source([0, 1]))
    with pytest.raises(ConfigError, match="layer 1 is not in the source; it has 0, 2"):
        rt.fetch([0, 1], same.weights_source([0, 2]))
    assert rt.form()[:2] == ("dropped", "dropped")
    rt.fetch([0, 1], same.weights_source([1, 0]))


def test_a_fetch_waits_for_caches_and_completes_as_they_end(wrapped: Any) -> None:
    model = build("llama-gqa")
    expected = model(**prompt()).logits
    peer = wrapped(build("llama-gqa"), COARSE).elastic
    rt = wrapped(model, tight(model, 14), kv_layout="token_major").elastic
    rt.drop([1, 2])
    cache = elastic.ElasticCache(model)
    for index in range(3):  # as a pass does that leaves the dropped layers to others
        cache.update(*torch.zeros(2, 1, 2, 250, 8), index)
    result = rt.fetch([1, 2], peer.weights_source([1, 2]))
    assert result.status == "deferred"
    assert rt.kv.capacity_bytes < rt.kv.maximum_bytes, "new caches do not get what the layers wait for"
    del cache
    gc.collect()
    wait_for_the_janitor()
    rt.apply(())  # after the retry that the end of the cache asked for
    assert rt.dropped == ()
    assert torch.equal(model(**prompt()).logits, expected)
    assert (rt.events()[-1].why, rt.events()[-1].outcome) == ("pages came free", "applied")


def test_a_drop_ends_the_wait_of_a_fetch(wrapped: Any) -> None:
    model = build("llama-gqa")
    source = wrapped(build("llama-gqa"), COARSE).elastic.weights_source([1, 2])
    rt = wrapped(model, tight(model, 14), kv_layout="token_major").elastic
    rt.drop([1, 2])
    cache, most = elastic.ElasticCache(model), rt.kv.maximum_bytes
    for index in range(3):
        cache.update(*torch.zeros(2, 1, 2, 250, 8), index)
    assert rt.fetch([1, 2], source).deferred == (1, 2)
    assert rt.drop([1, 2]).status == "applied"
    assert rt.kv.capacity_bytes == most, "pages are kept back for what nobody waits for"
    del cache
    gc.collect()
    wait_for_the_janitor()
    rt.apply(())
    assert rt.dropped == (1, 2)
    assert rt.fetch([1, 2], source).layers == (1, 2)


def test_a_fetch_waits_for_pages_that_another_model_has(wrapped: Any) -> None:
    rt = wrapped(build("llama-gqa")).elastic
    peer = wrapped(build("llama-gqa"), COARSE).elastic
    source = peer.weights_source(range(3))
    rt.drop(range(3))
    pool = rt.kv.memory.pools[0].pool
    pool.charge("another model", pool.free_pages * PAGE)
    change = rt.fetch(range(3), source)
    assert (change.status, change.deferred, rt.dropped) == ("deferred", (0, 1, 2), (0, 1, 2))
    pool.discharge("another model", pool.pages_of("another model") * PAGE)
    assert rt.fetch(range(3), source).layers == (0, 1, 2)


def test_a_forward_pass_beside_drops_and_fetches_computes_with_all_weights_or_none(wrapped: Any) -> None:
    model = build("llama-gqa")
    expected = model(**prompt(3)).logits
    peer, rt = wrapped(build("llama-gqa"), COARSE).elastic, wrapped(model).elastic
    source, stop, wrong, done = peer.weights_source(range(3)), threading.Event(), [], Counter[str]()

    def call() -> None:
        torch.set_grad_enabled(False)
        while not stop.is_set():
            try:
                done["computed"] += 1
                wrong.extend([] if torch.equal(model(**prompt(3)).logits, expected) else ["other logits"])
            except StateError as error:
                done["refused"] += 1
                wrong.extend([] if "is dropped" in str(error) else [str(error)])

    caller = threading.Thread(target=call)
    caller.start()
    try:
        while not (done["refused"] > 5 and done["computed"] - done["refused"] > 5):
            rt.drop({0, 2})
            rt.fetch({0, 2}, source)
            rt.check()
    finally:
        stop.set()
        caller.join()
    assert wrong == []


def test_only_full_weights_at_one_place_have_a_source(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, [small(4 << 20, f"cpu#{label}") for label in "ab"], variants=["int4"]).elastic
    assert rt.weights_source([0, 1]).page_bytes == PAGE
    rt.release(0)
    rt.swap(1, "int4")
    for index in (0, 1):
        with pytest.raises(StateError, match=f"model.layers.{index} has no full weights of its own"):
            rt.weights_source(index)
    rt.restore()
    rt.migrate(1, "cpu#b")
    with pytest.raises(StateError, match="are at 2 places; ask for those of one place"):
        rt.weights_source([0, 1])
    assert rt.weights_source(1).layers[0].digest == rt.digests(1)[1]
    rt.migrate("model.layers.1.mlp", "cpu#a")
    with pytest.raises(StateError, match="has no full weights of its own"):
        rt.weights_source(1)
    with pytest.raises(ConfigError, match="layer 3 is no decoder layer"):
        rt.weights_source(3)


def test_digests_are_taken_once_and_again_after_a_write(wrapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, variants=["int4"]).elastic
    before = rt.digests(range(3))
    assert len(set(before.values())) == 3
    with monkeypatch.context() as patched:
        patched.setattr(layer, "digest", lambda tensor: pytest.fail("it is known"))
        assert rt.digests(range(3)) == before
    rt.swap(0, "int4")
    rt.release(2)
    assert rt.digests(range(3)) == before
    layers(model)[1].mlp.up_proj.weight.add_(1)
    after = rt.digests(range(3))
    assert after[1] != before[1]
    assert (after[0], after[2]) == (before[0], before[2])


def test_a_layers_checksum_tells_the_names_of_its_parameters() -> None:
    assert combined({"a": 1, "b": 2}) == combined({"b": 2, "a": 1}) != combined({"a": 2, "b": 1})


PEER = """
import pickle, sys, torch, elastic
from elastic.assets import MODEL_DIR
from transformers import AutoModelForCausalLM
model = elastic.wrap(AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32))
sys.stdout.buffer.write(pickle.dumps(model.elastic.weights_source(range(4))))
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.mark.slow
def test_layers_return_from_another_process_until_it_has_ended(wrapped: Any, assets: Any) -> None:
    model, _ = assets
    plain = copy.deepcopy(model)
    tokens = torch.tensor([[5, 6, 7]])
    expected, before = model(tokens).logits, bits(model)
    with closing(Forked(PEER)) as peer:
        source = pickle.load(peer.stdout)
        rt = wrapped(model).elastic
        rt.drop(range(4))
        rt.fetch(range(3), source)
    with pytest.raises(StateError, match="its process has ended"):
        rt.fetch(3, source)
    assert rt.dropped == (3,)
    last = wrapped(plain, COARSE).elastic.weights_source([3])
    rt.fetch(3, last)
    assert torch.equal(model(tokens).logits, expected)
    assert_same_bits(model, before)
