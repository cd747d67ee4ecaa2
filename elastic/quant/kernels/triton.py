"""A product with a matrix in 8, 4 or 3 bits that expands weights in registers. Imports triton: import it where needed.

The layout of the bytes is that of `cuda_layout`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def _product(  # type: ignore[no-untyped-def]  # triton reads annotations, and knows no globals in them but its own
    x,
    packed,
    scales,
    y,
    tokens,
    outputs,
    inputs,
    group,
    BITS: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
) -> None:
    """Write y[m, n] = sum of x[m, k] * weight[n, k].

    BLOCK_K divides the group, so that a block has one scale for each output.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_m, in_n = m < tokens, n < outputs
    row = packed + n.to(tl.int64)[None, :] * (inputs * BITS // 8)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, inputs, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        values = tl.load(x + m.to(tl.int64)[:, None] * inputs + k[None, :], mask=in_m[:, None], other=0.0)
        if BITS == 8:
            codes = tl.load(row + k[:, None], mask=in_n[None, :], other=0).to(tl.int32)
        elif BITS == 4:
            codes = tl.load(row + k[:, None] // 2, mask=in_n[None, :], other=0).to(tl.int32)
            codes = codes >> (k[:, None] % 2 * 4) & 15
        else:
            lower = tl.load(row + k[:, None] // 4, mask=in_n[None, :], other=0).to(tl.int32)
            upper = tl.load(row + inputs // 4 + k[:, None] // 8, mask=in_n[None, :], other=0).to(tl.int32)
            codes = (lower >> (k[:, None] % 4 * 2) & 3) | (upper >> (k[:, None] % 8) & 1) << 2
        pair = scales + ((start // group) * outputs + n) * 2
        scale = tl.load(pair, mask=in_n, other=0.0).to(tl.float32)
        offset = tl.load(pair + 1, mask=in_n, other=0.0).to(tl.float32)
        weights = (codes - (1 << (BITS - 1))).to(tl.float32) * scale[None, :] + offset[None, :]
        total = tl.dot(values, weights.to(values.dtype), total, input_precision="ieee")
    target = y + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


_kernel = triton.jit(_product)


def block_sizes(tokens: int, group: int) -> tuple[int, int, int]:
    """Return how many tokens, outputs and inputs the kernel multiplies at a time; the inputs divide the group."""
    m, n = (16, 32) if tokens <= 16 else (64, 64)
    return m, n, min(group & -group, 64)


def product(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Multiply x: [tokens, inputs], float32, bfloat16 or float16; returns [tokens, outputs] in the same dtype.

    packed: uint8 [outputs, inputs * bits / 8]. scales: bfloat16 [inputs / group, outputs, 2]. Sums are in float32;
    weights are rounded to the dtype of x, as in a plain product. Shapes are not checked.
    """
    tokens, inputs = x.shape
    outputs = packed.shape[0]
    block_m, block_n, block_k = block_sizes(tokens, group)
    y = x.new_empty(tokens, outputs)
    grid = (triton.cdiv(tokens, block_m), triton.cdiv(outputs, block_n))
    with torch.cuda.device(x.device if x.is_cuda else -1):  # it may be another than the present one
        _kernel[grid](
            x.contiguous(),
            packed,
            scales,
            y,
            tokens,
            outputs,
            inputs,
            group,
            BITS=bits,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
        )
    return y
