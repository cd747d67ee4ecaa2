"""Where the keys and values of sequences lie in an engine's memory, as records that can be sent to another process.

A block of a sequence lies, in each layer of its group, in pages of the place's memory file: those of the sector that it
is in. A process that knows the sectors' pages and the blocks of a sequence can read its keys and values, also after the
engine's process has died, as long as somebody holds the file.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class KVFormat:
    """The form of blocks. Engines with equal ones can take over each other's blocks as they are."""

    block_tokens: int
    layout: str
    """A name of `executor.block_layout.LAYOUTS`."""
    dtype: str
    heads: int
    dim: int
    groups: tuple[tuple[tuple[int, ...], int | None], ...]
    """For each group of layers these, and their sliding window."""


@dataclass(frozen=True)
class SequenceKV:
    """The keys and values of one sequence."""

    sequence: str
    computed: int
    """Tokens, from its first on, that have keys and values."""
    blocks: tuple[tuple[int, ...], ...]
    """For each group the engine's blocks, in order."""


@dataclass(frozen=True)
class SectorPages:
    """The pages of one sector of a group, in the place's memory file: those of its first layer first."""

    group: int
    sector: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class KVReport:
    """What has changed since the report before."""

    sectors: tuple[SectorPages, ...] = ()
    """Sectors that were mapped."""
    sequences: tuple[SequenceKV, ...] = ()
    """Of each sequence that got blocks or is in its prompt: the new blocks alone, and how much is computed."""
    ended: tuple[str, ...] = ()
    """Sequences whose blocks mean nothing any more."""


@dataclass(frozen=True)
class SharedFile:
    """A memory file that other processes of the same host and user can open: by /proc, while one holds it."""

    host: str
    """Names the host and its process namespace."""
    pid: int
    descriptor: int
    inode: int
    """So that another file that got the number is noticed."""
    nbytes: int = 0


@dataclass(frozen=True)
class KVSource:
    """The memory of an engine's KV cache as another process reads it."""

    file: SharedFile
    page_bytes: int
    format: KVFormat
    sectors: tuple[SectorPages, ...] = field(default=(), repr=False)
    """Those that the blocks which are spoken of lie in; empty where they are told otherwise."""
