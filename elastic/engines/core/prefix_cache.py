"""Full blocks by what is in them: a block's name is the hash of its tokens and of all before them.

Keys and values also depend on the weights: the hash goes on otherwise from the block on that was computed by others.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the hash [16 bytes] of a full block: of the hash of the one before it (none: empty) and its tokens."""
    return blake2b(array("q", tokens).tobytes(), digest_size=16, key=parent).digest()


def other_weights(parent: bytes, form: bytes) -> bytes:
    """Return what stands for `parent` in `block_hash` where weights of another form (16 bytes) compute what follows."""
    return blake2b(form, digest_size=16, key=parent).digest()


class PrefixCache:
    """The full blocks of one group of layers that sequences may share. Not thread-safe."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}

    def __contains__(self, block: int) -> bool:
        """Return whether what is in a block may be shared."""
        return block in self._hashes

    @property
    def blocks(self) -> tuple[int, ...]:
        """Those whose content may be shared."""
        return tuple(self._hashes)

    def find(self, name: bytes) -> int | None:
        """Return the block of this hash, if there is one."""
        return self._blocks.get(name)

    def register(self, name: bytes, block: int) -> None:
        """Let a block be found. Where there is one with the same tokens already, that one stays."""
        if name not in self._blocks:
            self._blocks[name] = block
            self._hashes[block] = name

    def forget(self, block: int) -> None:
        """Have a block be found no more."""
        name = self._hashes.pop(block, None)
        if name is not None:
            del self._blocks[name]

    def clear(self) -> None:
        """Have no block be found any more."""
        self._blocks.clear()
        self._hashes.clear()
