"""How the paper lays a matrix that is cut on pages, so that parts leave and return in place. (AMOEBA, section 3.2)

Weights are stored without its padding (docs/design.md).

A matrix is stored with the dimension that is cut outermost: `gate` and `up` as they are, [intermediate, hidden], `down`
transposed, experts one after another. So a part is a run of rows, and the paper lays bytes between the parts until each
begins on a page. There are two forms:

    padded     between the parts lie whole rows of zeros: the parts are one matrix, of one product
    segments   between the parts lie bytes that nothing reads: every part is a matrix, of a product of its own

Padded parts must be both whole rows and whole pages, a condition that the paper does not print: for some shapes that is
far more than the next page, to which segments are padded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from elastic.errors import ConfigError
from elastic.planning.sharding.bounds import is_degree, row_bounds

Form = Literal["padded", "segments"]
MOST_PADDING = 0.05
"""The share of its bytes by which a matrix may grow for one product rather than one for each part."""


@dataclass(frozen=True)
class StoredPart:
    """One part of the finest cut."""

    rows: range
    """Rows of the checkpoint's matrix."""
    offset: int
    """Bytes from the beginning of the matrix; on a page."""
    nbytes: int
    """Bytes with the padding behind it: whole pages, of the form `padded` whole rows as well."""


@dataclass(frozen=True)
class CutLayout:
    """A matrix on pages, cut into parts."""

    row_bytes: int
    page_bytes: int
    form: Form
    parts: tuple[StoredPart, ...]

    @property
    def nbytes(self) -> int:
        """Bytes stored."""
        return sum(part.nbytes for part in self.parts)

    @property
    def padding_bytes(self) -> int:
        """Bytes stored that are no weights."""
        return self.nbytes - self.parts[-1].rows.stop * self.row_bytes

    @property
    def padding(self) -> float:
        """Padding as a share of the weights."""
        return self.padding_bytes / (self.nbytes - self.padding_bytes)

    def run(self, part: int, degree: int) -> tuple[StoredPart, ...]:
        """Return what a rank keeps: of `degree` ranks, the one with this part, from 0.

        Raises `ConfigError` for a degree that is no power of two or finer than the cut, and for a part beyond it.
        """
        if not is_degree(degree) or degree > len(self.parts) or not 0 <= part < degree:
            raise ConfigError(f"part={part} of degree={degree} cannot be; the matrix is cut into {len(self.parts)}")
        each = len(self.parts) // degree
        return self.parts[part * each : (part + 1) * each]

    def pages(self, part: int, degree: int) -> range:
        """Return the pages, counted from the beginning of the matrix, that such a rank keeps."""
        run = self.run(part, degree)
        end = run[-1].offset + run[-1].nbytes
        return range(run[0].offset // self.page_bytes, end // self.page_bytes)


def page_count(rows: int, row_bytes: int, page_bytes: int, parts: int = 1) -> Fraction:
    """Return how many pages one of `parts` equal parts fills: a fraction where parts do not end on a page. (Table 2)"""
    return Fraction(rows * row_bytes, parts * page_bytes)


def cut_layout(rows: int, row_bytes: int, page_bytes: int, parts: int, form: Form, *, unit: int = 1) -> CutLayout:
    """Lay out a matrix, with as little padding as the form allows for parts of these rows.

    `unit` as in `row_bounds`. With the `aligned_unit`, whole rows and pages end together at every cut, so that nothing
    but the end is padded; the parts are then less equal. Raises `ConfigError` as `row_bounds` does.
    """
    if row_bytes < 1 or page_bytes < 1:
        raise ConfigError(f"row_bytes={row_bytes}, page_bytes={page_bytes} cannot be; both must be at least 1")
    step = math.lcm(row_bytes, page_bytes) if form == "padded" else page_bytes
    bounds = row_bounds(rows, parts, unit)
    stored, offset = [], 0
    for start, stop in itertools.pairwise(bounds):
        nbytes = -(-(stop - start) * row_bytes // step) * step
        stored.append(StoredPart(range(start, stop), offset, nbytes))
        offset += nbytes
    return CutLayout(row_bytes, page_bytes, form, tuple(stored))


def choose_layout(
    rows: int,
    row_bytes: int,
    page_bytes: int,
    parts: int,
    *,
    unit: int = 1,
    seconds: Mapping[Form, float] | None = None,
) -> CutLayout:
    """Lay out a matrix in the better form: by the measured time of its products, or else by bytes.

    Without `seconds` of both forms: padded if that is at most `MOST_PADDING` more than the weights, else segments.
    """
    padded, segments = (cut_layout(rows, row_bytes, page_bytes, parts, form, unit=unit) for form in _FORMS)
    if seconds is not None and len(seconds) == len(_FORMS):
        return padded if seconds["padded"] <= seconds["segments"] else segments
    return padded if padded.padding <= MOST_PADDING else segments


_FORMS: tuple[Form, ...] = ("padded", "segments")
