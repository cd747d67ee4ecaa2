"""The format of the Marlin kernels of vLLM, an optional plug-in on CUDA (compute capability 8.0 and later).

Only the product needs vLLM; packing does not. Of 16 inputs by 64 outputs, thread 4 c + q of a warp has, for each j
below 4, outputs 16 j + 8 b + c and inputs 8 h + 2 q + p: one word in the order (p, b, h), or two words of 8-bit codes
in the order (b, p, h). Codes are symmetric, or of 4 bits with whole zero points.

    packed  int32 [inputs / 16, outputs * bits / 2]
    scales  bfloat16 [groups, outputs], columns in the kernel's order
    zeros   int32 [groups, outputs / 8], columns in an order of their own; only with zero points
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from elastic.errors import BackendUnavailable, ConfigError
from elastic.quant.formats.awq_search import search_scales
from elastic.quant.formats.base import Format, Kernel, KernelTarget, MatrixShape, PackedTensors, PartShapes, register
from elastic.quant.formats.integer import Integers, QuantizedMatrix, round_to_nearest
from elastic.quant.kernels.checks import CheckedKernel, bindable, extras, read_extras, reference_kernel


@dataclass(frozen=True)
class Marlin(Integers):
    """Integers for Marlin: 4 bits, or 8 bits symmetric, in groups of 32, 64 or 128, or whole rows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (4, 8) or (self.bits == 8 and not self.symmetric):
            raise ConfigError(f"{self}: Marlin takes bits=4, or bits=8 with symmetric=True")
        if self.group_size not in (-1, 32, 64, 128):
            raise ConfigError(f"group_size={self.group_size!r} is not supported by Marlin; use -1, 32, 64 or 128")


@dataclass(frozen=True)
class MarlinFormat(Format):
    """The format that vLLM's `marlin_gemm` takes."""

    config: Marlin

    @staticmethod
    def supports(config: Marlin, matrix: MatrixShape) -> str | None:
        """Return None, or in words why a matrix of this shape cannot be packed."""
        if matrix.outputs % 64 or matrix.inputs % 128:
            return f"{matrix.outputs} outputs are no multiple of 64, or {matrix.inputs} inputs none of 128"
        return None

    def part_shapes(self, dtype: torch.dtype | None = None) -> PartShapes:
        """Return the parts that a matrix is packed into, in their order; the same for every dtype."""
        config, (outputs, inputs) = self.config, (self.matrix.outputs, self.matrix.inputs)
        groups = inputs // config.inputs_per_group(inputs)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "packed": ((inputs // 16, outputs * config.bits // 2), torch.int32),
            "scales": ((groups, outputs), torch.bfloat16),
        }
        return shapes if config.symmetric else {**shapes, "zeros": ((groups, outputs // 8), torch.int32)}

    def quantize(self, weight: torch.Tensor, inputs: torch.Tensor | None) -> PackedTensors:
        """Pack a matrix: its nearest codes, or codes with scales searched for its inputs (AWQ).

        weight: [outputs, inputs]. inputs: [tokens, inputs], samples; both of any float dtype.
        """
        config = self.config
        return self.pack(round_to_nearest(weight, config) if inputs is None else search_scales(weight, inputs, config))

    def pack(self, codes: QuantizedMatrix) -> PackedTensors:
        """Lay codes, uint8 [outputs, inputs], out as the parts that the table above names.

        Raises `ConfigError` for zero points that Marlin does not take.
        """
        config, (outputs, inputs) = self.config, codes.codes.shape
        low, high = (2 ** (config.bits - 1),) * 2 if config.symmetric else (0, 15)
        if ((codes.zeros < low) | (codes.zeros > high)).any():
            raise ConfigError(f"{config}: Marlin takes zero points from {low} to {high}; use Integers")
        split = codes.codes.contiguous().view(outputs // 64, 4, 2, 8, inputs // 16, 2, 4, 2)  # t j b c, r h q p
        order = (4, 0, 3, 6, 1, 7, 2, 5) if config.bits == 4 else (4, 0, 3, 6, 1, 2, 7, 5)
        values = split.permute(order).reshape(inputs // 16, -1)
        packed = _words(values) if config.bits == 4 else values.view(torch.int32)
        parts = {"packed": packed, "scales": _scales_in_order(codes.scales.t()).to(torch.bfloat16), **extras(codes)}
        return parts if config.symmetric else {**parts, "zeros": _words(_zeros_in_order(codes.zeros.t()))}

    def unpack(self, parts: PackedTensors) -> QuantizedMatrix:
        """Undo `pack`: codes, uint8 [outputs, inputs], with scales rounded to bfloat16."""
        config, (outputs, inputs) = self.config, (self.matrix.outputs, self.matrix.inputs)
        values = _nibbles(parts["packed"]) if config.bits == 4 else parts["packed"].view(torch.uint8)
        order = (1, 4, 6, 2, 0, 7, 3, 5) if config.bits == 4 else (1, 4, 5, 2, 0, 7, 3, 6)
        codes = values.view(inputs // 16, outputs // 64, 8, 4, 4, 2, 2, 2).permute(order).reshape(outputs, inputs)
        scales = _from_order(parts["scales"], _scales_in_order).float()
        if config.symmetric:
            zeros = torch.full_like(scales, 2 ** (config.bits - 1))
        else:
            zeros = _from_order(_nibbles(parts["zeros"]), _zeros_in_order).float()
        return QuantizedMatrix(codes, scales.t().contiguous(), zeros.t().contiguous(), **read_extras(parts))

    def value(self, parts: PackedTensors) -> torch.Tensor:
        """Expand parts to the matrix that they stand for, float32 [outputs, inputs]."""
        return self.unpack(parts).value()

    def paths(self, parts: PackedTensors) -> Mapping[str, Kernel]:
        """Return the kernels that multiply x: [tokens, inputs] with such parts, by name.

        Raises `BackendUnavailable` without a vLLM that has the kernel, and for a GPU that it was not made for.
        """
        _require_kernels_for(self.target)
        gemm, kind = _gemm(self.config)

        def marlin(x: torch.Tensor, parts: PackedTensors) -> torch.Tensor:
            """Multiply x: [tokens, inputs]; returns [tokens, outputs] in float16 or bfloat16."""
            values = x if x.dtype in (torch.float16, torch.bfloat16) else x.to(torch.bfloat16)
            return cast(
                torch.Tensor,
                gemm(
                    a=values,
                    c=None,
                    b_q_weight=parts["packed"],
                    b_bias=None,
                    b_scales=parts["scales"].to(values.dtype),
                    a_scales=None,
                    global_scale=None,
                    b_zeros=parts.get("zeros"),
                    g_idx=None,
                    perm=None,
                    workspace=_locks(x.device, torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0),
                    b_q_type=kind,
                    size_m=x.shape[0],
                    size_n=self.matrix.outputs,
                    size_k=self.matrix.inputs,
                    use_fp32_reduce=True,
                ),
            )

        checked = CheckedKernel(self.matrix, self.part_shapes(), bindable(marlin))
        return {"marlin": checked, "reference": reference_kernel(self.value)}

    def repack(self, parts: PackedTensors, target: KernelTarget) -> PackedTensors:
        """Return the parts of the [outputs, inputs] matrix as they are: the layout is the same for all GPUs.

        Raises `ConfigError` for a CPU, `BackendUnavailable` for an old GPU.
        """
        if target.device != "cuda":
            raise ConfigError(
                f"Marlin's kernels need CUDA: what is packed for them cannot go to {target.device}; use Integers for "
                "layers that do, or restore them first"
            )
        _require_kernels_for(target)
        return parts


def _scales_in_order(scales: torch.Tensor) -> torch.Tensor:
    """Put the columns of [groups, outputs] in the order in which threads use scales; another one for a single group."""
    groups, outputs = scales.shape
    if groups == 1:
        return scales.reshape(1, -1, 4, 4, 2).transpose(2, 3).reshape(1, outputs)
    return scales.reshape(groups, -1, 8, 8).transpose(2, 3).reshape(groups, outputs)


def _zeros_in_order(zeros: torch.Tensor) -> torch.Tensor:
    """Put the columns of [groups, outputs] in the order in which threads use zero points; returns uint8."""
    groups, outputs = zeros.shape
    ordered = zeros.to(torch.uint8).reshape(groups, -1, 8, 8).transpose(2, 3)
    return ordered.reshape(groups, -1, 4, 2).transpose(2, 3).reshape(groups, outputs)


def _from_order(values: torch.Tensor, in_order: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Undo one of the two orders of [groups, outputs]."""
    groups, outputs = values.shape
    inverse = in_order(torch.arange(64, device=values.device).repeat(groups, 1))[0].argsort()
    return values.view(groups, -1, 64)[:, :, inverse].reshape(groups, outputs)


def _words(nibbles: torch.Tensor) -> torch.Tensor:
    """Pack uint8 [rows, n] into int32 [rows, n / 8], the first nibble lowest."""
    return (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).contiguous().view(torch.int32)


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """Undo `_words`: int32 [rows, n / 8] -> uint8 [rows, n]."""
    both = words.contiguous().view(torch.uint8)
    return torch.stack((both & 15, both >> 4), 2).flatten(1)


def _require_kernels_for(target: KernelTarget) -> None:
    """Raise `BackendUnavailable` for a GPU before 8.0: the kernel's products in bfloat16 begin there."""
    if target.compute_capability < 80:
        raise BackendUnavailable(
            f"Marlin's kernels need compute capability 8.0, this GPU has {target.compute_capability / 10:.1f}; use "
            "Integers"
        )


def _gemm(config: Marlin) -> tuple[Any, Any]:
    """Return vLLM's product, and its name for the type of the codes. Raises `BackendUnavailable`."""
    try:
        from vllm import _custom_ops
        from vllm.scalar_type import scalar_types
    except ImportError as error:
        raise BackendUnavailable("Marlin needs vLLM for CUDA: pip install vllm, or use Integers") from error
    gemm = getattr(_custom_ops, "marlin_gemm", None)
    if gemm is None or "a_scales" not in inspect.signature(gemm).parameters:
        raise BackendUnavailable("this vLLM has no marlin_gemm with a_scales; use a newer one, or Integers")
    if not config.symmetric:
        return gemm, scalar_types.uint4
    return gemm, scalar_types.uint4b8 if config.bits == 4 else scalar_types.uint8b128


@functools.cache
def _locks(device: torch.device, stream: int) -> torch.Tensor:
    """Return locks, all zero before and after a product; one set per stream, whose products do not overlap."""
    count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    with torch.inference_mode(False):
        return torch.zeros(count, dtype=torch.int32, device=device)


register(Marlin, MarlinFormat)
