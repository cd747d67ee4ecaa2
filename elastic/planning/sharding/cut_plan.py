"""Which parameters of a decoder layer are cut over ranks, and where. (AMOEBA, section 3.2)

Only feed-forward networks are: they are most of the weights, and the sum over ranks of what their parts give is what
the whole gives. Everything else stays whole on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from elastic.errors import ConfigError
from elastic.planning.sharding.bounds import row_bounds
from elastic.planning.sharding.ffn import FFN, Shape, find_ffns


@dataclass(frozen=True)
class ParameterCut:
    """One parameter that is cut."""

    name: str
    """Within the layer."""
    shape: Shape
    """The checkpoint's."""
    dim: int
    """The dimension that is cut; stored outermost, its rows are runs of bytes."""
    rows: tuple[tuple[range, ...], ...]
    """Of each part, its rows of `dim`: one range for each matrix that is fused in it, such as `gate` and `up`."""

    @property
    def row_elements(self) -> int:
        """Elements of one row of `dim`."""
        return math.prod(self.shape) // self.shape[self.dim]

    def elements(self, part: int) -> int:
        """Return the elements of a part."""
        return sum(map(len, self.rows[part])) * self.row_elements


@dataclass(frozen=True)
class FFNCut:
    """A feed-forward network that is cut: each rank computes it with its part, and the outputs are added up."""

    module: str
    """The module that it is, within the layer; "": the layer itself."""
    kind: Literal["dense", "experts"]
    source: Literal["plan", "structure"]
    """How it was recognized: by the model's tensor-parallel plan, or by its shapes alone."""
    cuts: tuple[ParameterCut, ...]
    summed: str
    """The module whose outputs are to be added up over the ranks: the last matrix, or the experts."""
    once: tuple[str, ...]
    """Parameters that are added after the sum, or by one rank alone: the bias of the last matrix."""


@dataclass(frozen=True)
class CutPlan:
    """A decoder layer cut into parts. Parameters that are in no cut are whole everywhere."""

    parts: int
    ffns: tuple[FFNCut, ...]
    shapes: Mapping[str, Shape]
    cuts: Mapping[str, ParameterCut] = field(init=False, repr=False, compare=False)
    """The parameters that are cut, by name."""
    elements: int = field(init=False, repr=False, compare=False)
    """Of the whole layer."""

    def __post_init__(self) -> None:
        cuts = {cut.name: cut for ffn in self.ffns for cut in ffn.cuts}
        object.__setattr__(self, "cuts", cuts)
        object.__setattr__(self, "elements", sum(map(math.prod, self.shapes.values())))

    def kept(self, part: int) -> int:
        """Return the elements that a rank keeps which has one of the parts."""
        cut = sum(math.prod(cut.shape) - cut.elements(part) for cut in self.cuts.values())
        return self.elements - cut


def cut_layer(
    shapes: Mapping[str, Shape],
    hidden: int,
    parts: int,
    *,
    styles: Mapping[str, str] | None = None,
    transposed: Collection[str] = (),
    unit: int = 1,
) -> CutPlan:
    """Cut the feed-forward networks of a decoder layer, dense ones by columns of the inside, others by experts.

    `shapes` are those of all its parameters, `hidden` is the model's hidden size, `styles` as of `tp_styles`.
    `transposed` names modules that store their matrix as [inputs, outputs] (Conv1D), and `unit` is as in `row_bounds`
    for the dimension inside: of quantized weights, a common multiple of the inputs of `down` that share a scale, and of
    the outputs of `gate` and `up` that a kernel lays out together. Raises `ConfigError` that says what was looked for
    if there is none, if one cannot be told from something else, and if it cannot be cut into so many parts.
    """
    ffns = find_ffns(shapes, hidden, styles or {}, transposed)
    return CutPlan(parts, tuple(_cut(ffn, shapes, parts, unit) for ffn in ffns), dict(shapes))


def _cut(ffn: FFN, shapes: Mapping[str, Shape], parts: int, unit: int) -> FFNCut:
    """Cut one network at the same rows in all of its parameters."""
    where = ffn.module or "the layer's own feed-forward network"
    try:
        bounds = row_bounds(ffn.rows, parts, unit if ffn.kind == "dense" else 1)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    cuts = []
    for name, dim in ffn.dims.items():
        fused = shapes[name][dim] // ffn.rows  # matrices that lie behind one another
        rows = tuple(
            tuple(range(n * ffn.rows + start, n * ffn.rows + stop) for n in range(fused))
            for start, stop in pairwise(bounds)
        )
        cuts.append(ParameterCut(name, shapes[name], dim, rows))
    return FFNCut(ffn.module, ffn.kind, ffn.source, tuple(cuts), ffn.summed, ffn.once)
