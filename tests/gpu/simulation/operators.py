"""torch's CUDA operators on the simulated device.

`install` is called by torch itself at the end of `import torch`, in child processes too: `build.sh` leaves an entry
point of the group `torch.backends` beside the simulated libraries.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import os
import sys
import warnings
from pathlib import Path

import torch

from gpu import simulator

BROKEN_RULES = 70
"""How a process ends that broke rules of CUDA which nobody asked for."""


def install() -> None:
    """Have CUDA operators computed by CPU kernels, in the order of their streams. Nothing on a real driver."""
    if not simulator.loaded():
        return
    if importlib.util.find_spec("torch._native"):  # from torch 2.12 on
        importlib.import_module(
            "torch._native"
        )  # torch's own Triton kernels, which would else be registered over these
    operators = ctypes.CDLL(str(Path(simulator.path()).with_name("liboperators.so")))
    with warnings.catch_warnings(action="ignore"):  # that kernels are replaced
        operators.sim_install_operators()
        for name, function in WITHOUT_CPU_KERNEL.items():
            _LIBRARY.impl(name, function, "CUDA", allow_override=True)
    simulator.explain_faults()
    if os.environ.get("SIMCUDA_STACKS"):
        simulator.show_stacks()
    atexit.register(_end_with_an_error_if_rules_were_broken)


def _end_with_an_error_if_rules_were_broken() -> None:
    if broken := simulator.violations():
        print(f"simulated CUDA: {len(broken)} violations, the first: {broken[0]}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(BROKEN_RULES)


def _weight_int4pack_mm(x: torch.Tensor, packed: torch.Tensor, group: int, scales: torch.Tensor) -> torch.Tensor:
    """Multiply x [tokens, inputs] by the weight that the parts stand for, as the kernel is documented to."""
    from elastic.quant.kernels.cuda_layout import from_tiles

    codes = from_tiles(packed, x.shape[1]).float() - 8
    scale, offset = scales.float().permute(2, 1, 0).unsqueeze(3)
    weight = (codes.view(*scale.shape[:2], -1) * scale + offset).flatten(1)
    return (x.float() @ weight.t()).to(x.dtype)


def _convert_weight_to_int4pack(pairs: torch.Tensor, inner_tiles: int) -> torch.Tensor:
    """Lay out codes, two a byte, the even column in the upper half."""
    from elastic.quant.kernels.cuda_layout import to_tiles

    return to_tiles(torch.stack((pairs >> 4, pairs & 15), -1).flatten(1))


def _histc(x: torch.Tensor, bins: int = 100, low: float = 0, high: float = 0) -> torch.Tensor:
    """Count values of any dtype in equal bins; without bounds those of the values are waited for."""
    if low == high:
        low, high = x.min().item(), x.max().item()
    if low == high:  # all values are equal
        low, high = low - 1, high + 1
    index = ((x.double() - low) * (bins / (high - low))).floor().long().clamp(0, bins - 1)
    inside = ((x >= low) & (x <= high)).to(x.dtype)
    return x.new_zeros(bins).scatter_add_(0, index.flatten(), inside.flatten())


WITHOUT_CPU_KERNEL = {
    "_weight_int4pack_mm": _weight_int4pack_mm,
    "_convert_weight_to_int4pack": _convert_weight_to_int4pack,
    "histc": _histc,
}
_LIBRARY = torch.library.Library("aten", "IMPL")
