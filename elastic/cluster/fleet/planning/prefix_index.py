"""Which instance has computed how much of a prompt's beginning, as far as a fleet can know."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic.engines.core.prefix_cache import block_hash


def block_hashes(tokens: Sequence[int], block_tokens: int, first: Sequence[bytes] = ()) -> list[bytes]:
    """Return the hashes of the full blocks of a sequence, each of all tokens up to its end; `first`: the first ones."""
    hashes = list(first)
    for start in range(len(hashes) * block_tokens, len(tokens) - block_tokens + 1, block_tokens):
        parent = hashes[-1] if hashes else b""
        hashes.append(block_hash(parent, tokens[start : start + block_tokens]))
    return hashes


@dataclass(eq=False)
class PrefixIndex:
    """The blocks that instances are thought to have. Not thread-safe.

    An engine keeps what was used last while nobody needs the room, and does not say what it gives up. So of each
    instance as many blocks are remembered as it has, and those that were not used for the longest are forgotten.
    """

    _blocks: dict[str, OrderedDict[bytes, None]] = field(default_factory=dict)

    def cached(self, instance: str, hashes: Sequence[bytes]) -> int:
        """Return how many of a sequence's first blocks an instance has."""
        blocks = self._blocks.get(instance, OrderedDict())
        return next((i for i, name in enumerate(hashes) if name not in blocks), len(hashes))

    def note(self, instance: str, hashes: Sequence[bytes], most: int) -> None:
        """Remember that an instance computes these blocks; it holds `most` at all."""
        blocks = self._blocks.setdefault(instance, OrderedDict())
        for name in reversed(hashes):  # the last are the first that are given up
            blocks[name] = None
            blocks.move_to_end(name)
        while len(blocks) > most:
            blocks.popitem(last=False)

    def forget(self, instance: str) -> None:
        """Forget an instance."""
        self._blocks.pop(instance, None)
