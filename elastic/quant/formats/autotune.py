"""Timing of the paths of a product, to fill the kernel table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import cycle

import torch

from elastic.memory.backends.device_time import seconds_of
from elastic.quant.formats.base import Kernel, KernelTarget, MatrixShape, PackedTensors, bind, format_of
from elastic.quant.formats.kernel_table import BUCKETS, KernelTable, MatmulSpec

ROTATED_BYTES = 2**26
"""Bytes of all the copies of a matrix that are used in turn: in a model, weights come from memory, not from cache."""
IN_A_ROW = 4
"""Products that are timed together on CUDA."""
NEVER = ("reference", "dynamic")
"""Paths that are not tried: one is only for comparison, the other rounds activations too and has to be asked for."""


def measure(
    table: KernelTable,
    config: object,
    parts: PackedTensors,
    matrix: MatrixShape,
    target: KernelTarget,
    dtype: torch.dtype,
    *,
    buckets: Iterable[int] = BUCKETS,
    rounds: int = 3,
    rebinds: bool = False,
) -> dict[int, str]:
    """Decide on the fastest path for every number of tokens that the table does not have yet; return them by bucket.

    Activations are [bucket, inputs] of `dtype`, on the device of the parts, of which only the shapes matter; the number
    of threads is the current one. A config that is `dynamic` admits products with activations rounded to int8 (cpu.py
    states their error). With `rebinds`, parts are bound for each product, as those of an expert are; else once.
    """
    product = MatmulSpec.of(config, parts, matrix, target, dtype)
    paths = dict(format_of(config).paths(config, parts, matrix, target))
    dynamic = getattr(config, "dynamic", False)
    tried = {name: path for name, path in paths.items() if name not in NEVER or (dynamic and name == "dynamic")}
    missing = sorted(set(buckets) - table.chosen(product).keys())
    if tried and missing:
        table.add(product, _fastest(tried, parts, matrix, dtype, missing, rounds, rebinds))
    return table.chosen(product)


def _fastest(
    paths: Mapping[str, Kernel],
    parts: PackedTensors,
    matrix: MatrixShape,
    dtype: torch.dtype,
    buckets: list[int],
    rounds: int,
    rebinds: bool,
) -> dict[int, str]:
    """Choose a path for each bucket, in ascending order.

    No path gets faster with more tokens, so one that took longer for fewer than the best does now is left out.
    """
    count = min(math.ceil(ROTATED_BYTES / sum(part.nbytes for part in parts.values())), 64)
    copies = [parts, *({name: part.clone() for name, part in parts.items()} for _ in range(count - 1))]
    fix = (lambda path, copy: lambda x: path(x, copy)) if rebinds else bind
    products = {name: cycle([fix(path, copy) for copy in copies]) for name, path in paths.items()}
    seconds = dict.fromkeys(paths, 0.0)
    chosen = {}

    def time_path(name: str, x: torch.Tensor) -> float:
        """Time a product of x: [tokens, inputs], each with another copy of the matrix."""
        return seconds_of(lambda: next(products[name])(x), x.device, IN_A_ROW)

    device = parts["packed"].device
    generator = torch.Generator(device).manual_seed(0)  # the program's own numbers stay as they are
    for bucket in buckets:
        x = torch.randn(bucket, matrix.inputs, generator=generator, device=device).to(dtype)
        best = math.inf
        for name in sorted(paths, key=lambda name: seconds[name]):
            if seconds[name] * 0.8 < best:
                seconds[name] = min(time_path(name, x) for _ in range(2))
                best = min(best, seconds[name])
        close = [name for name in paths if seconds[name] < 1.5 * best]
        for _ in range(rounds if len(close) > 1 else 0):
            for name in close:
                seconds[name] = min(seconds[name], time_path(name, x))
        chosen[bucket] = min(close, key=lambda name: seconds[name])
    return chosen
