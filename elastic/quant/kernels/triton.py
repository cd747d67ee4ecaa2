"""Kernels of our own: packed matrices are multiplied, or expanded for a plain product. Imports triton; import it where
it is needed.

`product` expands weights in registers, again for each block of tokens: for many tokens, writing them down once and
reading them costs less. The layouts of the bytes are those of `cuda_layout` and `sparse_layout`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

AT_A_TIME = (8, 256)
"""Outputs and inputs that are expanded together."""


def _codes_at(row, k, inside, inputs, BITS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Read the codes of some inputs from rows that begin at pointers; both broadcast to the shape of `inside`, bool."""
    if BITS == 8:
        codes = tl.load(row + k, mask=inside, other=0).to(tl.int32)
    elif BITS == 4:
        codes = tl.load(row + k // 2, mask=inside, other=0).to(tl.int32) >> (k % 2 * 4) & 15
    else:
        lower = tl.load(row + k // 4, mask=inside, other=0).to(tl.int32)
        upper = tl.load(row + inputs // 4 + k // 8, mask=inside, other=0).to(tl.int32)
        codes = (lower >> (k % 4 * 2) & 3) | (upper >> (k % 8) & 1) << 2
    return codes


def _weights_of(codes, pair, inside, BITS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Return the weights of codes, float32, by the scales and offsets that lie in pairs at pointers.

    Offsets are whole numbers of scales, rounded to bfloat16: the weight is exact with that number.
    """
    scale = tl.load(pair, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(pair + 1, mask=inside, other=0.0).to(tl.float32)
    shift = tl.floor(offset / tl.where(scale == 0.0, 1.0, scale) + 0.5)
    return ((codes - (1 << (BITS - 1))).to(tl.float32) + shift) * scale


codes_at, weights_of = triton.jit(_codes_at), triton.jit(_weights_of)


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
        codes = codes_at(row, k[:, None], in_n[None, :], inputs, BITS)
        pair = scales + ((start // group) * outputs + n) * 2
        weights = weights_of(codes, pair[None, :], in_n[None, :], BITS)
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


def _expand_codes(  # type: ignore[no-untyped-def]
    packed,
    scales,
    y,
    outputs,
    inputs,
    group,
    start,
    stop,
    BITS: tl.constexpr,  # noqa: N803
    PAIRS: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
) -> None:
    """Write y[n - start, k] = weight[n, k] for the outputs of this program.

    PAIRS: of words of torch's int4 layout, side by side; 0: codes lie row by row.
    """
    n = start + tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (n < stop)[:, None] & (k < inputs)[None, :]
    row = n.to(tl.int64)[:, None]
    if PAIRS == 0:
        codes = codes_at(packed + row * (inputs * BITS // 8), k[None, :], inside, inputs, BITS)
    else:
        block, within = k // 32, k % 32
        thread = (row % 8) * 4 + (within % 8 // 2)[None, :]
        words = (row // 8 * (inputs // 32 // PAIRS) + (block // PAIRS)[None, :]) * 32 + thread
        shift = 4 * (within // 8 + within % 2 * 4)
        codes = tl.load(packed + words * PAIRS + (block % PAIRS)[None, :], mask=inside, other=0)
        codes = codes >> shift[None, :] & 15
    pair = scales + ((k // group)[None, :] * outputs + row) * 2
    weights = weights_of(codes, pair, inside, BITS)
    tl.store(y + (row - start) * inputs + k[None, :], weights.to(y.dtype.element_ty), mask=inside)


def _expand_sparse(  # type: ignore[no-untyped-def]
    packed,
    mask,
    starts,
    y,
    inputs,
    kept,
    start,
    stop,
    EVEN: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
) -> None:
    """Write y[n - start, k] = weight[n, k] for the outputs of this program, zeros included.

    EVEN: of each output as many weights stay, `kept`; else they begin where `starts` says.
    """
    n = start + tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = n * kept if EVEN else tl.load(starts + n, mask=n < stop, other=0)
    for begin in range(0, inputs, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        inside = (n < stop)[:, None] & (k < inputs)[None, :]
        bits = tl.load(mask + n[:, None] * (inputs // 8) + (k // 8)[None, :], mask=inside, other=0).to(tl.int32)
        stays = bits >> (k % 8)[None, :] & 1
        place = first[:, None] + tl.cumsum(stays, 1) - 1
        weights = tl.load(packed + place, mask=inside & (stays != 0), other=0.0)
        tl.store(y + (n - start)[:, None] * inputs + k[None, :], weights.to(y.dtype.element_ty), mask=inside)
        first += tl.sum(stays, 1)


_codes_kernel = triton.jit(_expand_codes)
_sparse_kernel = triton.jit(_expand_sparse)


def expand_codes(
    packed: torch.Tensor, scales: torch.Tensor, bits: int, group: int, rows: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Return the weights of the outputs from the first of `rows` to before the second, [rows, inputs] in a dtype.

    packed: uint8 [outputs, inputs * bits / 8], or int32 [outputs / 8, inputs / 16 t, 32, t / 2] in torch's int4 layout;
    all outputs. scales: bfloat16 [inputs / group, outputs, 2]. Shapes are not checked.
    """
    groups, outputs, _ = scales.shape
    inputs = groups * group
    y = torch.empty(rows[1] - rows[0], inputs, dtype=dtype, device=packed.device)
    at_a_time, across = AT_A_TIME
    grid = (triton.cdiv(len(y), at_a_time), triton.cdiv(inputs, across))
    pairs = packed.shape[3] if packed.dim() == 4 else 0
    with torch.cuda.device(packed.device if packed.is_cuda else -1):  # it may be another than the present one
        _codes_kernel[grid](
            packed,
            scales,
            y,
            outputs,
            inputs,
            group,
            *rows,
            BITS=bits,
            PAIRS=pairs,
            BLOCK_N=at_a_time,
            BLOCK_K=across,
        )
    return y


def expand_sparse(
    packed: torch.Tensor, mask: torch.Tensor, starts: torch.Tensor | None, rows: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Return the weights of the outputs from the first of `rows` to before the second, [rows, inputs] in a dtype.

    packed: [outputs, kept of each] where all keep as many, else [all that stay], with starts, int64 [outputs]. mask:
    uint8 [outputs, inputs / 8]; all outputs. Shapes are not checked.
    """
    inputs = 8 * mask.shape[1]
    y = torch.empty(rows[1] - rows[0], inputs, dtype=dtype, device=packed.device)
    kept = packed.shape[1] if starts is None else 0
    with torch.cuda.device(packed.device if packed.is_cuda else -1):
        _sparse_kernel[(triton.cdiv(len(y), AT_A_TIME[0]),)](
            packed,
            mask,
            mask if starts is None else starts,
            y,
            inputs,
            kept,
            *rows,
            EVEN=starts is None,
            BLOCK_N=AT_A_TIME[0],
            BLOCK_K=AT_A_TIME[1],
        )
    return y
