"""How the keys and values of a block lie in memory, and the index tensors that read and write them.

A layer's cache is that of its parts, one behind another: each has some of the KV heads, in blocks of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockShape:
    """The size of one block in one part of a layer."""

    tokens: int
    heads: int
    """Of keys and of values."""
    dim: int

    @property
    def elements(self) -> int:
        """Count the elements of keys and values together."""
        return 2 * self.tokens * self.heads * self.dim


@dataclass(frozen=True, eq=False)
class CacheParts:
    """Parts of a layer's cache that are read and written together, as they lie in every layer of a group."""

    heads: int
    """Of keys and of values, in all of them."""
    first_blocks: torch.Tensor
    """[parts]: where the blocks of each begin, counted in blocks of the layer's cache."""
    places: torch.Tensor
    """The same as a layout wants it: see `BlockLayout.places`."""


class BlockLayout(ABC):
    """An order of the axes of a block. Index tensors are int64, of one device with the cache; layers share them."""

    def __init__(self, shape: BlockShape) -> None:
        self.shape = shape

    def parts(self, first_blocks: torch.Tensor) -> CacheParts:
        """Describe parts of a layer's cache by where the blocks of each begin, [parts]."""
        return CacheParts(len(first_blocks) * self.shape.heads, first_blocks, self.places(first_blocks))

    @abstractmethod
    def places(self, first_blocks: torch.Tensor) -> torch.Tensor:
        """Make what index tensors of parts are made of, [parts or heads, 1]."""

    @abstractmethod
    def read_index(self, tables: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Make the index that reads the blocks of requests, from their tables [requests, blocks]."""

    @abstractmethod
    def read(
        self, cache: torch.Tensor, index: torch.Tensor, requests: int, heads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy keys and values [requests, heads, blocks * tokens, dim] out of a layer's cache [elements]."""

    @abstractmethod
    def write_index(self, blocks: torch.Tensor, offsets: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Make the index that writes new tokens, from their blocks [new] and the places in these [new]."""

    @abstractmethod
    def write(self, cache: torch.Tensor, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy keys and values [heads, new, dim] into a layer's cache [elements]."""

    def clear(self, cache: torch.Tensor, blocks: torch.Tensor) -> None:
        """Fill blocks [count] of a layer's cache [elements] with zeros."""
        cache.view(-1, self.shape.elements).index_fill_(0, blocks, 0)


class HeadCentric(BlockLayout):
    """[block, head, K/V, token, dim]: a head's tokens lie side by side, as attention reads them (AMOEBA, section 4)."""

    def places(self, first_blocks: torch.Tensor) -> torch.Tensor:
        heads = torch.arange(self.shape.heads, device=first_blocks.device)
        return (first_blocks[:, None] * self.shape.heads + heads).view(-1, 1)

    def read_index(self, tables: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        keys = (tables[:, None] * self.shape.heads + places) * 2  # [requests, heads, blocks]
        return torch.stack([keys, keys + 1]).flatten()

    def read(
        self, cache: torch.Tensor, index: torch.Tensor, requests: int, heads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, dim = self.shape.tokens, self.shape.dim
        rows = cache.view(-1, tokens * dim).index_select(0, index)
        keys, values = rows.view(2, requests, heads, -1, dim)
        return keys, values

    def write_index(self, blocks: torch.Tensor, offsets: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        tokens = self.shape.tokens
        keys = (blocks * self.shape.heads + places) * (2 * tokens) + offsets  # [heads, new]
        return torch.stack([keys, keys + tokens]).flatten()

    def write(self, cache: torch.Tensor, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        dim = self.shape.dim
        cache.view(-1, dim).index_copy_(0, index, torch.cat((keys, values)).view(-1, dim))


class TokenMajor(BlockLayout):
    """[block, K/V, token, head, dim]: a token's heads lie side by side, as a layer computes them."""

    def places(self, first_blocks: torch.Tensor) -> torch.Tensor:
        return first_blocks[:, None]

    def read_index(self, tables: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        keys = (tables[:, None] + places) * 2  # [requests, parts, blocks]
        return torch.stack([keys, keys + 1]).flatten()

    def read(
        self, cache: torch.Tensor, index: torch.Tensor, requests: int, heads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, inside, dim = self.shape.tokens, self.shape.heads, self.shape.dim
        rows = cache.view(-1, tokens * inside * dim).index_select(0, index)
        keys, values = rows.view(2, requests, heads // inside, -1, inside, dim).transpose(3, 4).flatten(2, 3)
        return keys, values

    def write_index(self, blocks: torch.Tensor, offsets: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        tokens = self.shape.tokens
        keys = (blocks + places) * (2 * tokens) + offsets  # [parts, new]
        return torch.cat([keys, keys + tokens]).flatten()

    def write(self, cache: torch.Tensor, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        inside, dim = self.shape.heads, self.shape.dim
        parts = [states.view(-1, inside, *states.shape[1:]).transpose(1, 2) for states in (keys, values)]
        cache.view(-1, inside * dim).index_copy_(0, index, torch.cat(parts).view(-1, inside * dim))


LAYOUTS: dict[str, type[BlockLayout]] = {"head_centric": HeadCentric, "token_major": TokenMajor}
