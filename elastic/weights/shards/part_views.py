"""Tensors of some parts of a layer, as few as possible, wherever the parts lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from elastic.planning.sharding.cut_plan import CutPlan, ParameterCut

Views = Mapping[str, tuple[torch.Tensor, ...]]
"""By parameter: in the order of its rows, each with the checkpoint's shape but for the dimension that is cut."""


def make_views(plan: CutPlan, parts: tuple[int, ...], view: Callable[[ParameterCut, range], torch.Tensor]) -> Views:
    """Make the views of some parts; `view` gives a run of rows of a parameter, [rows, ...]."""
    with torch.inference_mode(False), torch.no_grad():
        return {name: tuple(view(cut, rows) for rows in joined_rows(cut, parts)) for name, cut in plan.cuts.items()}


def joined_rows(cut: ParameterCut, parts: tuple[int, ...]) -> Iterator[range]:
    """Yield the rows of parts in their order, those of neighbours as one run: for each fused matrix one run or more."""
    for matrix in range(len(cut.rows[0])):
        run: range | None = None
        for part in sorted(parts):
            rows = cut.rows[part][matrix]
            if run is not None and run.stop != rows.start:
                yield run
                run = None
            run = rows if run is None else range(run.start, rows.stop)
        if run is not None:
            yield run
