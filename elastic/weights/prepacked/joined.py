"""Matrices that are multiplied with the same inputs, as one: of queries, keys and values, of gate and up.

In a step of a few tokens a product of torch's in oneDNN's order is to a good part its call. Where such matrices lie one
behind another in their pages, and oneDNN would order all of them as it orders each, they are one larger matrix as they
are: nothing is copied, and each is still a weight by itself for whatever reads, writes or takes it away.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import accumulate, pairwise

import torch

from elastic.weights.prepacked.onednn import OneDNNLayout, find_layout, multiply
from elastic.weights.prepacked.padding import multiply_padded, padded_rows

SAME_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Modules of one parent, in the order of their calls and of their weights."""
ROWS = (1, 2, 4, 16, 17, 64, 128)
"""Of the products whose bits are compared."""
NOTHING = (None, 0, None)
"""Kept of a product."""
LARGEST_BYTES = 2**26
"""Of all matrices together: products with more take so long that calls do not matter, and so would the comparison."""


class JoinedProduct:
    """The product of inputs with all of some matrices, of which each takes its own outputs."""

    def __init__(self, matrix: torch.Tensor, outputs: tuple[int, ...], padded: tuple[int, ...] = ()) -> None:
        """`matrix`: from `OneDNNLayout.view`, [sum of outputs, inputs]; `padded`: see `padded_rows`."""
        self._matrix, self._padded = matrix, padded
        self._bounds = tuple(pairwise(accumulate(outputs, initial=0)))
        self.last: tuple[torch.Tensor | None, int, torch.Tensor | None] = NOTHING
        """Inputs, their version, and the product. Threads may come between one another: each reads it once. `NOTHING`
        when a matrix was written."""

    def product(self, x: torch.Tensor, number: int) -> torch.Tensor | None:
        """Multiply x, [..., inputs], with one of the matrices; returns [..., its outputs], a view of all outputs.

        They are computed for the first matrix, and kept for those that follow with the very same inputs, until the
        last of them. None: these are other inputs, as when threads come between one another.
        """
        version = 0 if x.is_inference() else x._version
        inputs, of_version, product = self.last
        if number == 0:
            product = multiply_padded(x, self._matrix, None, self._padded)
            self.last = (x, version, product)
        if number == len(self._bounds) - 1:  # also for other inputs: what is kept is as large as a prompt is long
            self.last = NOTHING
        if product is None or (number and (inputs is not x or of_version != version)):
            return None
        first, stop = self._bounds[number]
        return product[..., first:stop]


def find_groups(names: Mapping[str, object]) -> list[tuple[str, ...]]:
    """List those among a layer's parameters, by name, whose modules are given the same inputs."""
    groups = []
    for modules in SAME_INPUTS:
        for name in names:
            prefix = name.removesuffix(f"{modules[0]}.weight")
            group = tuple(f"{prefix}{module}.weight" for module in modules)
            if prefix != name and names.keys() >= set(group):
                groups.append(group)
    return groups


def join(layouts: tuple[OneDNNLayout, ...], packed: tuple[torch.Tensor, ...]) -> JoinedProduct | None:
    """Return the product with all of some matrices, each [outputs, inputs] in its order; None: they are not one.

    It owns nothing: `packed` must outlive it.
    """
    adjacent = all(first.data_ptr() + first.nbytes == second.data_ptr() for first, second in pairwise(packed))
    layout = joined_layout(layouts, torch.get_num_threads()) if adjacent else None
    if layout is None:
        return None
    padded = padded_rows(layout.shape[1], layout.dtype)
    return JoinedProduct(layout.view(packed[0]), tuple(each.shape[0] for each in layouts), padded)


@functools.cache
def joined_layout(layouts: tuple[OneDNNLayout, ...], threads: int) -> OneDNNLayout | None:
    """Return oneDNN's order of all the matrices together; None if they are not that one behind another.

    Nor if a product with so many threads has other bits than theirs, as tried with a few numbers of rows.
    """
    (first, *others), outputs = layouts, [layout.shape[0] for layout in layouts]
    if any(layout.shape[1] != first.shape[1] or layout.dtype != first.dtype for layout in others):
        return None
    if sum(outputs) * first.shape[1] * first.dtype.itemsize > LARGEST_BYTES:
        return None
    layout = find_layout((sum(outputs), first.shape[1]), first.dtype)
    if layout is None:
        return None
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.randn(layout.shape, generator=generator).to(layout.dtype)
        packed = layout.pack(whole)
        parts = [each.pack(part) for each, part in zip(layouts, torch.split(whole, outputs), strict=True)]
        if not torch.equal(packed.view(-1), torch.cat([part.view(-1) for part in parts])):
            return None
        for rows in ROWS:
            x = torch.randn(rows, layout.shape[1], generator=generator).to(layout.dtype)
            apart = [multiply(x, each.view(part), None) for each, part in zip(layouts, parts, strict=True)]
            if not torch.equal(multiply(x, layout.view(packed), None), torch.cat(apart, 1)):
                return None
    return layout
