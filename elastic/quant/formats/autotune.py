"""Timing of the paths of a product, to fill the kernel table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import cycle

import torch

from elastic.memory.backends.device_time import race
from elastic.openmp import single_thread
from elastic.quant.formats.base import Kernel, KernelTarget, MatrixShape, PackedTensors, bind, format_of
from elastic.quant.formats.kernel_table import BUCKETS, KernelTable, MatmulSpec

ROTATED_BYTES = 2**26
"""Bytes of all the copies of a matrix that are used in turn: in a model, weights come from memory, not from cache."""
IN_A_ROW = 4
"""Products that are timed together on CUDA."""
ALONE_S = 0.001
"""As long as a product of fewer tokens took less on a CPU, one thread times the next, which counts as if all had shared
it: several wait for each other, for 100 ms where another process has the processor of one."""
NEAR = 1.05
"""Of paths that take nearly as long as the fastest, the first is taken: it is the same in each process then."""
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
    rebinds: bool = False,
) -> dict[int, str]:
    """Decide on the fastest path for every number of tokens that the table does not have yet; return them by bucket.

    Activations are [bucket, inputs] of `dtype`, on the device of the parts, of which only the shapes matter; the number
    of threads is the current one. A config that is `dynamic` admits products with activations rounded to int8 (cpu.py
    states their error). With `rebinds`, parts are bound for each product, as those of an expert are; else once.
    """
    product = MatmulSpec.of(config, parts, matrix, target, dtype)
    paths = dict(format_of(config)(config, matrix, target).paths(parts))
    dynamic = getattr(config, "dynamic", False)
    tried = {name: path for name, path in paths.items() if name not in NEVER or (dynamic and name == "dynamic")}
    missing = sorted(set(buckets) - table.chosen(product).keys())
    if tried and missing:
        table.add(product, _fastest(tried, parts, matrix, dtype, missing, rebinds))
    return table.chosen(product)


def _fastest(
    paths: Mapping[str, Kernel],
    parts: PackedTensors,
    matrix: MatrixShape,
    dtype: torch.dtype,
    buckets: list[int],
    rebinds: bool,
) -> dict[int, str]:
    """Choose a path for each bucket, in ascending order.

    No path gets faster with more tokens: so one that took longer for fewer than the best does now is left out, and one
    that was faster for more takes no longer for fewer, whatever was measured beside other processes.
    """
    count = min(math.ceil(ROTATED_BYTES / sum(part.nbytes for part in parts.values())), 64)
    copies = [parts, *({name: part.clone() for name, part in parts.items()} for _ in range(count - 1))]
    fix = (lambda path, copy: lambda x: path(x, copy)) if rebinds else bind
    products = {name: cycle([fix(path, copy) for copy in copies]) for name, path in paths.items()}
    device = parts["packed"].device
    generator = torch.Generator(device).manual_seed(0)  # the program's own numbers stay as they are
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    seconds, measured, fastest = dict.fromkeys(paths, 0.0), dict[int, dict[str, float]](), 0.0
    for bucket in buckets:
        x = torch.randn(bucket, matrix.inputs, generator=generator, device=device).to(dtype)
        ways = {name: lambda name=name, x=x: next(products[name])(x) for name in paths}
        if threads > 1 and fastest * threads < ALONE_S:
            with single_thread():
                alone = race(ways, device, lower_bounds={name: taken * threads for name, taken in seconds.items()})
            measured[bucket] = {name: taken / threads for name, taken in alone.items()}
        else:
            measured[bucket] = race(ways, device, IN_A_ROW, seconds)
        seconds |= measured[bucket]
        fastest = min(measured[bucket].values())
    seconds, chosen = dict.fromkeys(paths, math.inf), {}
    for bucket in reversed(buckets):
        seconds |= {name: min(taken, seconds[name]) for name, taken in measured[bucket].items()}
        chosen[bucket] = next(name for name in paths if seconds[name] <= NEAR * min(seconds.values()))
    return chosen
