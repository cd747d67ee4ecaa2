"""Full blocks by what is in them: a block's name is the hash of its tokens and of all before them.

Keys and values also depend on the weights: the hash goes on otherwise from the block on that was computed by others.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the hash [16 bytes] of a full block: of the hash of the one before it (none: empty) and its tokens."""
    return blake2b(array("q", tokens).tobytes(), digest_size=16, key=parent).digest()


@dataclass
class PrefixCache:
    """The full blocks of one group of layers that sequences may share. Not thread-safe."""

    blocks: dict[bytes, int] = field(default_factory=dict)
    """By their names."""
    names: dict[int, bytes] = field(default_factory=dict)
    """Of these blocks: of those that are not in it nobody may share what is in them."""

    def register(self, name: bytes, block: int) -> None:
        """Let a block be found. Where there is one with the same tokens already, that one stays."""
        if name not in self.blocks:
            self.blocks[name] = block
            self.names[block] = name

    def rename(self, block: int, to: int) -> None:
        """Have what was in a block be in another, if it may be found."""
        name = self.names.pop(block, None)
        if name is not None:
            self.names[to], self.blocks[name] = name, to

    def forget(self, block: int) -> None:
        """Have a block be found no more."""
        name = self.names.pop(block, None)
        if name is not None:
            del self.blocks[name]

    def clear(self) -> None:
        """Have no block be found any more."""
        self.blocks.clear()
        self.names.clear()
