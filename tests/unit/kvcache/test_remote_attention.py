"""Attention over keys and values on another device: who travels, and that it changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import elastic
from elastic.kvcache import attention, remote_attention
from elastic.kvcache.attention import elastic_sdpa
from elastic.kvcache.layers import elastic_layer
from elastic.kvcache.remote_attention import attend_on_cache_device, ship_query_bytes
from support.architectures import build, prompt


def states(batch: int, heads: int, tokens: int, dim: int) -> torch.Tensor:
    return torch.randn(batch, heads, tokens, dim, generator=torch.Generator().manual_seed(tokens))


def test_what_travels_is_counted_in_bytes() -> None:
    query, value = states(2, 8, 5, 16), states(2, 2, 40, 12)
    mask = torch.ones(2, 1, 5, 40, dtype=torch.bool)
    assert ship_query_bytes(query, value, None) == 4 * 2 * 8 * 5 * (16 + 12)
    assert ship_query_bytes(query, value, mask) - ship_query_bytes(query, value, None) == mask.nbytes


class Travels:
    """Notes what is sent where, and leaves it where it is."""

    def __init__(self, monkeypatch: Any) -> None:
        self.sent: list[tuple[int, ...]] = []
        for module in (remote_attention, elastic_layer):
            monkeypatch.setattr(module, "to_device", self.note)

    def note(self, given: Any, device: torch.device) -> Any:
        if isinstance(given, torch.Tensor):
            self.sent.append(tuple(given.shape))
        return given


@pytest.mark.parametrize(("queries", "tokens"), [(1, 64), (64, 64), (7, 400), (1, 1)])
@pytest.mark.parametrize("masked", [False, True])
def test_whatever_is_less_travels_and_the_result_is_the_same(
    queries: int, tokens: int, masked: bool, monkeypatch: Any
) -> None:
    module: Any = nn.Module()
    module.num_key_value_groups, module.is_causal, module.layer_idx = 4, False, 0
    query, key, value = states(2, 8, queries, 16), states(2, 2, tokens, 16), states(2, 2, tokens, 16)
    mask = torch.arange(queries * tokens).view(queries, tokens) % 7 < 5 if masked else None
    mask = mask.expand(2, 1, queries, tokens).contiguous() if mask is not None else None
    expected = elastic_sdpa(module, query, key, value, mask, scaling=0.3)[0]
    travels = Travels(monkeypatch)
    assert torch.equal(attend_on_cache_device(elastic_sdpa, module, query, key, value, mask, scaling=0.3), expected)
    if key.nbytes + value.nbytes < ship_query_bytes(query, value, mask):
        assert travels.sent == [tuple(key.shape), tuple(value.shape)]
    else:
        assert travels.sent == [tuple(t.shape) for t in (query, mask) if t is not None]


def test_one_token_visits_a_long_context_and_a_prompt_fetches_its_own() -> None:
    key, one, prompt = states(4, 2, 512, 64), states(4, 8, 1, 64), states(4, 8, 512, 64)
    assert ship_query_bytes(one, key, None) < 2 * key.nbytes < ship_query_bytes(prompt, key, None)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_keys_elsewhere_are_left_to_our_attention_and_sent_to_any_other(
    implementation: str, wrapped: Any, monkeypatch: Any
) -> None:
    model = build("llama-gqa")
    model.set_attn_implementation(implementation)
    wrapped(model)
    layer = model(**prompt()).past_key_values.layers[0]
    far = torch.empty(1, 2, 25, 8, device="meta")
    monkeypatch.setattr(layer._lease, "write", lambda *args: (far, far))
    travels = Travels(monkeypatch)
    views = layer.update(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8))
    assert travels.sent == ([] if implementation == "sdpa" else [(1, 2, 25, 8)] * 2)
    assert views == (far, far)


def test_our_attention_looks_where_keys_are(monkeypatch: Any) -> None:
    query, far = states(1, 4, 1, 8), torch.empty(1, 2, 25, 8, device="meta")
    given: list[Any] = []
    monkeypatch.setattr(
        attention, "attend_on_cache_device", lambda *args, **kwargs: given.extend((args, kwargs)) or query
    )
    assert elastic_sdpa(nn.Module(), query, far, far, None, scaling=0.5)[0] is query
    assert given[0][0] is elastic_sdpa
    assert given[1] == {"dropout": 0.0, "scaling": 0.5}


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("architecture", "implementation"),
    [(name, "eager") for name in ("llama-gqa", "gpt-oss", "deepseek-v3")]
    + [(name, "sdpa") for name in ("llama-gqa", "deepseek-v3")],  # gpt-oss has none
)
def test_kv_lies_on_a_cpu_and_weights_on_a_gpu(architecture: str, implementation: str, wrapped: Any) -> None:
    model = build(architecture, device="cuda:0")
    model.set_attn_implementation(implementation)
    inputs = prompt(3, device="cuda:0")
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**inputs, **options)
    logits = model(**inputs).logits
    rt = wrapped(model, ["cuda:0=1GiB", elastic.Place("cpu", torch.device("cpu"), 64 << 20, page_bytes=4096)]).elastic
    cache = model(**inputs).past_key_values
    rt.migrate_kv(range(3), "cpu")
    assert all(layer.keys.device.type == "cpu" for layer in cache.layers)
    torch.testing.assert_close(model(**inputs).logits, logits, rtol=1e-3, atol=1e-3)
    assert torch.equal(model.generate(**inputs, **options), expected)
    rt.migrate_kv([0, 2], "cuda:0")
    assert torch.equal(model.generate(**inputs, **options), expected)
    assert [layer.keys.device.type for layer in cache.layers] == ["cuda", "cpu", "cuda"]
    rt.check()
