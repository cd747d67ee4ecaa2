"""What laying weights on pages costs, so that cuts in 2 and 4 are given back in place (AMOEBA, table 2, figure 10 b).

    python benchmarks/padding.py [--products]
    python benchmarks/padding.py --device cuda:0

By shapes alone, no weight is made, but with `--products`: pages of one matrix of the feed-forward network whole and
in parts, and the bytes that padding adds, in percent of the weights. `padded`: one product over all parts, so that
cuts are whole rows and whole pages. `segments`: a product for each part. `aligned`: one product as well, cut at the
rows that end on pages, so that nothing but the end is padded; the largest part is then so many percent larger than an
even one. `here`: what is done. Nothing is padded: cuts are the aligned ones where the largest part is at most 5 %
larger than an even one, else even ones, and a page that two parts have in common is kept by both, which is counted.
Experts are cut by experts. Pages are of 2 MiB, for the model inside of 4 to 64 KiB. Target: at most 14 % for all of
the paper's models.

`--products`, which a GPU always has, is the time of both products of a dense network, `up` and `down`, in each form
over that of plain weights, in bfloat16, for one token and for 64; where that is known, the form is chosen by it.
Target, of a GPU: at most 1.001 in the form `padded`. `here` is plain, so it is 1 by itself. Networks above 512 MiB are
left out on a CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import arguments, finish, paired, ratio, show, table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from elastic.errors import ConfigError
from elastic.planning.sharding.bounds import aligned_unit, most_parts, row_bounds
from elastic.runtime.cutting import MOST_UNEVEN
from support.sharding.page_layout import CutLayout, Form, choose_layout, cut_layout, page_count

CUDA_PAGE = 2 << 20
BF16 = 2
MOST_PADDING = 0.14


@dataclass(frozen=True)
class Case:
    """One kind of matrix of a model. Of a dense network, the three lie on as many pages as each other."""

    model: str
    rows: int
    """The size inside, or the number of experts."""
    row_bytes: int
    paper: bool = False
    """Whether the paper measures it (tables 2 and 3)."""
    page_bytes: int = CUDA_PAGE
    parts: int = 4


def dense(model: str, hidden: int, width: int, *, paper: bool = False) -> Case:
    return Case(model, width, hidden * BF16, paper)


def inside(page_kib: int, parts: int) -> Case:
    return Case(f"model inside, {page_kib} KiB, TP{parts}", 384, 128 * BF16, False, page_kib << 10, parts)


def experts(model: str, hidden: int, width: int, count: int) -> list[Case]:
    """The fused `gate` and `up` of all experts, and their `down`."""
    sizes = {"gate_up": 2 * width, "down": width}
    return [Case(f"{model}, {name}", count, rows * hidden * BF16, paper=True) for name, rows in sizes.items()]


CASES = (
    dense("Llama-3-8B", 4096, 14336, paper=True),
    dense("Llama-3.1-70B", 8192, 28672, paper=True),
    dense("Mistral-7B", 4096, 14336),
    dense("Llama-2-7B", 4096, 11008, paper=True),
    dense("Qwen2.5-72B", 8192, 29568),
    dense("Qwen2.5-32B", 5120, 27648, paper=True),
    dense("Qwen3-32B", 5120, 25600, paper=True),
    dense("Qwen2.5-14B", 5120, 13824),
    dense("Qwen2.5-7B", 3584, 18944),
    dense("Gemma-3-27B", 5376, 21504),
    *experts("Qwen3-30B-A3B", 2048, 768, 128),
    *experts("GPT-OSS-20B", 2880, 2880, 32),
    *experts("GPT-OSS-120B", 2880, 2880, 128),
    *(inside(page_kib, parts) for page_kib in (4, 16, 64) for parts in (2, 4)),
)


def measure(case: Case) -> dict[str, Any]:
    """Return pages, and padding as a share of the weights."""
    sizes = (case.rows, case.row_bytes, case.page_bytes)
    padded, segments = (cut_layout(*sizes, case.parts, form) for form in ("padded", "segments"))
    return {
        "model": case.model,
        "paper": case.paper,
        "page_bytes": case.page_bytes,
        "parts": case.parts,
        "pages": float(page_count(*sizes)),
        "part_pages": float(page_count(*sizes, case.parts)),
        "padded": padded.padding,
        "segments": segments.padding,
        **aligned(case),
        "here": kept_twice(case),
        "chosen": choose_layout(*sizes, case.parts).form,
    }


def aligned(case: Case) -> dict[str, float | None]:
    """Return the padding and the largest part of cuts at rows that end on pages; None: there are too few of these."""
    unit = aligned_unit(case.row_bytes, case.page_bytes)
    try:
        layout = cut_layout(case.rows, case.row_bytes, case.page_bytes, case.parts, "segments", unit=unit)
    except ConfigError:
        return {"aligned": None, "aligned_largest": None}
    largest = max(len(part.rows) for part in layout.parts)
    return {"aligned": layout.padding, "aligned_largest": largest * case.parts / case.rows - 1}


def kept_twice(case: Case) -> float:
    """Return the bytes of pages that all ranks keep together beyond the weights, as a share of these."""
    unit = aligned_unit(case.row_bytes, case.page_bytes)
    even = row_bounds(case.rows, case.parts)
    bounds = row_bounds(case.rows, case.parts, unit) if most_parts(case.rows, unit) >= case.parts else even
    if max(b - a for a, b in pairwise(bounds)) * case.parts > (1 + MOST_UNEVEN) * case.rows:
        bounds = even
    ends = [bound * case.row_bytes for bound in bounds]
    pages = sum(-(-stop // case.page_bytes) - start // case.page_bytes for start, stop in pairwise(ends))
    return pages * case.page_bytes / ends[-1] - 1


FORMS: tuple[Form, ...] = ("padded", "segments")
TOKENS = (1, 64)
MOST_ON_CPU = 512 << 20
"""Bytes of a network's two matrices."""


def products(case: Case, device: str, rounds: int, several: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return the time of a network's products in each form over that of plain ones, by form and tokens."""
    hidden, found = case.row_bytes // BF16, dict[str, dict[str, float]]()
    for tokens in several:
        x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=device)
        works = {"plain": network(x, [case.rows])}
        for form in FORMS:
            works[form] = network(x, stored_rows(cut_layout(case.rows, case.row_bytes, case.page_bytes, 4, form)))
        times = paired(works, device, rounds)
        found |= {f"{form}, {tokens} tokens": ratio(times[form], times["plain"]) for form in FORMS}
    return found


def stored_rows(layout: CutLayout) -> list[int]:
    """Return the rows of each product: one over all that is stored, padding included, or one for each part."""
    if layout.form == "padded":
        return [sum(part.nbytes for part in layout.parts) // layout.row_bytes]
    return [len(part.rows) for part in layout.parts]


def network(x: torch.Tensor, rows: list[int]) -> Callable[[], torch.Tensor]:
    """Return what computes both products of a network of x [tokens, hidden], in parts of so many rows, added up."""
    parts = [torch.zeros(2, count, x.shape[1], dtype=x.dtype, device=x.device) for count in rows]

    def work() -> torch.Tensor:
        return sum(((x @ up.T) @ down for up, down in parts[1:]), start=(x @ parts[0][0].T) @ parts[0][1])

    return work


def timed(case: Case, device: str) -> bool:
    """Whether its products are measured: `down` of a dense network lies by the rows that are cut."""
    small = device != "cpu" or 2 * case.rows * case.row_bytes <= MOST_ON_CPU
    return small and case.page_bytes == CUDA_PAGE and "," not in case.model


def show_products(rows: list[dict[str, Any]]) -> None:
    """Print the times of products, and the form that is chosen by them."""
    cells = []
    for row in rows:
        for tokens in TOKENS:
            times = {
                f: row["products"][key] for f in FORMS if (key := f"{f}, {tokens} tokens") in row.get("products", ())
            }
            if not times:
                continue
            sizes = row["rows"], row["row_bytes"], row["page_bytes"], row["parts"]
            chosen = choose_layout(*sizes, seconds={form: time["median"] for form, time in times.items()}).form
            cells.append([row["model"], tokens, *map(show, times.values()), chosen])
    table(["products over plain ones", "tokens", *FORMS, "chosen"], cells)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def main() -> None:
    options = arguments(
        __doc__.splitlines()[0], products={"action": "store_true", "help": "measure products of dense networks, too"}
    )
    rows = [measure(case) for case in CASES]
    options.products = options.products or options.device != "cpu"
    measured = [case for case in CASES if options.products and timed(case, options.device)]
    for case, row in zip(CASES, rows, strict=True):
        if case in (measured[:1] if options.quick else measured):
            row |= {"rows": case.rows, "row_bytes": case.row_bytes}
            rounds, several = (2, TOKENS[:1]) if options.quick else (options.rounds, TOKENS)
            row["products"] = products(case, options.device, rounds, several)
    shares = ("padded", "segments", "aligned", "aligned_largest", "here")
    cells = [
        [
            r["model"],
            f"{r['pages']:.6g}",
            f"{r['part_pages']:.6g}",
            *(percent(r[share]) for share in shares),
            r["chosen"],
        ]
        for r in rows
    ]
    header = [
        "matrix",
        "pages",
        "of a part",
        "padded %",
        "segments %",
        "aligned %",
        "its largest part +%",
        "here %",
        "chosen",
    ]
    table(header, cells)
    print()
    if options.products:
        show_products(rows)
        print()
    for form, most in (
        ("in the chosen form", max(row[row["chosen"]] for row in rows if row["paper"])),
        ("here", max(row["here"] for row in rows if row["paper"])),
    ):
        verdict = "met" if most <= MOST_PADDING else "missed"
        print(f"most of the paper's models {form}: {percent(most)} % ({verdict}, <= 14 %)")
    finish("padding", options.device, rows)


if __name__ == "__main__":
    main()
