"""Products with matrices in integers on CUDA.

    packed     torch's int4 kernel, from sm80 on. It takes bfloat16 alone, so x is rounded to it; offsets are, too: by
               up to 1 / 73 of a step for all weights of a group, where the other paths have none of that
    triton     from sm75 on, a kernel of our own for what that one does not take (int8, int3, other groups), in the
               dtype of x
    expanded   weights to the dtype of x, some outputs at a time, then a plain product: for many tokens; from sm75 on
               by a kernel of our own

No gradient flows through any of them.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch

from elastic.quant.formats.base import Kernel, KernelTarget, PackedTensors
from elastic.quant.kernels.checks import CheckedKernel, bindable
from elastic.quant.kernels.cuda_layout import CudaLayout

PIECE = 2**24
"""Weights expanded at a time."""
logger = logging.getLogger(__name__)


def paths(layout: CudaLayout) -> Mapping[str, Kernel]:
    """Return the kernels of CUDA for x: [tokens, inputs]; without triton, or for an old GPU, there are fewer."""
    made = CudaKernels(layout)
    kernels: dict[str, Kernel] = {"expanded": made.expanded}
    if layout.tiled:
        kernels["packed"] = made.packed
    elif runs_triton(layout.target):
        kernels["triton"] = made.triton
    shapes = layout.part_shapes
    return {name: CheckedKernel(layout.matrix, shapes, bindable(kernel)) for name, kernel in kernels.items()}


def runs_triton(target: KernelTarget) -> bool:
    """Return whether kernels of triton run on a GPU."""
    return target.compute_capability >= 75 and _has_triton()


@functools.cache
def _has_triton() -> bool:
    """Return whether triton is installed and can compile what launches its kernels; warn once where not."""
    if importlib.util.find_spec("triton") is None:
        problem, remedy = "is not installed", "pip install triton"
    elif not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return True  # none runs here
    else:
        try:
            importlib.import_module("triton").runtime.driver.active.utils  # noqa: B018  # compiled once for the system
            return True
        except Exception as error:  # whatever a compiler, a linker or the cache's folder has against it
            problem, remedy = f"does not work: {error}", "install gcc and Python's headers"
    logger.warning("triton %s; products in int8, int3 and sparse ones take longer: %s", problem, remedy)
    return False


@dataclass(frozen=True)
class CudaKernels:
    """Kernels of int8, int4 and int3."""

    layout: CudaLayout

    def packed(self, x: torch.Tensor, parts: PackedTensors) -> torch.Tensor:
        """Multiply x: [tokens, inputs] by torch's int4 kernel; returns bfloat16 [tokens, outputs]."""
        group, values = self.layout.group, x.to(torch.bfloat16)
        return cast(torch.Tensor, torch.ops.aten._weight_int4pack_mm(values, parts["packed"], group, parts["scales"]))

    def triton(self, x: torch.Tensor, parts: PackedTensors) -> torch.Tensor:
        """Multiply x: [tokens, inputs] by the triton kernel; returns [tokens, outputs] in the dtype of x."""
        from elastic.quant.kernels.triton import product

        return product(x, parts["packed"], parts["scales"], self.layout.config.bits, self.layout.group)

    def expanded(self, x: torch.Tensor, parts: PackedTensors) -> torch.Tensor:
        """Multiply x: [tokens, inputs] with expanded weights; returns [tokens, outputs] in the dtype of x."""
        outputs, step = self.layout.matrix.outputs, max(PIECE // self.layout.matrix.inputs // 8 * 8, 8)
        y = x.new_empty(x.shape[0], outputs)
        for start in range(0, outputs, step):
            stop = min(start + step, outputs)
            y[:, start:stop] = x @ self._weights(parts, start, stop, x.dtype).t()
        return y

    def _weights(self, parts: PackedTensors, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Expand the weights of some outputs, [stop - start, inputs]."""
        layout, encoding = self.layout, self.layout.encoding
        if parts["packed"].is_cuda and runs_triton(layout.target):
            from elastic.quant.kernels.triton import expand_codes

            rows = start, stop
            return expand_codes(parts["packed"], parts["scales"], layout.config.bits, layout.group, rows, dtype)
        per_row = 8 if layout.tiled else 1
        codes = layout.codes_of(parts["packed"][start // per_row : stop // per_row])
        scales, offsets = parts["scales"][:, start:stop].float().permute(2, 1, 0).unsqueeze(3)
        grouped = codes.view(*scales.shape[:2], -1).float() - encoding.middle
        return torch.addcmul(encoding.exact_offsets(scales, offsets), grouped, scales).flatten(1).to(dtype)
