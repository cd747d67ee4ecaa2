"""Cuts lie on pages, and for one product on rows as well; nothing is padded more than that needs."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import ConfigError
from elastic.planning.sharding.bounds import aligned_unit, most_parts, row_bounds
from support.sharding.page_layout import MOST_PADDING, Form, choose_layout, cut_layout, page_count

PAGE = 2 << 20
BF16 = 2

TABLE_2 = {  # model -> elements of a row, rows of each tensor, pages at TP1, pages at TP4, as printed
    "GPT-OSS-120B down": (2880, 2880 * 128, "1012.5", "253.125"),
    "GPT-OSS-120B gate_up": (2880, 2 * 2880 * 128, "2025", "506.25"),
    "GPT-OSS-20B down": (2880, 2880 * 32, "253.125", "63.281"),
    "GPT-OSS-20B gate_up": (2880, 2 * 2880 * 32, "506.25", "126.563"),
    "Llama-3.1-70B": (8192, 28672, "224", "56"),
    "Qwen2.5-32B": (5120, 27648, "135", "33.75"),
}

PADDING = {  # model -> hidden, intermediate, pages at TP1 and TP4, padding of one product and of four in percent
    "Llama-3-8B": (4096, 14336, 56, 14, 0, 0),
    "Llama-3.1-70B": (8192, 28672, 224, 56, 0, 0),
    "Mistral-7B": (4096, 14336, 56, 14, 0, 0),
    "Llama-2-7B": (4096, 11008, 43, 10.75, 2.3, 2.3),
    "Qwen2.5-72B": (8192, 29568, 231, 57.75, 0.4, 0.4),
    "Qwen2.5-32B": (5120, 27648, 135, 33.75, 3.7, 0.7),
    "Qwen3-32B": (5120, 25600, 125, 31.25, 12, 2.4),
    "Qwen2.5-14B": (5120, 13824, 67.5, 16.875, 18.5, 0.7),
    "Qwen2.5-7B": (3584, 18944, 64.75, 16.1875, 29.7, 5.0),
    "Gemma-3-27B": (5376, 21504, 110.25, 27.5625, 52.4, 1.6),
}


@pytest.mark.parametrize("model", TABLE_2)
def test_table_2_of_the_paper_follows_from_shapes(model: str) -> None:
    hidden, rows, whole, quarter = TABLE_2[model]
    for printed, parts in ((whole, 1), (quarter, 4)):
        pages = page_count(rows, hidden * BF16, PAGE, parts)
        digits = len(printed.partition(".")[2])
        assert abs(pages - Fraction(printed)) <= Fraction(1, 2 * 10**digits)
        assert digits == 3 or pages == Fraction(printed)


@pytest.mark.parametrize("model", PADDING)
def test_padding_of_well_known_models(model: str) -> None:
    hidden, rows, whole, quarter, one_product, four_products = PADDING[model]
    row_bytes = hidden * BF16
    assert page_count(rows, row_bytes, PAGE) == whole
    assert page_count(rows, row_bytes, PAGE, 4) == quarter
    forms: tuple[tuple[Form, float], ...] = (("padded", one_product), ("segments", four_products))
    for form, percent in forms:
        layout = cut_layout(rows, row_bytes, PAGE, 4, form)
        assert 100 * layout.padding == pytest.approx(percent, abs=0.1 if percent % 1 else 0.5)
    assert cut_layout(rows, row_bytes, PAGE, 1, "segments").padding_bytes < PAGE


def test_the_default_is_one_product_where_that_costs_little() -> None:
    small, large = (choose_layout(rows, 10240, PAGE, 4) for rows in (27648, 25600))
    assert (small.form, large.form) == ("padded", "segments")


def test_measured_times_decide_where_both_are_known() -> None:
    faster: dict[Form, float] = {"padded": 2.0, "segments": 1.0}
    assert choose_layout(27648, 10240, PAGE, 4, seconds=faster).form == "segments"
    assert choose_layout(25600, 10240, PAGE, 4, seconds={"padded": 1.0, "segments": 1.0}).form == "padded"
    assert choose_layout(25600, 10240, PAGE, 4, seconds={"padded": 1.0}).form == "segments"


shapes = st.tuples(
    st.integers(1, 400),  # rows
    st.integers(1, 96).map(lambda n: 2 * n),  # bytes of a row
    st.sampled_from([4, 16, 64, 96, 256]),  # bytes of a page
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 1, 3, 16]),
).filter(lambda s: s[0] >= s[3] * s[4])
forms = st.sampled_from(["padded", "segments"])


@given(shapes, forms)
def test_cuts_lie_on_pages_and_parts_hold_all_rows_once(shape: tuple[int, int, int, int, int], form: Form) -> None:
    rows, row_bytes, page, parts, unit = shape
    layout = cut_layout(rows, row_bytes, page, parts, form, unit=unit)
    assert [row for part in layout.parts for row in part.rows] == list(range(rows))
    end = 0
    for part in layout.parts:
        assert part.offset == end
        assert part.offset % page == 0
        assert part.nbytes >= len(part.rows) * row_bytes > 0
        assert part.rows.start % unit == 0
        if form == "padded":
            assert part.offset % row_bytes == 0
        end += part.nbytes
    assert end % page == 0
    assert layout.nbytes == end
    assert layout.padding_bytes == end - rows * row_bytes


@given(shapes, forms)
def test_padding_is_minimal(shape: tuple[int, int, int, int, int], form: Form) -> None:
    """No part could end a page earlier, or in one product, at an earlier row that ends on a page."""
    rows, row_bytes, page, parts, unit = shape
    for part in cut_layout(rows, row_bytes, page, parts, form, unit=unit).parts:
        ends = (
            range(page, part.nbytes + 1, page) if form == "segments" else range(row_bytes, part.nbytes + 1, row_bytes)
        )
        good = [end for end in ends if end >= len(part.rows) * row_bytes and end % page == 0]
        assert good == [part.nbytes]


@given(shapes, forms)
def test_what_a_rank_keeps_at_every_degree_is_a_run_of_pages(shape: tuple[int, int, int, int, int], form: Form) -> None:
    rows, row_bytes, page, parts, unit = shape
    layout = cut_layout(rows, row_bytes, page, parts, form, unit=unit)
    degree = 1
    while degree <= parts:
        kept = [layout.pages(part, degree) for part in range(degree)]
        assert [number for pages in kept for number in pages] == list(range(layout.nbytes // page))
        held = [[row for part in layout.run(number, degree) for row in part.rows] for number in range(degree)]
        assert [row for run in held for row in run] == list(range(rows))
        assert [run[0] for run in held] == list(row_bounds(rows, degree, unit)[:-1])
        degree *= 2


@given(shapes)
def test_segments_never_take_more_than_one_product_and_the_choice_is_by_that(
    shape: tuple[int, int, int, int, int],
) -> None:
    rows, row_bytes, page, parts, unit = shape
    padded, segments = (cut_layout(rows, row_bytes, page, parts, form, unit=unit) for form in ("padded", "segments"))
    assert segments.nbytes <= padded.nbytes
    assert segments.padding_bytes < parts * page
    chosen = choose_layout(rows, row_bytes, page, parts, unit=unit)
    assert chosen == (padded if padded.padding <= MOST_PADDING else segments)


@given(st.integers(1, 400), st.integers(1, 192), st.sampled_from([4, 16, 64, 256]), st.sampled_from([2, 4, 8]))
def test_cuts_at_rows_that_end_on_pages_need_no_padding_between_parts(
    rows: int, row_bytes: int, page: int, parts: int
) -> None:
    unit = aligned_unit(row_bytes, page)
    assert unit * row_bytes == math.lcm(row_bytes, page)
    if rows < parts * unit:
        return
    layout = cut_layout(rows, row_bytes, page, parts, "padded", unit=unit)
    assert all(part.nbytes == len(part.rows) * row_bytes for part in layout.parts[:-1])
    even = cut_layout(rows, row_bytes, page, parts, "padded")
    assert layout.nbytes <= even.nbytes
    for degree in (2, parts):  # and no rank keeps more than the largest part of an even cut
        most, most_even = (max(len(made.pages(part, degree)) for part in range(degree)) for made in (layout, even))
        assert most <= most_even


@given(st.integers(1, 500), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 40))
def test_bounds_are_nested_equal_and_on_units(rows: int, parts: int, unit: int) -> None:
    most = most_parts(rows, unit)
    if parts > most:
        with pytest.raises(ConfigError, match=f"cut into {parts} parts; {most} is the most"):
            row_bounds(rows, parts, unit)
        return
    bounds = row_bounds(rows, parts, unit)
    assert bounds[0] == 0
    assert bounds[-1] == rows
    assert all(bound % unit == 0 for bound in bounds[:-1])
    units = [-(-(stop - start) // unit) for start, stop in itertools.pairwise(bounds)]
    assert min(units) >= 1
    assert max(units) - min(units) <= 1
    if parts > 1:
        assert row_bounds(rows, parts // 2, unit) == bounds[::2]


@pytest.mark.parametrize(
    ("group", "tile", "rows", "parts"),
    [
        (128, 1, 11008, 64),  # Llama-2-7B, int4: 86 groups
        (128, 64, 11008, 64),
        (32, 64, 384, 4),  # the model inside: 6 tiles
        (128, 1, 384, 2),  # and 3 groups
        (1, 1, 384, 256),  # one scale of a row: anywhere
    ],
)
def test_groups_say_how_far_a_quantized_network_can_be_cut(group: int, tile: int, rows: int, parts: int) -> None:
    unit = math.lcm(group, tile)
    assert most_parts(rows, unit) == parts
    assert all(bound % group == 0 and bound % tile == 0 for bound in row_bounds(rows, parts, unit)[:-1])
    with pytest.raises(ConfigError, match="which may not be cut" if unit > 1 else "rows cannot be cut"):
        row_bounds(rows, 2 * parts, unit)


def test_what_cannot_be_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="parts=3 cannot be; it must be a power of two"):
        row_bounds(12, 3)
    with pytest.raises(ConfigError, match="rows=0 in units of 1"):
        row_bounds(0, 1)
    with pytest.raises(ConfigError, match="page_bytes=0"):
        cut_layout(8, 2, 0, 2, "padded")
    layout = cut_layout(8, 2, 4, 4, "padded")
    for part, degree in ((0, 8), (0, 3), (2, 2), (-1, 2)):
        with pytest.raises(ConfigError, match=f"part={part} of degree={degree} cannot be"):
            layout.run(part, degree)
