"""The first product of each kind on a GPU, kernels compiled included: what a first request may wait for.

    python benchmarks/first_launch.py --device cuda:0

Triton compiles a kernel for each dtype, number of bits and shape of tiles when it is launched first, and keeps it on
the disk: a folder of its own, empty at the beginning, makes it compile all here.
"""

from __future__ import annotations

import os
import tempfile
from functools import partial
from typing import Any

import torch
from common import arguments, finish, seconds, table

from elastic.quant.formats.base import KernelTarget, MatrixShape
from elastic.quant.formats.integer import Integers
from elastic.quant.kernels.integer_format import IntegerFormat

CONFIGS = {"int8": Integers(8, -1, symmetric=True), "int4": Integers(4, 128), "int3": Integers(3, 128)}
TOKENS = (1, 64)


def rows(device: str, dtype: torch.dtype, size: int) -> list[dict[str, Any]]:
    """Time the first and the second call of every path of every format."""
    target, matrix = KernelTarget.of(torch.device(device)), MatrixShape(size, size)
    found = []
    for name, config in CONFIGS.items():
        weight = torch.randn(size, size, dtype=dtype)
        form = IntegerFormat(config, matrix, target)
        packed = form.quantize(weight, None)
        parts = {key: part.to(device) for key, part in packed.items()}
        for path, kernel in form.paths(parts).items():
            for tokens in TOKENS:
                x = torch.randn(tokens, size, device=device, dtype=dtype)
                first, second = (1e3 * seconds(partial(kernel, x, parts), device) for _ in "ab")
                found.append({"format": name, "path": path, "tokens": tokens, "first_ms": first, "second_ms": second})
    return found


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        dtypes = (torch.bfloat16,) if options.quick else (torch.bfloat16, torch.float16)
        results = {
            str(dtype).removeprefix("torch."): rows(options.device, dtype, 256 if options.quick else 4096)
            for dtype in dtypes
        }
    table(
        ["dtype", "format", "path", "tokens", "first ms", "second ms"],
        [
            [name, row["format"], row["path"], row["tokens"], f"{row['first_ms']:.1f}", f"{row['second_ms']:.3f}"]
            for name, found in results.items()
            for row in found
        ],
    )
    finish("first_launch", options.device, results)


if __name__ == "__main__":
    main()
