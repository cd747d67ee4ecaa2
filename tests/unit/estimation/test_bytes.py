"""Bytes that are estimated from a config, against what `wrap` and the engine really hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import elastic
from elastic.assets import MODEL_DIR
from elastic.engines.continuous import ContinuousEngine
from elastic.errors import ConfigError
from elastic.estimation.estimate import estimate
from elastic.estimation.kv_room import KVBlockCapacity, kv_shape_of
from elastic.estimation.model_layout import layout_of, meta_model
from elastic.estimation.weight_pages import WeightPages
from elastic.planning.estimate.configuration import FULL
from elastic.planning.estimate.paper import MemoryParts
from elastic.planning.estimate.performance import Load
from elastic.planning.sharding.share import even_stages
from elastic.quant.formats.base import KernelTarget
from support import architectures
from support.wrapped_model import PAGE, small

VARIANTS = ("int8", "int4", "int3", "2:4", "4:8", "sparse50", "ffn75", "heads75")
CPU = KernelTarget.of(torch.device("cpu"))


def pages_of(source: Any, page_bytes: int, dtype: torch.dtype = torch.float32) -> WeightPages:
    return WeightPages(layout_of(source, dtype), page_bytes, CPU)


def owners(model: Any) -> dict[str, int]:
    (place,) = model.elastic.status().places
    return {owner: nbytes // place.page_bytes for owner, nbytes in place.owners.items()}


@pytest.fixture(scope="module")
def inside() -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("variants", [VARIANTS[:4], VARIANTS[4:]], ids="-".join)
@pytest.mark.parametrize("page_bytes", [4096, 65536])
def test_a_wrapped_model_holds_the_estimated_pages_in_every_variant(
    inside: Any, variants: tuple[str, ...], page_bytes: int
) -> None:
    """From the config alone, to the page: layers, what is fixed, what is kept back, and what is left for caches."""
    pages = pages_of(MODEL_DIR, page_bytes)
    every = range(12)
    place = elastic.Place("cpu", torch.device("cpu"), 64 << 20, page_bytes)
    elastic.wrap(inside, places=place, variants=variants)
    try:
        held = owners(inside)
        assert sum(v for k, v in held.items() if k.startswith("fixed:")) == pages.fixed
        assert held["staging"] == max(pages.staging(variant, 1) for variant in variants)
        for variant in (FULL, *variants):
            if variant != FULL:
                inside.elastic.swap(every, variant)
            held = owners(inside)
            assert sum(v for k, v in held.items() if k.startswith("layer:")) == pages.layers(every, variant, 1), variant
        left = (64 << 20) // page_bytes - pages.fixed - pages.layers(every, variants[-1], 1) - held["staging"]
        assert inside.elastic.status().kv[0].maximum_bytes == left * page_bytes
    finally:
        elastic.unwrap(inside)


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt2", "gemma3", "gemma4", "deepseek-v3", "diffllama"])
def test_models_of_other_kinds_hold_what_their_configs_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts, Conv1D with biases, a head of its own or tied, dense layers before sparse ones, parameters that are
    drawn on the CPU whatever the default device."""
    drawn = transformers.DiffLlamaConfig(**architectures.GQA)
    monkeypatch.setitem(architectures.CONFIGS, "diffllama", lambda: drawn)
    pages = pages_of(architectures.CONFIGS[name](), PAGE)
    model = architectures.build(name)
    elastic.wrap(model, places=small(64 << 20), variants=("int8",))
    try:
        for variant in (FULL, "int8"):
            if variant != FULL:
                model.elastic.swap(range(3), variant)
            held = owners(model)
            layers = [held[f"layer:{index}"] for index in range(3)]
            assert layers == [pages.layers(range(i, i + 1), variant, 1) for i in range(3)]
        assert sum(v for k, v in held.items() if k.startswith("fixed:")) == pages.fixed
        assert held["staging"] == pages.staging("int8", 1)
    finally:
        elastic.unwrap(model)


@pytest.mark.parametrize(
    ("name", "form", "block"),
    [("llama-gqa", FULL, 16), ("qwen2-sliding", FULL, 16), ("qwen2-sliding", "int8", None), ("deepseek-v3", FULL, 16)],
)
def test_requests_find_the_room_that_is_estimated(name: str, form: str, block: int | None) -> None:
    """As many requests as are estimated get all of their blocks, and one more does not; with sliding layers too."""
    model = architectures.build(name)
    elastic.wrap(model, places=small(2 << 20))
    dtype = "auto" if form == FULL else form
    engine = ContinuousEngine(model, block_tokens=block, kv_cache_dtype=dtype, share_prefixes=False)
    try:
        config = model.config
        shape = kv_shape_of(config, 4, form)
        assert shape.block_bytes(engine.kv_format.block_tokens) == engine.kv_format.block_bytes
        room = KVBlockCapacity(config, block, PAGE, shape, 1, range(3))
        free = model.elastic.status().kv[0].maximum_bytes // PAGE
        for tokens in (40, 130):
            most = room.requests(free, tokens)
            admitted = 0
            names = [f"{tokens}-{number}" for number in range(most + 2)]
            for request in names:
                engine._blocks.expect([request], tokens)
                table = engine._blocks.admit(request, [0] * tokens, tokens, share=False)
                admitted += table is not None
            for request in names:
                engine._blocks.forget(request)
            assert admitted == most > 2
    finally:
        engine.stop()
        elastic.unwrap(model)


def test_a_stage_has_room_for_its_own_layers_only() -> None:
    config = architectures.CONFIGS["llama-gqa"]()
    shape = kv_shape_of(config, 4)
    whole, stage = (KVBlockCapacity(config, 16, PAGE, shape, 1, layers) for layers in (range(3), range(2, 3)))
    assert stage.pages(6, 100) * 3 == whole.pages(6, 100)
    assert stage.requests(60, 100) >= 3 * whole.requests(60, 100) > 0
    half = KVBlockCapacity(config, 16, PAGE, shape, 2, range(3))
    assert half.pages(60, 100) * 2 == whole.pages(60, 100)
    assert shape.block_bytes(16, 8) * 2 == shape.block_bytes(16)  # in two parts, which ranks share


def test_eight_bit_caches_hold_nearly_twice_sixteen_bit_ones() -> None:
    config = transformers.LlamaConfig(num_attention_heads=32, num_key_value_heads=8, hidden_size=4096)
    full, small_ = (
        KVBlockCapacity(config, None, 2 << 20, kv_shape_of(config, 2, form), 1, range(32)) for form in (FULL, "int8")
    )
    assert 1.9 < full.request_bytes(4096) / small_.request_bytes(4096) < 2
    with pytest.raises(ConfigError, match="kv='fp4' is not known"):
        kv_shape_of(config, 2, "fp4")


def test_layers_with_unlike_heads_of_keys_are_refused_as_the_engine_refuses_them() -> None:
    config = architectures.CONFIGS["gemma4"]()
    with pytest.raises(ConfigError, match="unlike heads of keys, 2 of 8, 2 of 16 elements"):
        kv_shape_of(config, 4)
    estimates = estimate(config, "cpu=1GiB", load=Load(16, 4), planned=True)
    assert {each.why_not.partition(":")[0] for each in estimates} == {
        "its layers have unlike heads of keys, 2 of 8, 2 of 16 elements"
    }


@pytest.mark.parametrize("name", ["inside", "qwen3-moe"])
def test_shares_of_a_layer_have_the_pages_that_wrap_gives_them(name: str) -> None:
    """Beside what is not cut, each rank holds its part, with the pages that it has in common with the next one."""
    source, model = (
        (MODEL_DIR, None) if name == "inside" else (architectures.CONFIGS[name](), architectures.build(name))
    )
    model = model or transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    pages = pages_of(source, PAGE)
    for tp in (2, 4):
        elastic.wrap(model, places=small(64 << 20), shards=tp)
        held = [max(layer.pages((part,)) for part in range(tp)) for layer in model.elastic.shard_pages]
        elastic.unwrap(model)
        assert held == [pages.layers(range(i, i + 1), FULL, tp) for i in range(len(held))]
        assert max(held) < pages.layers(range(1), FULL, 1)
        assert pages.layers(range(1), "int8", tp) < pages.layers(range(1), "int8", 1)
    assert pages.cut_share(pages.layout.kinds[0], 1) == 0 < pages.cut_share(pages.layout.kinds[0], 2) < 1
    with pytest.raises(ConfigError, match="is the most"):
        pages.layers(range(1), FULL, 512)


def test_layers_are_grouped_by_kind_and_large_models_need_no_memory() -> None:
    layout = layout_of(architectures.CONFIGS["gpt-oss"]())
    assert [kind.layers for kind in layout.kinds] == [(0, 2), (1,)]
    dense, sparse = layout_of(architectures.CONFIGS["deepseek-v3"]()).kinds
    assert (dense.layers, sparse.layers) == ((0,), (1, 2))
    assert dense.name != sparse.name
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536}
    huge = transformers.Qwen3MoeConfig(
        hidden_size=4096, num_hidden_layers=4, num_attention_heads=64, num_key_value_heads=4, **experts
    )
    assert {p.device.type for p in meta_model(huge).parameters()} == {"meta"}
    assert pages_of(huge, 2 << 20, torch.bfloat16).layers(range(4), FULL, 1) * (2 << 20) > 19 * 10**9
    with pytest.raises(ConfigError, match="int is no model"):
        meta_model(3)


def test_the_papers_sum_is_right_for_shares_and_too_small_for_stages() -> None:
    """Figure 8, solved for three footprints. N stages repeat what is fixed N - 1 times, and A_p is counted N times."""
    pages = pages_of(MODEL_DIR, PAGE)

    def of_ranks(tp: int, pp: int) -> list[int]:
        held = [pages.fixed + pages.layers(layers, FULL, tp) for layers in even_stages(12, pp)]
        return [each for each in held for _ in range(tp)]

    parts = MemoryParts.solve(*(sum(of_ranks(tp, pp)) for tp, pp in ((1, 1), (1, 2), (2, 1))))
    assert parts.footprint(1, 2) == sum(of_ranks(1, 2))
    assert parts.footprint(4, 1) == pytest.approx(sum(of_ranks(4, 1)), rel=0.02)
    for pp in (4, 6, 12):
        assert sum(of_ranks(1, pp)) - parts.footprint(1, pp) == (pp - 1) * pages.fixed - pp * pages.fixed / 2
    assert max(of_ranks(1, 5)) > 1.15 * sum(of_ranks(1, 5)) / 5  # three layers, of twelve at five
