"""How the keys and values of a block lie in memory, and the index tensors that read and write them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockShape:
    """The size of one block in one layer."""

    tokens: int
    heads: int
    """Of keys and of values."""
    dim: int

    @property
    def elements(self) -> int:
        """Count the elements of keys and values together."""
        return 2 * self.tokens * self.heads * self.dim


class BlockLayout(ABC):
    """An order of the axes of a block. Index tensors are int64, of one device with the cache; layers share them."""

    def __init__(self, shape: BlockShape) -> None:
        self.shape = shape

    @abstractmethod
    def read_index(self, tables: torch.Tensor) -> torch.Tensor:
        """Make the index that reads the blocks of requests, from their tables [requests, blocks]."""

    @abstractmethod
    def read(self, cache: torch.Tensor, index: torch.Tensor, requests: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy keys and values [requests, heads, blocks * tokens, dim] out of a layer's cache [elements]."""

    @abstractmethod
    def write_index(self, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Make the index that writes new tokens, from their blocks [new] and the places in these [new]."""

    @abstractmethod
    def write(self, cache: torch.Tensor, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy keys and values [heads, new, dim] into a layer's cache [elements]."""

    def clear(self, cache: torch.Tensor, blocks: torch.Tensor) -> None:
        """Fill blocks [count] of a layer's cache [elements] with zeros."""
        cache.view(-1, self.shape.elements).index_fill_(0, blocks, 0)


class HeadCentric(BlockLayout):
    """[block, head, K/V, token, dim]: a head's tokens lie side by side, as attention reads them (AMOEBA, section 4)."""

    def read_index(self, tables: torch.Tensor) -> torch.Tensor:
        heads = torch.arange(self.shape.heads, device=tables.device)[:, None]
        keys = (tables[:, None] * self.shape.heads + heads) * 2  # [requests, heads, blocks]
        return torch.stack([keys, keys + 1]).flatten()

    def read(self, cache: torch.Tensor, index: torch.Tensor, requests: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, heads, dim = self.shape.tokens, self.shape.heads, self.shape.dim
        rows = cache.view(-1, tokens * dim).index_select(0, index)
        keys, values = rows.view(2, requests, heads, -1, dim)
        return keys, values

    def write_index(self, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        tokens = self.shape.tokens
        heads = torch.arange(self.shape.heads, device=blocks.device)[:, None]
        keys = (blocks * self.shape.heads + heads) * (2 * tokens) + offsets  # [heads, new]
        return torch.stack([keys, keys + tokens]).flatten()

    def write(self, cache: torch.Tensor, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        dim = self.shape.dim
        cache.view(-1, dim).index_copy_(0, index, torch.cat((keys, values)).view(-1, dim))


class TokenMajor(BlockLayout):
    """[block, K/V, token, head, dim]: a token's heads lie side by side, as a layer computes them."""

    def read_index(self, tables: torch.Tensor) -> torch.Tensor:
        keys = tables * 2
        return torch.stack([keys, keys + 1]).flatten()

    def read(self, cache: torch.Tensor, index: torch.Tensor, requests: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, heads, dim = self.shape.tokens, self.shape.heads, self.shape.dim
        rows = cache.view(-1, tokens * heads * dim).index_select(0, index)
        keys, values = rows.view(2, requests, -1, heads, dim).transpose(2, 3)
        return keys, values

    def write_index(self, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        tokens = self.shape.tokens
        keys = blocks * (2 * tokens) + offsets
        return torch.cat([keys, keys + tokens])

    def write(self, cache: torch.Tensor, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        row = self.shape.heads * self.shape.dim
        new = torch.cat((keys.transpose(0, 1), values.transpose(0, 1)))
        cache.view(-1, row).index_copy_(0, index, new.view(-1, row))


LAYOUTS: dict[str, type[BlockLayout]] = {"head_centric": HeadCentric, "token_major": TokenMajor}
