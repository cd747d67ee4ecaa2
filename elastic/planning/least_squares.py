"""Least squares with no coefficient below zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

ROUNDS = 30
"""Times that the coefficients may each enter or leave, on the average; few are needed."""


def not_negative(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return coefficients, none below zero, with which the sums of the rows are nearest to 1.

    By active sets (Lawson and Hanson, 1974, chapter 23): the coefficient that would explain most of what is left
    enters; those that would fall below zero leave. A column of zeros has the coefficient 0.
    """
    columns = list(zip(*rows, strict=True))
    count = len(columns)
    scale = [math.sqrt(math.fsum(map(mul, column, column))) or 1.0 for column in columns]
    products = [
        [math.fsum(map(mul, column, other)) / of_column / length for other, length in zip(columns, scale, strict=True)]
        for column, of_column in zip(columns, scale, strict=True)
    ]
    sums = [math.fsum(column) / length for column, length in zip(columns, scale, strict=True)]
    solution = [0.0] * count
    free: list[int] = []
    for _ in range(ROUNDS * count):
        slopes = [sums[i] - math.fsum(p * x for p, x in zip(products[i], solution, strict=True)) for i in range(count)]
        waiting = [i for i in range(count) if i not in free and slopes[i] > 1e-9 * len(rows)]
        if not waiting:
            break
        free.append(max(waiting, key=slopes.__getitem__))
        solution = _settled(products, sums, free, solution)
    return [x / s for x, s in zip(solution, scale, strict=True)]


def _settled(
    products: Sequence[Sequence[float]], sums: Sequence[float], free: list[int], solution: Sequence[float]
) -> list[float]:
    """Return the best coefficients of the free ones; those that reach zero on the way leave `free`."""
    now = list(solution)
    while True:
        best = _solved([[products[i][j] for j in free] for i in free], [sums[i] for i in free])
        aim = dict(zip(free, best, strict=True)) if best is not None else dict.fromkeys(free[-1:], -1.0)
        if best is not None and min(best) > 0:
            return [aim.get(i, 0.0) for i in range(len(now))]
        below = [i for i in free if aim.get(i, now[i]) <= 0]
        step = min((now[i] / (now[i] - aim[i]) if now[i] > aim[i] else 0.0) for i in below)
        now = [now[i] + step * (aim.get(i, now[i]) - now[i]) if i in free else 0.0 for i in range(len(now))]
        free[:] = [i for i in free if not (i in below and now[i] <= 1e-15)]
        if not free:
            return [0.0] * len(now)


def _solved(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Solve a symmetric positive system by Cholesky's method; None if it is singular."""
    size = len(right)
    lower = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            rest = matrix[i][j] - math.fsum(lower[i][k] * lower[j][k] for k in range(j))
            if i == j and rest < 1e-12:
                return None
            lower[i][j] = math.sqrt(rest) if i == j else rest / lower[j][j]
    middle: list[float] = []
    for i in range(size):
        middle.append((right[i] - math.fsum(lower[i][k] * middle[k] for k in range(i))) / lower[i][i])
    out = [0.0] * size
    for i in reversed(range(size)):
        out[i] = (middle[i] - math.fsum(lower[k][i] * out[k] for k in range(i + 1, size))) / lower[i][i]
    return out
