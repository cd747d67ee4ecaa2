"""Matrices as oneDNN's matrix product wants them, in memory that is given: blocks of a few outputs and inputs each.

oneDNN says how it would order a matrix; the elements are as many as before, so that the reordered matrix lies where the
plain one would. torch packs into memory of its own (`mkldnn._reorder_linear_weight`), which is copied; a tensor over
given memory comes from the C interface that torch's ahead-of-time compiler uses for packed constants.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)
ROWS = 16
"""Rows that a product is expected to have; oneDNN orders matrices alike for most numbers of them."""
_MKLDNN = 3
"""c10::Layout::Mkldnn"""
_DTYPES = {torch.float32: 6, torch.bfloat16: 15}
"""Those that are packed, with their c10::ScalarType."""


@dataclass(frozen=True)
class OneDNNLayout:
    """The order of the elements of a matrix, [outputs, inputs]."""

    shape: tuple[int, int]
    dtype: torch.dtype
    descriptor: bytes
    """oneDNN's."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the elements of a plain matrix, [outputs, inputs], in this order, in a tensor of its shape."""
        opaque = _reorder(weight.contiguous())
        memory = (ctypes.c_ubyte * weight.nbytes).from_address(torch.ops.mkldnn.data_ptr(opaque))
        with torch.inference_mode(False):
            return torch.frombuffer(memory, dtype=weight.dtype).view(self.shape).clone()

    def view(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the matrix that `packed`, [outputs, inputs], holds in this order, as `multiply` takes it.

        It owns nothing: `packed` must outlive it.
        """
        return _opaque_over(packed.data_ptr(), self)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the elements of `packed`, [outputs, inputs], in the plain order, in a tensor of its shape."""
        with torch.inference_mode(False), torch.no_grad():
            return self.view(packed).to_dense()


def multiply(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply x, [..., inputs], with a matrix from `view`; x, the bias and the result, [..., outputs], have its dtype.

    A plain matrix, [outputs, inputs], is put in oneDNN's order each time. No gradient flows through it.
    """
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, matrix, bias, "none", [], "")
    return product


def has_product() -> bool:
    """Return whether this build of torch has `multiply`."""
    return torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def find_layout(shape: tuple[int, int], dtype: torch.dtype) -> OneDNNLayout | None:
    """Return how oneDNN orders matrices of a shape and dtype; None if they are to stay plain.

    It does not pack bfloat16 on every CPU, some orders would need more bytes, and some builds of torch cannot be asked.
    What torch offers for it is tried once, with a product of this shape: other builds order otherwise, or cannot.
    """
    if dtype not in _DTYPES or _interface() is None:
        return None
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    return _find_layout(shape, dtype)


@functools.cache
def _find_layout(shape: tuple[int, int], dtype: torch.dtype) -> OneDNNLayout | None:
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.no_grad():
        weight = torch.randn(shape, generator=generator).to(dtype)
        opaque = _reorder(weight)
        if torch.ops.mkldnn._nbytes(opaque) != weight.nbytes:
            return None
        layout = OneDNNLayout(shape, dtype, bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(opaque).numpy()))
        packed = layout.pack(weight)
        if torch.equal(layout.unpack(packed), weight):
            return layout
    logger.warning("oneDNN's matrices cannot be read at an address that is given: full weights are not packed")
    return None


def _reorder(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
    return packed


@functools.cache
def _interface() -> tuple[Any, Any] | None:
    """Return torch's C function and the one that takes its tensors over; None if this build has them not."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    take = getattr(getattr(torch._C, "_aoti", None), "alloc_tensor_by_stealing_from_void_ptr", None)
    operators = (
        "_reorder_linear_weight",
        "_linear_pointwise",
        "_get_mkldnn_serialized_md",
        "_nbytes",
        "data_ptr",
        "_is_mkldnn_bf16_supported",
    )
    missing = [name for name in operators if not hasattr(torch.ops.mkldnn, name)]
    if missing or take is None or not library.exists() or not torch._C._has_mkldnn:
        return None
    create = getattr(ctypes.CDLL(str(library)), "aoti_torch_create_tensor_from_blob_v2", None)
    return None if create is None else (create, take)


def _opaque_over(address: int, layout: OneDNNLayout) -> torch.Tensor:
    interface = _interface()
    assert interface is not None, "a layout was found with it"
    create, take = interface
    pair, made = ctypes.c_int64 * 2, ctypes.c_void_p()
    failed = create(
        ctypes.c_void_p(address),
        ctypes.c_int64(2),
        pair(*layout.shape),
        pair(layout.shape[1], 1),
        ctypes.c_int64(0),
        ctypes.c_int32(_DTYPES[layout.dtype]),
        ctypes.c_int32(0),  # of the CPU
        ctypes.c_int32(0),
        ctypes.byref(made),
        ctypes.c_int32(_MKLDNN),
        layout.descriptor,
        ctypes.c_int64(len(layout.descriptor)),
    )
    assert not failed, "the same arguments as when the layout was found"
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    matrix: torch.Tensor = take(capsule(made.value, None, None))
    return matrix
