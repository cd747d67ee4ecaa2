"""The attention of one new token: what its kernels compute, and which one is taken."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic.errors import ConfigError
from elastic.kvcache import decode_table, decode_timing
from elastic.kvcache.attention import elastic_sdpa
from elastic.kvcache.decode_kernels import KERNELS
from elastic.kvcache.decode_table import FILE, MEASURED_AT, DecodeKernelTable
from elastic.kvcache.decode_timing import DecodeShape, fastest
from elastic.runtime import installation
from support.architectures import build, prompt

CPU = torch.device("cpu")
SHAPE = DecodeShape("some processor", torch.float32, 2, 8, 8, "head_major")


def states(order: str, heads: int = 3, tokens: int = 50, dim: int = 16, batch: int = 2) -> torch.Tensor:
    """Keys or values [batch, heads, tokens, dim], in room for more tokens where the order leaves some."""
    if order == "token_major":
        return torch.randn(1, tokens, heads, dim).transpose(1, 2)
    return torch.randn(batch, heads, tokens + 14, dim)[:, :, :tokens]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """timed(sdpa=1.0, …): from now on kernels seem to take so many seconds; returns the calls."""

    def pretend(**seconds: float) -> list[str]:
        calls: list[str] = []

        def take(work: Any, *_: Any) -> float:
            calls.append(work.func.__name__)
            return seconds[work.func.__name__]

        monkeypatch.setattr(decode_timing, "seconds_of", take)
        monkeypatch.setattr(decode_table, "table", DecodeKernelTable())
        return calls

    return pretend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", ["head_major", "token_major"])
@pytest.mark.parametrize("masked", [None, "bool", "additive"])
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_is_as_exact_as_the_stock_one(
    name: str, masked: str | None, order: str, dtype: torch.dtype
) -> None:
    key, value = states(order).to(dtype), states(order).to(dtype)
    query = torch.randn(key.shape[0], 3, 4, 16).to(dtype)
    mask = None
    if masked is not None:
        visible = torch.ones(key.shape[0], 1, 1, 50, dtype=torch.bool)
        visible[0, ..., :7] = False
        mask = (
            visible if masked == "bool" else torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, -torch.inf)
        )
    exact = _stock(query.double(), key.double(), value.double(), mask.double() if masked == "additive" else mask)
    rounded = 4 * torch.finfo(dtype).eps * float(value.abs().max())  # weights sum to 1: errors scale with the values
    allowed = max(2 * float((_stock(query, key, value, mask).double() - exact).abs().max()), rounded)
    out = KERNELS[name](query, key, value, mask, 0.3)
    assert out.shape == (key.shape[0], 3, 4, 16)
    assert out.dtype == dtype
    assert float((out.double() - exact).abs().max()) <= allowed


@pytest.mark.parametrize("scaling", [128**-0.5, 0.3])
@pytest.mark.parametrize("name", KERNELS)
def test_products_beyond_float16_are_scaled_before_they_are_infinite(name: str, scaling: float) -> None:
    value, key = states("head_major", dim=128).half(), 24 * states("head_major", dim=128).sign().half()
    query = key[:, :, 7:11].clone()  # 128 * 24 ** 2 is 73,728
    assert torch.equal(KERNELS[name](query, key, value, None, scaling), value[:, :, 7:11])


@pytest.mark.parametrize("masked", ["bool", "additive"])
@pytest.mark.parametrize("name", KERNELS)
def test_a_token_that_sees_nothing_gets_zeros(name: str, masked: str) -> None:
    key, value, query = states("head_major"), states("head_major"), torch.randn(2, 3, 4, 16)
    mask = torch.ones(2, 1, 1, 50, dtype=torch.bool)
    mask[0] = False
    if masked == "additive":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    out = KERNELS[name](query, key, value, mask, 0.3)
    assert not out[0].any()
    assert out[1].all()


@pytest.mark.parametrize("name", KERNELS)
def test_padding_that_comes_token_by_token_leaves_no_nan_in_the_cache(
    name: str, wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = build("llama-gqa"), prompt(batch=3, length=12)
    expected = _token_by_token(model, **inputs)
    monkeypatch.setattr(decode_table.table, "choose", lambda *asked: name)
    torch.testing.assert_close(_token_by_token(wrapped(model), **inputs), expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def _token_by_token(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The last logits."""
    past = None
    for n in range(1, input_ids.shape[1] + 1):
        out = model(input_ids[:, n - 1 : n], attention_mask=attention_mask[:, :n], past_key_values=past, use_cache=True)
        past = out.past_key_values
    return out.logits


def _stock(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_is_chosen_by_time_and_not_by_the_type_of_the_device(timed: Any, name: str) -> None:
    calls = timed(**(dict.fromkeys(KERNELS, 1.0) | {name: 0.5}))
    assert DecodeKernelTable().choose(SHAPE, 100, CPU, 2) == name
    assert set(calls) == set(KERNELS)


def test_a_near_tie_goes_to_the_stock_kernel(timed: Any) -> None:
    timed(sdpa=1.0, key_by_query=0.97, query_by_key=0.96)
    assert DecodeKernelTable().choose(SHAPE, 100, CPU, 2) == "sdpa"


def test_a_choice_is_made_once_for_each_range_of_lengths(timed: Any) -> None:
    table, calls = DecodeKernelTable(), timed(sdpa=1.0, key_by_query=0.5, query_by_key=2.0)
    first = [table.choose(SHAPE, tokens, CPU, 2) for tokens in (1, 256, 257, 1024, 5000, 100_000)]
    assert first == ["key_by_query"] * 6
    measured = len(calls)
    timed(sdpa=0.1, key_by_query=0.5, query_by_key=2.0)
    assert [table.choose(SHAPE, tokens, CPU, 2) for tokens in (3, 600, 9000)] == ["key_by_query"] * 3
    assert len(calls) == measured
    assert table.choose(SHAPE, 2000, CPU, 2) == "sdpa"  # a range that was not asked for before


def test_slow_kernels_are_left_out_after_their_first_timing(timed: Any) -> None:
    calls = timed(sdpa=1.0, key_by_query=5.0, query_by_key=1.2)
    fastest(SHAPE, 128, CPU, 2)
    assert calls.count("key_by_query") < calls.count("sdpa")


def test_kernels_are_really_timed_within_a_few_rounds() -> None:
    assert fastest(SHAPE, 128, CPU, 2) in KERNELS
    assert fastest(SHAPE._replace(order="token_major", value_dim=4), 512, CPU, 5) in KERNELS


@pytest.mark.parametrize(("seconds", "rounds"), [(1e-4, 4), (1.0, 2)])
def test_a_choice_takes_few_rounds_and_two_where_each_takes_long(
    seconds: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that warms up among them."""
    now, calls = [0.0], list[str]()

    def take(work: Any, *_: Any) -> float:
        calls.append(work.func.__name__)
        now[0] += seconds
        return seconds

    monkeypatch.setattr(decode_timing, "seconds_of", take)
    monkeypatch.setattr(decode_timing.time, "perf_counter", lambda: now[0])
    fastest(SHAPE, 128, CPU, 2)
    assert {name: calls.count(name) for name in KERNELS} == dict.fromkeys(KERNELS, rounds)


@pytest.mark.parametrize("tokens", MEASURED_AT)
@pytest.mark.parametrize("kv_heads", [1, 8, 128])
@pytest.mark.parametrize("dim", [64, 256])
def test_what_a_choice_is_measured_on_is_bounded(dim: int, kv_heads: int, tokens: int) -> None:
    shape = SHAPE._replace(dim=dim, value_dim=dim)
    inputs = decode_timing._inputs(shape, tokens, CPU, kv_heads)
    head = (tokens + decode_timing.GAP) * 2 * dim * 4
    attended = [key.shape[1] * head for _, key, _ in inputs]
    assert max(attended) <= max(decode_timing.HEAD_BYTES, 2 * head)
    assert sum(attended) <= max(decode_timing.ROTATED_BYTES, attended[0])
    assert len(inputs) <= (decode_timing.ROUNDS + 1) * len(KERNELS), "more than are timed"


def test_without_memory_to_measure_the_stock_kernel_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(decode_timing, "_inputs", fail)
    assert fastest(SHAPE, 128, CPU, 2) == "sdpa"


@pytest.mark.parametrize("name", KERNELS)
def test_one_token_is_attended_to_by_the_chosen_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    kernels = {kernel: _spying(kernel, called) for kernel in KERNELS}
    monkeypatch.setattr(decode_table, "KERNELS", kernels)
    monkeypatch.setattr(decode_table, "fastest", lambda *_: name)
    monkeypatch.setattr("elastic.kvcache.attention.table", DecodeKernelTable())
    key, value = states("head_major"), states("head_major")
    elastic_sdpa(nn.Module(), torch.randn(2, 6, 1, 16), key, value, None, scaling=0.3)
    assert called == [name]


def _spying(name: str, called: list[str]) -> Any:
    def kernel(*args: Any) -> torch.Tensor:
        called.append(name)
        return KERNELS[name](*args)

    return kernel


def test_rows_that_do_not_merge_take_the_stock_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batched products would copy a batch of token-major rows."""
    monkeypatch.setattr(decode_table, "fastest", lambda *_: pytest.fail("nothing to choose from"))
    key = torch.randn(2, 50, 3, 16).transpose(1, 2)
    query = torch.randn(2, 3, 2, 16)
    assert torch.equal(DecodeKernelTable().attend(query, key, key, None, 0.3), _stock(query, key, key, None))


def test_a_saved_table_gives_the_same_kernels_again(tmp_path: Path, timed: Any) -> None:
    table, path = DecodeKernelTable(), tmp_path / "kept" / FILE
    timed(sdpa=1.0, key_by_query=0.5, query_by_key=2.0)
    table.choose(SHAPE, 100, CPU, 2)
    table.choose(SHAPE._replace(processor="another"), 100, CPU, 2)
    table.save(path, ["some processor"])
    timed(sdpa=1.0, key_by_query=2.0, query_by_key=0.5)
    again = DecodeKernelTable()
    again.load(path)
    assert again.choose(SHAPE, 100, CPU, 2) == "key_by_query"
    assert again.choose(SHAPE._replace(processor="another"), 100, CPU, 2) == "query_by_key"
    again.save(path, ["another"])  # what other processors measured stays in the file
    assert {row["processor"] for row in json.loads(path.read_text())} == {"some processor", "another"}


def test_a_table_that_cannot_be_saved_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ConfigError, match=r"cannot be written: no space"):
        DecodeKernelTable().save(tmp_path / FILE, ["some processor"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    ["", "{", "{}", "[1]", '[{"processor": "x"}]', '[{"kernels": []}]'],
)
def test_a_damaged_table_is_refused_with_the_remedy(tmp_path: Path, text: str) -> None:
    path = tmp_path / FILE
    path.write_text(text)
    with pytest.raises(ConfigError, match="delete"):
        DecodeKernelTable().load(path)


@pytest.mark.parametrize("field", DecodeShape._fields)
def test_a_row_of_a_shape_that_cannot_be_looked_up_is_refused(tmp_path: Path, timed: Any, field: str) -> None:
    timed(sdpa=1.0, key_by_query=0.5, query_by_key=2.0)
    table, path = DecodeKernelTable(), tmp_path / FILE
    table.choose(SHAPE, 100, CPU, 2)
    table.save(path, ["some processor"])
    (row,) = json.loads(path.read_text())
    path.write_text(json.dumps([row | {field: [row[field]]}]))
    with pytest.raises(ConfigError, match="delete"):
        DecodeKernelTable().load(path)
    if field == "processor":
        with pytest.raises(ConfigError, match="delete"):
            table.save(path, ["some processor"])


def without_a_kernel(row: dict[str, Any]) -> None:
    row["among"].remove("query_by_key")


def with_another_kernel(row: dict[str, Any]) -> None:
    row["among"].append("no_such_kernel")
    row["kernels"] = dict.fromkeys(row["kernels"], "no_such_kernel")


def as_written_before(row: dict[str, Any]) -> None:
    del row["among"]


def of_other_lengths(row: dict[str, Any]) -> None:
    row["kernels"] = {"100": "key_by_query"}


@pytest.mark.parametrize("change", [without_a_kernel, with_another_kernel, as_written_before, of_other_lengths])
def test_what_was_chosen_among_other_kernels_or_lengths_is_measured_anew(
    tmp_path: Path, timed: Any, change: Callable[[dict[str, Any]], None]
) -> None:
    timed(sdpa=1.0, key_by_query=0.5, query_by_key=2.0)
    table, path = DecodeKernelTable(), tmp_path / FILE
    table.choose(SHAPE, 100, CPU, 2)
    table.save(path, ["some processor"])
    rows = json.loads(path.read_text())
    change(*rows)
    path.write_text(json.dumps(rows))
    timed(sdpa=1.0, key_by_query=0.8, query_by_key=0.5)
    again = DecodeKernelTable()
    again.load(path)
    assert again.choose(SHAPE, 100, CPU, 2) == "query_by_key"


def test_a_kernel_that_it_was_not_chosen_among_is_refused(tmp_path: Path, timed: Any) -> None:
    timed(sdpa=1.0, key_by_query=0.5, query_by_key=2.0)
    table, path = DecodeKernelTable(), tmp_path / FILE
    table.choose(SHAPE, 100, CPU, 2)
    table.save(path, ["some processor"])
    (row,) = json.loads(path.read_text())
    row["kernels"] = dict.fromkeys(row["kernels"], "no_such_kernel")
    path.write_text(json.dumps([row]))
    with pytest.raises(ConfigError, match="no_such_kernel"):
        DecodeKernelTable().load(path)


def begin_with_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    table = DecodeKernelTable()
    for module in (decode_table, installation):
        monkeypatch.setattr(module, "table", table)


def test_kernels_are_kept_beside_variants(tmp_path: Path, wrapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_with_no_table(monkeypatch)
    model = wrapped(build("llama-gqa"), variants=("int8",), variant_cache=tmp_path)
    model.elastic.check()
    kept = (tmp_path / FILE).read_text()
    assert json.loads(kept)
    begin_with_no_table(monkeypatch)
    monkeypatch.setattr(decode_table, "fastest", lambda *_: pytest.fail("measured again"))
    wrapped(build("llama-gqa"), variants=("int8",), variant_cache=tmp_path)
    assert (tmp_path / FILE).read_text() == kept
