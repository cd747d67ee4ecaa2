"""A rank that has a share of a model: never more of it is in memory than that and a buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import elastic
from elastic import CapacityError, ConfigError, StateError
from elastic.cluster.rank.facts import model_facts
from elastic.cluster.rank.skeleton import load_skeleton
from elastic.model_files import load_weights
from elastic.weights.decoder import find_decoder
from support import architectures
from support.child_process import in_fork
from support.wrapped_model import small

CPU = torch.device("cpu")
FEW = ("llama-gqa", "qwen3-moe", "mixtral", "gpt2", "phi3")
"""Plain, with experts, with experts of other names, with a transposed matrix, with a fused one."""


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """saved(architecture): the directory of a model."""

    def save(architecture: str) -> str:
        architectures.build(architecture).save_pretrained(tmp_path)
        return str(tmp_path)

    return save


@pytest.mark.parametrize(
    "architecture",
    [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in architectures.CONFIGS],
)
def test_what_is_read_layer_by_layer_is_the_model(architecture: str, saved: Any) -> None:
    path = saved(architecture)
    whole, (model, files) = load_weights(path, CPU, option="model"), load_skeleton(path, CPU)
    assert model_facts(model, files=files) == model_facts(whole)
    assert model.generation_config.to_dict() == whole.generation_config.to_dict()
    inputs = architectures.prompt()
    with torch.no_grad():
        expected = whole(**inputs).logits
    elastic.wrap(model, places=small(8 << 20, f"cpu#{architecture}"), checkpoint=files, load_shards=[1])
    layers = range(len(find_decoder(model).layers))
    assert [form == "dropped" for form in model.elastic.form()] == [layer != 1 for layer in layers]
    with pytest.raises(StateError, match=r"layers.0|h.0"):
        model(**inputs)
    model.elastic.restore(layers)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, expected)
    assert elastic.unwrap(model) is model
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_read_is_in_the_dtype_that_is_asked_for(dtype: str, tmp_path: Path) -> None:
    architectures.build("llama-gqa").to(torch.bfloat16).save_pretrained(tmp_path)
    path = str(tmp_path)
    whole, (model, files) = load_weights(path, CPU, dtype, option="model"), load_skeleton(path, CPU, dtype)
    assert {p.dtype for p in (*whole.parameters(), *model.parameters())} == {getattr(torch, dtype)}
    elastic.wrap(model, places=small(8 << 20, "cpu#dtype"), checkpoint=files, load_shards=[1])
    model.elastic.restore(range(3))
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in whole.state_dict().items())
    elastic.unwrap(model)


def test_a_part_is_read_in_no_dtype_that_would_round_it(saved: Any) -> None:
    with pytest.raises(ConfigError, match=r"bfloat16 or what that holds exactly.*give another dtype"):
        load_skeleton(saved("llama-gqa"), CPU, "bfloat16")


def test_parts_come_from_the_files_and_the_ledger_has_just_them(saved: Any) -> None:
    path = saved("llama-gqa")
    model, files = load_skeleton(path, CPU)
    elastic.wrap(model, places=small(8 << 20, "cpu#part"), checkpoint=files, shards=2, load_shards=[0, 2])
    runtime = model.elastic
    assert runtime.shards_here == (frozenset({0}), frozenset({0}), frozenset())
    (place,) = runtime.status().places
    for layer, unit in enumerate(runtime.weights.layers):
        held = unit.shard_pages.pages(unit.shards_here) * place.page_bytes
        assert place.owners.get(f"layer:{layer}", 0) == held < unit.pages * place.page_bytes
    whole, parts = load_weights(path, CPU, option="model"), runtime.weights.part_tensors(0, (0,))
    for name, (tensor,) in parts.items():
        cut = runtime.weights.cut_plan(0).cuts[name]
        expected = whole.model.layers[0].get_parameter(name).narrow(cut.dim, 0, len(cut.rows[0][0]))
        assert torch.equal(tensor, expected)
    with pytest.raises(StateError, match="are dropped; have them back first"):
        elastic.unwrap(model)
    runtime.restore(range(3))
    elastic.unwrap(model)


def test_what_cannot_be_read_so_is_said(saved: Any, tmp_path: Path) -> None:
    path = saved("llama-gqa")
    model, files = load_skeleton(path, CPU)
    for options, words in (
        ({}, "the files of the model, where load_shards says what is read"),
        ({"checkpoint": files, "variants": ["int8"]}, "empty where load_shards leaves weights out"),
        ({"checkpoint": files, "load": 3}, "load_shards=3 cannot be; it must be a list of their numbers"),
        ({"checkpoint": files, "load": ["0", True]}, r"load_shards=\['0', True\] cannot be; it must be of 0 to 2"),
        ({"checkpoint": files, "load": [3]}, r"load_shards=\[3\] cannot be; it must be of 0 to 2"),
    ):
        load = options.pop("load", [0])
        with pytest.raises(ConfigError, match=words):
            elastic.wrap(model, places=small(8 << 20), load_shards=load, **options)  # type: ignore[arg-type]
    for name in list(files._files):
        if "down_proj" in name:
            del files._files[name]
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"intermediate_size": 48', '"intermediate_size": 49'))
    with pytest.raises(ConfigError, match=r"no model.layers.0.mlp.gate_proj.weight of shape \[49, 32\]"):
        load_skeleton(path, CPU)


def test_a_place_without_room_for_the_share_is_refused_with_nothing_left(saved: Any) -> None:
    model, files = load_skeleton(saved("llama-gqa"), CPU)
    with pytest.raises(CapacityError, match="too few free pages for layer:1"):
        elastic.wrap(model, places=small(88 << 10, "cpu#tight"), checkpoint=files, load_shards=[0, 1])


@pytest.mark.slow
def test_a_rank_never_has_more_memory_than_its_share_and_a_buffer(tmp_path: Path) -> None:
    out = in_fork(
        f"""
    import ctypes, re, threading, torch, transformers
    from transformers import LlamaConfig, LlamaForCausalLM
    from elastic.cluster.control.connection import queue_pair
    from elastic.cluster.rank.build import built
    from elastic.cluster.rank.spec import RankSpec
    from elastic.memory.pages.page_pool import PagePool
    from elastic.planning.sharding.share import Share
    M_MMAP_THRESHOLD = -3
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 << 10)  # else malloc keeps what was freed: 0 to 60 MiB
    config = LlamaConfig(vocab_size=64, hidden_size=512, intermediate_size=3072, num_hidden_layers=8,
                         num_attention_heads=8)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained({str(tmp_path)!r})
    options = {{"engine": {{"block_tokens": 16, "max_batch_tokens": 64}}, "wrap": {{"shards": 2}}}}

    def load(share):
        spec = RankSpec("r", {str(tmp_path)!r}, ("cpu#a=120MiB",), share=share, **options)
        with built(spec, queue_pair()[0]) as rank:
            runtime = rank.engine.runtime
            (place,) = runtime.status().places
            return sum(n for owner, n in place.owners.items() if owner.startswith("layer")) / 2**20

    def status(field):
        return int(re.search(field + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

    load(Share(stage=7, stages=8, part=1, parts=2))  # what is allocated once and for all
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    share = load(Share(part=1, parts=2))
    print(share, status("VmHWM") - before)
    """
    )
    share, peak = map(float, out.split()[-2:])
    assert 104 < share < 106, (
        "of 177 MiB in float32: half of the feed-forward networks, and the attention of all layers"
    )
    assert peak < share + 16, "what it has of the model, keys and values besides, and one run of 8 MiB"
