"""Where the rows of a matrix are cut: by halves, so that the parts of every smaller degree are runs of these."""

from __future__ import annotations

import math

from elastic.errors import ConfigError


def is_degree(parts: int) -> bool:
    """Tell whether so many ranks may share a layer: 1, 2, 4 and so on."""
    return parts > 0 and not parts & (parts - 1)


def row_bounds(rows: int, parts: int, unit: int = 1) -> tuple[int, ...]:
    """Return where `rows` are cut into parts that are as equal as whole units allow: `parts + 1` rows from 0 to `rows`.

    The bounds of half as many parts are every other one of these. Only the last part may have a part of a unit. Raises
    `ConfigError` for parts that are no power of two, and where a part would have no unit.
    """
    if not is_degree(parts):
        raise ConfigError(f"parts={parts} cannot be; it must be a power of two, as degrees are doubled and halved")
    if rows < 1 or unit < 1:
        raise ConfigError(f"rows={rows} in units of {unit} cannot be cut; both must be at least 1")
    units = -(-rows // unit)
    if units < parts:
        words = f"{rows} rows" if unit == 1 else f"{rows} rows in units of {unit}, which may not be cut,"
        raise ConfigError(f"{words} cannot be cut into {parts} parts; {most_parts(rows, unit)} is the most")
    return (*(units * part // parts * unit for part in range(parts)), rows)


def most_parts(rows: int, unit: int) -> int:
    """Return the largest power of two of parts, each of at least a unit of rows."""
    return 1 << (max(1, -(-rows // unit)).bit_length() - 1)


def aligned_unit(row_bytes: int, page_bytes: int) -> int:
    """Return the least number of rows that end on a page."""
    return page_bytes // math.gcd(page_bytes, row_bytes)
