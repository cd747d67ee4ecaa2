"""How the keys and values of a block lie in memory, and the index tensors that read and write them.

A layer's cache is that of its parts, one behind another: each has some of the KV heads, in blocks of its own. In 8 bits
a block has the scales of its values in itself, so whatever moves or shares blocks need not know of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from elastic.engines.core.kv_state import INT8, KVFormat, scale_slots

SCALE_DTYPE = torch.bfloat16
"""Values are divided by scales that are rounded to it. So they are within half a step of what they were: 127 times
1 + 2**-9 is still rounded to 127. Scales are exact in any dtype of attention but float16, which has not their range."""
_LARGEST = 127


@dataclass(frozen=True)
class BlockShape:
    """The size of one block in one part of a layer."""

    tokens: int
    heads: int
    """Of keys and of values."""
    dim: int


@dataclass(frozen=True, eq=False)
class CacheParts:
    """Parts of a layer's cache that are read and written together, as they lie in every layer of a group."""

    heads: int
    """Of keys and of values, in all of them."""
    first_blocks: torch.Tensor
    """[parts]: where the blocks of each begin, counted in blocks of the layer's cache."""
    places: torch.Tensor
    """[rows, 1]: where those of a token begin, in rows of `BlockLayout.row_heads` heads for each block before them."""


LAYOUTS = ("head_centric", "token_major")
"""[block, head, K/V, token, dim]: a head's tokens lie side by side, as attention reads them (AMOEBA, section 4); or
[block, K/V, token, head, dim]: a token's heads do, as a layer computes them."""


class BlockLayout:
    """An order of the axes of a block. Index tensors are int64, of one device with the cache; layers share them.

    In both orders it is [block, rows, K/V, token, heads of a row, dim]: of one head each, or one row of all heads.
    """

    stored: torch.dtype | None = None
    """Of the elements of a cache; None: that of attention."""

    def __init__(self, shape: BlockShape, order: str) -> None:
        """`order`: a name of `LAYOUTS`."""
        self.shape = shape
        self.row_heads = 1 if order == "head_centric" else shape.heads
        """The heads that lie side by side for one token."""
        self.rows = shape.heads // self.row_heads
        self.slots = shape.tokens
        """Places for vectors of a head in a block, for keys and for values each."""
        self.block_elements = 2 * shape.tokens * shape.heads * shape.dim
        """Of a block in a cache."""

    def parts(self, first_blocks: torch.Tensor) -> CacheParts:
        """Describe parts of a layer's cache by where the blocks of each begin, [parts]."""
        rows = torch.arange(self.rows, device=first_blocks.device)
        places = (first_blocks[:, None] * self.rows + rows).view(-1, 1)
        return CacheParts(len(first_blocks) * self.shape.heads, first_blocks, places)

    def read_index(self, tables: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Make the index [2, requests, places, blocks] that reads requests' blocks, by their tables [requests, blocks].

        Each place, of places [places, 1], is of `row_heads` heads: some of them read these.
        """
        keys = torch.add(places, tables[:, None], alpha=self.rows) * 2  # [requests, places, blocks]
        return torch.stack([keys, keys + 1])

    def read(self, cache: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy keys and values [requests, heads, blocks * tokens, dim] out of a layer's cache [elements]."""
        width = self.shape.tokens * self.row_heads * self.shape.dim
        rows = cache.view(-1, width).index_select(0, index.flatten())
        return self.arrange(rows, index.shape[1], index.shape[2])

    def arrange(self, rows: torch.Tensor, requests: int, places: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what was read, [rows, tokens * row_heads * dim], as keys and values."""
        heads, dim = self.row_heads, self.shape.dim
        if heads == 1:
            keys, values = rows.view(2, requests, places, -1, dim)
        else:
            keys, values = rows.view(2, requests, places, -1, heads, dim).transpose(3, 4).flatten(2, 3)
        return keys, values

    def as_read(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [heads, new, dim] as they are read once they were written."""
        return keys, values

    def write_index(self, blocks: torch.Tensor, offsets: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Make the index that writes new tokens, from their blocks [new] and the places in these [new]."""
        tokens = self.shape.tokens
        keys = torch.add(places, blocks, alpha=self.rows) * (2 * tokens) + offsets  # [places, new]
        return torch.cat([keys, keys + tokens]).flatten()

    def write(self, cache: torch.Tensor, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy keys and values [heads, new, dim] into a layer's cache [elements]."""
        heads, dim = self.row_heads, self.shape.dim
        if heads > 1:
            keys, values = (s.view(-1, heads, *s.shape[1:]).transpose(1, 2) for s in (keys, values))
        cache.view(-1, heads * dim).index_copy_(0, index, torch.cat((keys, values)).view(-1, heads * dim))


class Int8Blocks(BlockLayout):
    """Blocks in 8 bits, with a scale for the keys, and one for the values, of each token and head.

    Where an order has [token, …], there is [slot, …] of int8: the values, and behind them the scales in the same order,
    in as many slots more as they need (`scale_slots`). A value is its int8 times its scale: no zero point.
    """

    stored = torch.int8

    def __init__(self, shape: BlockShape, order: str, dtype: torch.dtype) -> None:
        """`dtype`: of keys and values as they are read."""
        super().__init__(shape, order)
        tokens, heads, dim = shape.tokens, shape.heads, shape.dim
        self.slots = tokens + scale_slots(tokens, dim)
        each = dim // SCALE_DTYPE.itemsize
        """Scales that have room in a slot of one head."""
        self._first_scale = tokens * each
        self._values = BlockLayout(BlockShape(self.slots, heads, dim), order)
        self._scales = BlockLayout(BlockShape(self.slots * each, heads, 1), order)
        self.block_elements = self._values.block_elements
        self._dtype = dtype

    def read(self, cache: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        vectors, dim = self.shape.tokens * self.row_heads, self.shape.dim
        rows = cache.view(-1, self.slots * self.row_heads * dim).index_select(0, index.flatten())
        first = self._first_scale * self.row_heads
        values = rows[:, : vectors * dim].view(-1, vectors, dim)
        scales = rows.view(SCALE_DTYPE)[:, first : first + vectors]
        return self.arrange(dequantize(values, scales, self._dtype).flatten(1), index.shape[1], index.shape[2])

    def as_read(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return dequantize(*quantize(keys), self._dtype), dequantize(*quantize(values), self._dtype)

    def write_index(self, blocks: torch.Tensor, offsets: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return that of the values, and that of their scales: [2, …]."""
        values = self._values.write_index(blocks, offsets, places)
        return torch.stack([values, self._scales.write_index(blocks, self._first_scale + offsets, places)])

    def write(self, cache: torch.Tensor, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        (keys, key_scales), (values, value_scales) = quantize(keys), quantize(values)
        self._values.write(cache, index[0], keys, values)
        self._scales.write(cache.view(SCALE_DTYPE), index[1], key_scales[..., None], value_scales[..., None])


def quantize(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return vectors [..., dim] as int8, and their scales [...]: the largest value is 127 of these, or -127."""
    states = states.float()
    scales = (states.abs().amax(-1) / _LARGEST).to(SCALE_DTYPE)
    steps = torch.where(scales == 0, 1, scales).float()
    return (states / steps[..., None]).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8), scales


def dequantize(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return vectors [..., dim] of int8 times their scales [...], rounded once to `dtype`."""
    if dtype == torch.float16:  # in which small scales would be rounded, or be zero, and 127 of the largest overflow
        states = torch.mul(values, scales[..., None].float(), out=values.new_empty(values.shape, dtype=dtype))
        return states.clamp_(torch.finfo(dtype).min, torch.finfo(dtype).max)
    return values.to(dtype).mul_(scales[..., None].to(dtype))


def layout_of(form: KVFormat, dtype: torch.dtype) -> BlockLayout:
    """Return the layout of blocks of a form, for attention in `dtype`."""
    shape = BlockShape(form.block_tokens, form.heads, form.dim)
    return Int8Blocks(shape, form.layout, dtype) if form.dtype == INT8 else BlockLayout(shape, form.layout)
