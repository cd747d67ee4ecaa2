"""Where the parts of a layer lie in its range of addresses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import torch

from elastic.memory.checksum import digest
from elastic.memory.weight_layout import LayerLayout, ParameterLayout, pages_under
from elastic.planning.sharding.cut_plan import CutPlan
from elastic.planning.sharding.shard_pages import ShardPages


@dataclass(frozen=True)
class Piece:
    """Rows of a parameter that are one run of bytes."""

    name: str
    """The parameter's."""
    dim: int
    rows: range
    """Of that dimension of the parameter."""
    offset: int
    """Bytes from the beginning of the layer's range."""
    nbytes: int

    @property
    def key(self) -> str:
        """Its name among the digests of its layer, and among what a buffer shows."""
        return f"{self.name}[{self.rows.start}:{self.rows.stop}]"

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """View these rows of the parameter, any shape, or of what has its shape."""
        return parameter.narrow(self.dim, self.rows.start, len(self.rows))

    def digest(self, rows: torch.Tensor) -> int:
        """Compute the checksum of these rows of the parameter, any shape, in the order in which pages have them."""
        return digest(rows.movedim(self.dim, 0))


@dataclass(frozen=True)
class LayerCut:
    """How a decoder layer is cut: into which parts, and which of its parameters come and go part by part.

    These are stored with the dimension that is cut outermost, so that a part of one is a run of bytes. The others that
    are cut are too small for that, such as biases: they stay as long as any part does.
    """

    plan: CutPlan
    parted: tuple[str, ...]

    def stored(self, name: str, like: ParameterLayout, page_bytes: int) -> ParameterLayout:
        """Return the layout of a parameter that is to lie in pages; `like` is that of the model's tensor."""
        if name not in self.parted:
            return like
        dim = self.plan.cuts[name].dim
        order = (dim, *(other for other in like.order if other != dim))
        return ParameterLayout(like.shape, like.dtype, order, like.shape, cuts=(dim,), alignment=page_bytes)

    def pieces(self, layout: LayerLayout, part: int) -> Iterator[Piece]:
        """Yield what a part consists of in a layout of the layer, one parameter after another."""
        for name in self.parted:
            for rows in self.plan.cuts[name].rows[part]:
                yield self.piece(layout, name, rows)

    def piece(self, layout: LayerLayout, name: str, rows: range) -> Piece:
        """Return a run of rows of a parameter that comes and goes part by part."""
        cut, lies = self.plan.cuts[name], layout.parameters[name]
        row_bytes = cut.row_elements * lies.dtype.itemsize
        return Piece(name, cut.dim, rows, lies.offset + rows.start * row_bytes, len(rows) * row_bytes)

    def common(self, layout: LayerLayout) -> LayerLayout:
        """Return the layout of all that does not come and go part by part, where it lies."""
        return layout.without(self.parted)

    def pages(self, layout: LayerLayout, page_bytes: int) -> ShardPages:
        """Return the pages of a layout of the layer, by part."""
        common = self.common(layout).parameters.values()
        return ShardPages(
            tuple(pages_under(lies.offset, lies.nbytes, page_bytes) for lies in common),
            tuple(
                tuple(pages_under(piece.offset, piece.nbytes, page_bytes) for piece in self.pieces(layout, part))
                for part in range(self.plan.parts)
            ),
        )

    def checksum(self, layout: LayerLayout) -> str:
        """Tell by few letters how the parameters and their parts lie, as `LayerLayout.checksum`."""
        rows = [(cut.name, cut.rows) for cut in self.plan.cuts.values()]
        return blake2b(f"{layout.checksum} {rows}".encode(), digest_size=8).hexdigest()


def whole_pages(layout: LayerLayout, page_bytes: int) -> ShardPages:
    """Return the pages of a layer that is not cut: one part."""
    lies = layout.parameters.values()
    return ShardPages((), (tuple(pages_under(p.offset, p.nbytes, page_bytes) for p in lies),))
