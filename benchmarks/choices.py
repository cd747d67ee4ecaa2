"""Choices by the kind of device that are not measured at run time, beside their alternatives on this machine.

    python benchmarks/choices.py

The order of keys and values in memory (`kv_layout`; attention at 2,048 tokens, each order by its own fastest kernel),
that in a block of the engine (`block_layout`; steps of decoding requests, each of requests x tokens, with so many key
heads of so many query heads), whether the compiled kernel attends in such steps, and for new tokens of prompts
(`FEW_TOKENS`, `MOST_SEEN`), or torch's operators do, how much of keys and values these read at once (`READ_BYTES`),
what keeps slots that nobody wrote from them (`unwritten`), the page size (mapping and unmapping 64 MiB), the parts of
copies beside a model, and the pieces in which packed weights are expanded on a CPU. The ratio is the time of the choice
to that of the fastest: 1.00 where nothing is lost by it. Kernels of products, and of attention in `generate`, are not
here: those are measured when a model is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from common import arguments, finish, paired, ratio, show, table
from quantized_linear import CONFIGS
from torch.nn.functional import scaled_dot_product_attention

from elastic.config import Place
from elastic.engines.core.kv_state import BLOCK_SLOTS
from elastic.engines.executor import attention_metadata
from elastic.engines.executor.attention import BlockAttention
from elastic.engines.executor.attention_metadata import AttentionMetadata, MetadataBuilder
from elastic.engines.executor.block_layout import LAYOUTS, BlockLayout, BlockShape
from elastic.engines.executor.input_batch import BatchBlockTable, BatchTokens
from elastic.engines.executor.kernels.paged_attention import compiled_attention
from elastic.kvcache import decode_timing
from elastic.kvcache.decode_kernels import KERNELS
from elastic.memory.backends.memfd import DEFAULT_PAGE_BYTES
from elastic.memory.copy_engine import copy
from elastic.memory.pages.page_pool import PagePool
from elastic.memory.pages.virtual_range import VirtualRange
from elastic.memory.places import make_backend
from elastic.memory.rate_limit import RateLimiter
from elastic.quant.formats.base import KernelTarget, MatrixShape, format_of
from elastic.quant.kernels import cpu_dequant as cpu_pieces

MIB = 1 << 20
CPU = torch.device("cpu")
Works = dict[str, Callable[[], Any]]


def layouts(dtype: torch.dtype, queries: int) -> Works:
    """Attention of one token over 2,048 tokens of 4 key heads of 64, from memory that is not in cache."""

    def attend(order: str) -> Callable[[], Any]:
        shape = decode_timing.DecodeShape("this", dtype, queries, 64, 64, order)
        kernel = KERNELS[decode_timing.fastest(shape, 2048, CPU, 4)]
        inputs = cycle(decode_timing._inputs(shape, 2048, CPU, 4))
        return lambda: [kernel(*next(inputs), None, 0.125) for _ in range(8)]

    return {order: attend(order) for order in ("head_major", "token_major")}


def blocks(dtype: torch.dtype, requests: int, tokens: int, kv_heads: int, heads: int) -> Works:
    """Attention of one layer in a step of the engine: requests of so many tokens decode, by blocks in any order."""
    return {order: attention_step(order, dtype, requests, tokens, kv_heads, heads) for order in LAYOUTS}


def kernels(dtype: torch.dtype, requests: int, tokens: int, kv_heads: int, heads: int, new: int = 1) -> Works:
    """The same steps, by the compiled kernel and by torch's operators; `new`: of the tokens."""
    with patch.multiple(attention_metadata, FEW_TOKENS=new):
        return {
            name: attention_step("head_centric", dtype, requests, tokens, kv_heads, heads, new, compiled=compiled)
            for name, compiled in (("compiled", True), ("operators", False))
        }


def read_at_once(dtype: torch.dtype, requests: int, tokens: int, kv_heads: int, heads: int) -> Works:
    """The same steps, with so much of keys and values read at once."""

    def step(size: int) -> Callable[[], Any]:
        with patch.multiple(attention_metadata, READ_BYTES=size, MOST_READ_BYTES=size):
            return attention_step("head_centric", dtype, requests, tokens, kv_heads, heads, compiled=False)

    sizes = {f"{mib} MiB": mib * MIB for mib in (1, 2, 4, 8)}
    return {name: step(size) for name, size in (sizes | {"all": 1 << 62}).items()}


def attention_step(
    order: str,
    dtype: torch.dtype,
    requests: int,
    tokens: int,
    kv_heads: int,
    heads: int,
    new: int = 1,
    *,
    compiled: bool = True,
) -> Callable[[], Any]:
    layout, count = BlockLayout(BlockShape(BLOCK_SLOTS, kv_heads, 64), order), requests * tokens // BLOCK_SLOTS
    kernel = compiled_attention(layout, dtype, CPU) if compiled else None
    attention = BlockAttention(layout, kernel)
    metadata = batch_metadata(layout, requests, tokens, new, dtype, kernel is not None)
    nbytes = count * layout.block_elements * dtype.itemsize
    caches = cycle(torch.randn(-(-64 * MIB // nbytes), count * layout.block_elements, dtype=dtype))  # of more layers
    parts = layout.parts(torch.zeros(1, dtype=torch.long))
    query, keys, values = (torch.randn(n, requests * new, 64, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    return lambda: [attention.attend(query, keys, values, next(caches), parts, metadata, 0.125) for _ in range(8)]


def batch_metadata(
    layout: BlockLayout, requests: int, tokens: int, new: int, dtype: torch.dtype, compiled: bool
) -> AttentionMetadata:
    """Describe a step of requests that have so many tokens each with their new ones, in blocks in any order."""
    table = BatchBlockTable(BLOCK_SLOTS, None)
    for row, blocks in enumerate(torch.randperm(requests * tokens // BLOCK_SLOTS).view(requests, -1).numpy()):
        table.begin(row)
        table.extend(row, blocks)
    starts, counts = np.full(requests, tokens - new), np.full(requests, new)
    builder = MetadataBuilder(layout, table, CPU, dtype, compiled=compiled)
    return builder.build(BatchTokens(np.arange(requests), starts, counts))


def unwritten(dtype: torch.dtype, requests: int, tokens: int, heads: int) -> Works:
    """What keeps slots that nobody wrote from a step of decoding requests, whose last blocks hold one token each.

    `zeros`: the block is cleared, here at each step, not once for its tokens. `masked`: what is read of keys and
    values is 0 behind the last token, in each layer at each step.
    """
    layout, count = BlockLayout(BlockShape(BLOCK_SLOTS, heads, 64), "head_centric"), requests * tokens // BLOCK_SLOTS
    tables = torch.randperm(count).view(requests, -1)
    nbytes = count * layout.block_elements * dtype.itemsize
    caches = cycle(torch.randn(-(-64 * MIB // nbytes), count * layout.block_elements, dtype=dtype))
    parts = layout.parts(torch.zeros(1, dtype=torch.long))
    read = layout.read_index(tables, parts.places)
    hidden = torch.arange(tokens) > tokens - BLOCK_SLOTS
    mask = torch.zeros(tokens, dtype=dtype).masked_fill_(hidden, -torch.inf).expand(requests, 1, 1, tokens)
    query = torch.randn(requests, heads, 1, 64, dtype=dtype)

    def zeros() -> torch.Tensor:
        cache = next(caches)
        cache.view(-1, layout.block_elements).index_fill_(0, tables[:, -1], 0)
        keys, values = layout.read(cache, read)
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask)

    def masked() -> torch.Tensor:
        keys, values = layout.read(next(caches), read)
        keys, values = (each.masked_fill(hidden[:, None], 0) for each in (keys, values))
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask)

    return {work.__name__: lambda work=work: [work() for _ in range(8)] for work in (zeros, masked)}  # type: ignore[misc]


def pages() -> Works:
    """Mapping and unmapping 64 MiB through the ledger."""

    def turn(page_bytes: int) -> Callable[[], Any]:
        count = 64 * MIB // page_bytes
        backend = make_backend(Place("cpu", CPU, page_bytes=page_bytes))
        pool = PagePool(f"cpu#{page_bytes}", backend, count * page_bytes, ready_pages=0)
        range_ = VirtualRange(pool, count)

        def work() -> None:
            range_.map(0, pool.allocate("kv", count))
            pool.free(range_.unmap(0, count))

        return work

    return {f"{size // 1024} KiB": turn(size) for size in (16 << 10, 64 << 10, 256 << 10, 2 * MIB)}


def copies() -> Works:
    """Copying 64 MiB in parts, as beside a model that computes."""
    source, target = (torch.zeros(64 * MIB, dtype=torch.uint8) for _ in range(2))

    def in_parts(size: int) -> Callable[[], Any]:
        return lambda: [copy(target[i : i + size], source[i : i + size]) for i in range(0, 64 * MIB, size)]

    return {f"{size // MIB} MiB": in_parts(size) for size in (MIB, 4 * MIB, 16 * MIB, 64 * MIB)}


def pieces() -> Works:
    """64 tokens through an int4 matrix, 2048 -> 2048, that is expanded in pieces."""
    config, matrix, target = CONFIGS["int4"], MatrixShape(2048, 2048), KernelTarget.of(CPU)
    form = format_of(config)(config, matrix, target)
    parts = form.quantize(torch.randn(2048, 2048), None)
    path = form.paths(parts)["expanded"]
    x = torch.randn(64, 2048)

    def expand(size: int) -> Callable[[], Any]:
        def work() -> None:
            cpu_pieces.PIECE = size
            path(x, parts)

        return work

    return {f"2^{power}": expand(1 << power) for power in (16, 17, 18, 19, 20)}


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    few = attention_metadata.FEW_TOKENS
    piece = f"2^{cpu_pieces.PIECE.bit_length() - 1}"
    cases: dict[str, tuple[str, Works]] = {
        "order of keys, float32 MHA": ("head_major", layouts(torch.float32, 1)),
        "order of keys, float32 GQA": ("head_major", layouts(torch.float32, 3)),
        "order of keys, bfloat16 MHA": ("head_major", layouts(torch.bfloat16, 1)),
        "order of keys, bfloat16 GQA": ("head_major", layouts(torch.bfloat16, 3)),
        **{
            f"order of a block, {name} {requests} x {tokens}, {kv_heads} of {heads}": (
                "head_centric",
                blocks(dtype, requests, tokens, kv_heads, heads),
            )
            for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
            for requests, tokens, kv_heads, heads in (
                (8, 256, 2, 4),
                (8, 1024, 8, 8),
                (8, 1024, 2, 16),
                (1, 4096, 8, 8),
            )
        },
        **{
            f"attention of a step, {name} {requests} x {tokens}, {kv_heads} of {heads}": (
                "compiled",
                kernels(dtype, requests, tokens, kv_heads, heads),
            )
            for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
            for requests, tokens, kv_heads, heads in (
                (1, 96, 4, 12),
                (16, 96, 4, 12),
                (16, 512, 12, 12),
                (1, 4096, 8, 8),
                (8, 1024, 2, 16),
            )
        },
        **{
            f"attention of a prompt, {name} {new} new of {tokens}, {kv_heads} of {heads}": (
                "compiled" if new <= few or tokens <= attention_metadata.MOST_SEEN else "operators",
                kernels(dtype, 1, tokens, kv_heads, heads, new),
            )
            for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
            for new, tokens in ((32, 32), (128, 128), (128, 384), (16, 2048), (64, 2048), (512, 512))
            for kv_heads, heads in ((4, 12), (8, 8))
        },
        **{
            f"keys and values at once, {name} {requests} x {tokens}, {kv_heads} of {heads}": (
                f"{attention_metadata.READ_BYTES // MIB} MiB",
                read_at_once(dtype, requests, tokens, kv_heads, heads),
            )
            for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
            for requests, tokens, kv_heads, heads in (
                (16, 96, 12, 12),
                (30, 320, 8, 8),
                (64, 128, 4, 8),
                (8, 1024, 8, 8),
            )
        },
        **{
            f"slots that nobody wrote, {name} {requests} x {tokens}": ("zeros", unwritten(dtype, requests, tokens, 8))
            for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
            for requests, tokens in ((8, 256), (8, 1024))
        },
        "page size": (f"{DEFAULT_PAGE_BYTES // 1024} KiB", pages()),
        "part of a copy": (f"{RateLimiter.CHUNK // MIB} MiB", copies()),
        "expanded piece": (piece, pieces()),
    }
    results, rows = [], []
    for name, (chosen, works) in cases.items():
        times = paired(works, "cpu", options.rounds)
        best = min(times, key=lambda kind: sorted(times[kind])[options.rounds // 2])
        result = {"choice": name, "chosen": chosen, "fastest": best, "ratio": ratio(times[chosen], times[best])}
        results.append(
            result | {"others": {kind: ratio(t, times[chosen]) for kind, t in times.items() if kind != chosen}}
        )
        rows.append([name, chosen, best, show(result["ratio"])])
    table(["choice", "chosen", "fastest here", "chosen / fastest"], rows)
    finish("choices", options.device, results)


if __name__ == "__main__":
    main()
