"""Products with sparse matrices on CUDA.

    sparse     2:4 in 16 bits, on GPUs of compute capability 8.x: torch's sparse tensor core kernel (CUTLASS)
    expanded   weights to the dtype of x, some outputs at a time, then a plain product; from sm75 on by a kernel of our
               own

torch's CUTLASS kernel refuses other GPUs. cuSPARSELt, which has newer ones, packs in an order that it alone can read,
so that a layer could not leave the GPU in its variant; it is not used. No gradient flows through any of them.

The sparse kernel has `metadata` in place of the mask: 4 bits for each four inputs, the lower and the higher of the two
that stay, in words of 16 inputs, in CUTLASS's order (`reorder_meta` in its host_reorder.h, ColumnMajorInterleaved<2>).
Both take as many bytes. All functions but the kernels also run on tensors in host memory.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from elastic.quant.formats.base import BoundKernel, Kernel, KernelTarget, MatrixShape, PackedTensors
from elastic.quant.formats.pruned import SemiStructured, Sparse
from elastic.quant.kernels.checks import CheckedKernel, Required
from elastic.quant.kernels.cuda import runs_triton
from elastic.quant.pruning.sparse_layout import Rows, expand, nibbles, required, tiles

PIECE = 2**24
"""Weights expanded at a time."""
_CODES = {3: 4, 5: 8, 6: 9, 9: 12, 10: 13, 12: 14}
"""Four bits of the mask, two of them set -> their two places, two bits each."""
logger = logging.getLogger(__name__)


def takes(config: SemiStructured, matrix: MatrixShape, target: KernelTarget, dtype: torch.dtype) -> bool:
    """Return whether torch's sparse kernel takes a matrix with weights of a dtype."""
    if target.device != "cuda" or target.compute_capability // 10 != 8 or config.of != 4:
        return False
    return dtype in (torch.float16, torch.bfloat16) and matrix.outputs % 32 == 0 and matrix.inputs % 64 == 0


def paths(config: Sparse, parts: PackedTensors, matrix: MatrixShape, target: KernelTarget) -> Mapping[str, Kernel]:
    """Return the kernels of CUDA for x: [tokens, inputs]."""
    dtype = parts["packed"].dtype
    shapes: Required = required(config, matrix, dtype)
    if "metadata" in parts:
        shapes = shapes_with_metadata(shapes, matrix)
    kernels: dict[str, Kernel] = {
        "expanded": CheckedKernel(matrix, shapes, functools.partial(_bind_expanded, matrix=matrix, target=target))
    }
    with torch.cuda.device_of(parts["packed"]):  # type: ignore[no-untyped-call]  # it is tried on the GPU that computes
        if "metadata" in parts and _kernel_agrees(dtype):
            kernels["sparse"] = CheckedKernel(matrix, shapes, _bind_sparse)
    return kernels


def shapes_with_metadata(shapes: Required, matrix: MatrixShape) -> Required:
    """Return the shapes of parts with metadata in place of the mask."""
    metadata = {"metadata": ((matrix.outputs, matrix.inputs // 16), torch.int16)}
    return {**{name: shape for name, shape in shapes.items() if name != "mask"}, **metadata}


def with_metadata(parts: PackedTensors) -> dict[str, torch.Tensor]:
    """Return the parts of a 2:4 matrix with metadata, int16 [outputs, inputs / 16], in place of the mask."""
    outputs, halves = parts["mask"].shape
    codes = torch.zeros(16, dtype=torch.uint8)
    codes[list(_CODES)] = torch.tensor(list(_CODES.values()), dtype=torch.uint8)
    low, high = (codes.to(half.device)[half.int()] for half in nibbles(parts["mask"]))
    words = (low | high << 4).view(torch.int16)
    reordered = torch.empty_like(words).view(-1)
    reordered[_order(outputs, halves // 2, words.device)] = words.view(-1)
    return {"packed": parts["packed"], "metadata": reordered.view(outputs, -1)}


def with_mask(parts: PackedTensors) -> PackedTensors:
    """Undo `with_metadata`: the mask has its shape again; other parts are returned as they are."""
    if "metadata" not in parts:
        return parts
    metadata = parts["metadata"]
    words = metadata.view(-1)[_order(metadata.shape[0], metadata.shape[1], metadata.device)].view(metadata.shape)
    masks = torch.zeros(16, dtype=torch.uint8)
    masks[list(_CODES.values())] = torch.tensor(list(_CODES), dtype=torch.uint8)
    low, high = (masks.to(half.device)[half.int()] for half in nibbles(words.view(torch.uint8)))
    return {"packed": parts["packed"], "mask": low | high << 4}


def _order(rows: int, words: int, device: torch.device) -> torch.Tensor:
    """Return where each word of the metadata, [rows, words], lies in CUTLASS's order: int64 [rows * words]."""
    row, word = torch.arange(rows, device=device).unsqueeze(1), torch.arange(words, device=device)
    row = row // 32 * 32 + row % 8 * 4 + row % 32 // 8
    swap = (row % 2 == 0) & (word % 2 == 1)
    back = (row % 2 == 1) & (word % 2 == 0)
    shift = swap.long() - back.long()
    row, word = row + shift, word - shift
    return (word // 2 * rows * 2 + row * 2 + word % 2).view(-1)


def _bind_expanded(parts: PackedTensors, *, matrix: MatrixShape, target: KernelTarget) -> BoundKernel:
    """Fix the parts of a plain product, for x: [tokens, inputs] -> [tokens, outputs] in the dtype of x."""
    pieces = tiles(parts, matrix, PIECE)
    by_triton = parts["packed"].is_cuda and runs_triton(target)

    def weights(masked: PackedTensors, rows: Rows, dtype: torch.dtype) -> torch.Tensor:
        if not by_triton:
            return expand(masked, rows).to(dtype)
        from elastic.quant.kernels.triton import expand_sparse

        return expand_sparse(masked["packed"], masked["mask"], masked.get("starts"), rows[:2], dtype)

    def product(x: torch.Tensor) -> torch.Tensor:
        masked = with_mask(parts)
        y = x.new_empty(x.shape[0], matrix.outputs)
        for rows in pieces:
            y[:, rows[0] : rows[1]] = x @ weights(masked, rows, x.dtype).t()
        return y

    return product


def _bind_sparse(parts: PackedTensors) -> BoundKernel:
    """Fix the parts of torch's kernel, for x: [tokens, inputs] -> [tokens, outputs]; it takes tokens by eights."""
    packed, metadata = parts["packed"], parts["metadata"]

    def product(x: torch.Tensor) -> torch.Tensor:
        tokens = x.shape[0]
        values = F.pad(x.to(packed.dtype), (0, 0, 0, -tokens % 8))
        return torch._sparse_semi_structured_mm(packed, metadata, values.t()).t()[:tokens].contiguous()

    return product


@functools.cache
def _kernel_agrees(dtype: torch.dtype) -> bool:
    """Return whether torch's kernel reads metadata as written here, on the present GPU; warn once where not."""
    if not torch.cuda.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(1, 8, (64, 128), generator=generator).to(dtype)
    kept = torch.rand(64, 32, 4, generator=generator).argsort(2) < 2
    weights = torch.where(kept.view(64, 128), weights, 0)
    mask = (kept.view(64, 16, 8) * 2 ** torch.arange(8, dtype=torch.uint8)).sum(2, dtype=torch.uint8)
    parts = with_metadata({"packed": weights[kept.view(64, 128)].view(64, 64), "mask": mask})
    x = torch.randint(-4, 4, (8, 128), generator=generator).to(dtype)
    try:
        product = _bind_sparse({name: part.cuda() for name, part in parts.items()})(x.cuda()).cpu()
    except (RuntimeError, AttributeError) as error:  # a build without the kernel, or a GPU that it refuses
        logger.warning("torch's 2:4 kernel is not used: %s", error)
        return False
    agrees = torch.equal(product, (x.float() @ weights.float().t()).to(dtype))
    if not agrees:
        logger.warning("torch's 2:4 kernel reads metadata in an unknown order: it is not used")
    return agrees
