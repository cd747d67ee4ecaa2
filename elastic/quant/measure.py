"""Timing the paths of a product, to fill the table."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping

import torch

from elastic.quant.formats import Matrix, Parts, Path, Target, format_of
from elastic.quant.paths import BUCKETS, PathTable, Product

ROTATED_BYTES = 2**26
"""Copies of a matrix are used in turn, so many bytes in total: in a model, weights come from memory, not from cache."""
NEVER = ("reference", "dynamic")
"""Not tried: only for comparison; and rounding activations to int8 is not weight-only, so it has to be asked for."""


def measure(
    table: PathTable,
    config: object,
    parts: Parts,
    matrix: Matrix,
    target: Target,
    dtype: torch.dtype,
    *,
    dynamic: bool = False,
    buckets: Iterable[int] = BUCKETS,
    rounds: int = 3,
) -> dict[int, str]:
    """Decide on the fastest path for every number of tokens that the table does not have yet.

    With the current number of threads, on the device of the parts; nothing of theirs but shapes matters. `dynamic`
    admits products with activations rounded to int8 (cpu.py states their error). Returns bucket -> path.
    """
    product = Product.of(config, parts, matrix, target, dtype)
    paths = dict(format_of(config).paths(config, parts, matrix, target))
    tried = {name: path for name, path in paths.items() if name not in NEVER or (dynamic and name == "dynamic")}
    missing = sorted(set(buckets) - table.chosen(product).keys())
    if tried and missing:
        table.add(product, _fastest(tried, parts, matrix, dtype, missing, rounds))
    return table.chosen(product)


def _fastest(
    paths: Mapping[str, Path], parts: Parts, matrix: Matrix, dtype: torch.dtype, buckets: list[int], rounds: int
) -> dict[int, str]:
    """No path gets faster with more tokens, so one that took longer for fewer than the best does now is left out."""
    copies = _copies(parts)
    device = parts["packed"].device
    known = dict.fromkeys(paths, 0.0)
    chosen = {}
    for bucket in buckets:
        x = torch.randn(bucket, matrix.inputs, device=device).to(dtype)
        best = math.inf
        for name in sorted(paths, key=lambda name: known[name]):
            if known[name] * 0.8 < best:
                known[name] = _seconds(paths[name], x, copies, 1)
                best = min(best, known[name])
        close = {name: paths[name] for name in paths if known[name] < 1.5 * best}
        times = _interleaved(close, x, copies, rounds) if len(close) > 1 else dict.fromkeys(close, best)
        known.update(times)
        chosen[bucket] = min(times, key=lambda name: times[name])
    return chosen


def _interleaved(paths: Mapping[str, Path], x: torch.Tensor, copies: list[Parts], rounds: int) -> dict[str, float]:
    times = dict.fromkeys(paths, math.inf)
    for round_ in range(rounds):
        for name, path in paths.items():
            times[name] = min(times[name], _seconds(path, x, copies, round_ + 2))
    return times


def _seconds(path: Path, x: torch.Tensor, copies: list[Parts], turn: int) -> float:
    """The shorter of two calls."""
    times = []
    for call in range(2):
        _wait(x.device)
        start = time.perf_counter()
        path(x, copies[(2 * turn + call) % len(copies)])
        _wait(x.device)
        times.append(time.perf_counter() - start)
    return min(times)


def _copies(parts: Parts) -> list[Parts]:
    count = min(math.ceil(ROTATED_BYTES / sum(part.nbytes for part in parts.values())), 64)
    return [parts, *({name: part.clone() for name, part in parts.items()} for _ in range(count - 1))]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
