"""Where the keys and values of sequences lie in an engine's memory, as records that can be sent to another process.

A block of a sequence lies, in each layer of its group, in pages of the place's memory file: those of the sector that it
is in. A process that knows the sectors' pages and the blocks of a sequence can read its keys and values, also after the
engine's process has died, as long as somebody holds the file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from elastic.memory.backends.shared_file import SharedFile
from elastic.types import RankMemory

INT8 = "int8"
"""Keys and values in 8 bits, with a scale of 16 bits for the keys, and one for the values, of each token and head."""
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, INT8: 1}
SCALE_BYTES = 2
BLOCK_SLOTS = 32
"""Of a block whose tokens nobody has chosen."""


@dataclass(frozen=True)
class KVFormat:
    """The form of blocks. Engines with equal ones can take over each other's blocks as they are.

    Where decoder layers are cut, what is called a layer here, and wherever keys and values lie, is one part of the KV
    heads of one: `layer * kv_shards + part`.
    """

    block_tokens: int
    layout: str
    """A name of `executor.block_layout.LAYOUTS`."""
    dtype: str
    """A name of `ITEM_BYTES`."""
    heads: int
    """KV heads of one layer."""
    dim: int
    groups: tuple[tuple[tuple[int, ...], int | None], ...]
    """For each group of layers these, and their sliding window."""
    kv_shards: int = 1
    """In how many parts each decoder layer is."""

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each group."""
        return tuple(window for _, window in self.groups)

    @property
    def block_bytes(self) -> int:
        """Count the bytes of one block in one layer, with scales."""
        slots = self.block_tokens + (scale_slots(self.block_tokens, self.dim) if self.dtype == INT8 else 0)
        return 2 * slots * self.heads * self.dim * ITEM_BYTES[self.dtype]

    @property
    def group_block_bytes(self) -> int:
        """Count the bytes that a block of an instance's load stands for: in all layers of the first group."""
        (first, _), *_ = self.groups
        return self.block_bytes * len(first)


def scale_slots(tokens: int, dim: int) -> int:
    """Count the places, of as many bytes as one token has, that the scales of so many tokens take in an 8-bit block."""
    return -(-tokens * SCALE_BYTES // dim)


def usual_block_tokens(dtype: str, dim: int) -> int:
    """Return the tokens of a block where nobody has chosen them: with their scales they fill `BLOCK_SLOTS` places.

    A block's bytes are a power of two then wherever heads and dim are, as those of pages: blocks that are not make
    sectors of many pages.
    """
    if dtype != INT8:
        return BLOCK_SLOTS
    return max((t for t in range(1, BLOCK_SLOTS) if t + scale_slots(t, dim) <= BLOCK_SLOTS), default=1)


@dataclass(frozen=True)
class SequenceKV:
    """The keys and values of one sequence."""

    sequence: str
    computed: int
    """Tokens, from its first on, that have keys and values."""
    blocks: tuple[tuple[int, ...], ...]
    """For each group the engine's blocks, in order."""
    decoding: bool = False
    """Whether it is past its prompt: all of its tokens but the last are computed then. In a report `computed` is as of
    the last time that it got blocks."""
    exact: bool = False
    """Whether the full weights have computed all of it: then others may share its blocks where it goes. Said by who
    hands a sequence over, when nothing is computed of it any more."""


@dataclass(frozen=True)
class SectorPages:
    """The pages of one sector of a group, in the place's memory file: those of its first layer first."""

    group: int
    sector: int
    pages: tuple[int, ...]
    layers: tuple[int, ...] | None = None
    """Those whose pages they are, in order; None: all of the group."""


@dataclass(frozen=True)
class KVReport:
    """What has changed since the report before."""

    sectors: tuple[SectorPages, ...] = ()
    """Sectors that were mapped."""
    sequences: tuple[SequenceKV, ...] = ()
    """Of each sequence that got blocks or is in its prompt: the new blocks alone, and how much is computed."""
    ended: tuple[str, ...] = ()
    """Sequences whose blocks mean nothing any more: they come first, a sequence of that name may have begun anew."""
    epoch: int | None = None
    """Not None: that of the path which steps go by from now on (`LayerPath`). What was told before means nothing."""


@dataclass(frozen=True)
class KVSource:
    """The memory of an engine's KV cache as another process reads it."""

    file: SharedFile | None
    """Where processes of the host read it; None: nowhere, it is on a GPU."""
    page_bytes: int
    format: KVFormat
    sectors: tuple[SectorPages, ...] = field(default=(), repr=False)
    """Those that the blocks which are spoken of lie in; empty where they are told otherwise."""
    others: tuple[LayersKV, ...] = field(default=(), repr=False)
    """The same sectors in layers that other ranks computed, each in a file of its own."""
    memory: RankMemory | None = None
    """Where ranks read it that have met this one; None: nowhere."""

    def by_layers(self) -> tuple[LayersKV, ...]:
        """Return where each layer lies in the sectors: in the engine's own memory, and at others."""
        pages: dict[int, dict[int, tuple[int, ...]]] = {}
        for sector in self.sectors:
            layers = self.layers_of(sector)
            size = len(sector.pages) // max(1, len(layers))
            for i, layer in enumerate(layers):
                pages.setdefault(layer, {})[sector.sector] = sector.pages[i * size : (i + 1) * size]
        return LayersKV(self.file, self.page_bytes, self.format, pages, self.memory), *self.others

    def layers_of(self, sector: SectorPages) -> tuple[int, ...]:
        """Return the layers in which the pages of a sector are."""
        return self.format.groups[sector.group][0] if sector.layers is None else sector.layers


@dataclass(frozen=True)
class LayersKV:
    """The keys and values of some layers of an engine as another process reads them: all sectors that are mapped."""

    file: SharedFile | None
    """Where processes of the host read them; None: nowhere."""
    page_bytes: int
    format: KVFormat
    pages: Mapping[int, Mapping[int, tuple[int, ...]]] = field(repr=False, hash=False)
    """Layer -> sector -> its pages of the place, in order."""
    memory: RankMemory | None = None
    """Where other ranks read them; None: nowhere."""
    position: int = 0
    """Where another rank than their home has them: the items of the home's log that it had done by then."""

    def of_sectors(self, wanted: Collection[int]) -> LayersKV:
        """Return the same of these sectors alone, as far as they are known: there is less to send, and to look at."""
        pages = {
            layer: {sector: there[sector] for sector in wanted if sector in there}
            for layer, there in self.pages.items()
        }
        return replace(self, pages=pages)

    def with_blocks_of(self, sequences: Collection[SequenceKV]) -> LayersKV:
        """Return the same of the sectors alone in which the blocks of sequences are, as far as they are known."""
        pages = {}
        for group, (layers, _) in enumerate(self.format.groups):
            for layer in layers:
                there, size = self.pages.get(layer), self.sector_blocks(layer)
                if there:
                    wanted = {block // size for kv in sequences for block in kv.blocks[group]}
                    pages[layer] = {sector: there[sector] for sector in wanted if sector in there}
        return replace(self, pages=pages)

    def sector_blocks(self, layer: int) -> int:
        """Count the blocks that a sector has in a layer; 0: none is known there."""
        pages = next(iter(self.pages.get(layer, {}).values()), ())
        return len(pages) * self.page_bytes // self.format.block_bytes


class KVDirectory:
    """Where the KV of an engine's sequences lies, from its reports: so that it is known when its process is killed.

    It holds what the engine had told when it last finished a step. What a step in flight writes is not of it: that goes
    to blocks which were not told yet, behind the tokens that were, or over tokens that the next one does not see.
    """

    def __init__(self, source: KVSource) -> None:
        """Know nothing yet. `source` is that of the engine: without sectors."""
        self.epoch = 0
        """Of the path by which all was computed that is known."""
        self._source = source
        self._sectors: dict[tuple[int, int], SectorPages] = {}
        self._sizes: dict[int, int] = {}  # group -> blocks of a sector
        self._sequences: dict[str, SequenceKV] = {}

    def apply(self, report: KVReport) -> None:
        """Note what has changed."""
        if report.epoch is not None:
            self.epoch = report.epoch
            self._sectors, self._sizes, self._sequences = {}, {}, {}
        for sector in report.sectors:
            self._sectors[sector.group, sector.sector] = sector
            layer_pages = len(sector.pages) // max(1, len(self._source.layers_of(sector)))
            self._sizes[sector.group] = layer_pages * self._source.page_bytes // self._source.format.block_bytes
        for name in report.ended:
            self._sequences.pop(name, None)
        for new in report.sequences:
            earlier = self._sequences.get(new.sequence)
            if earlier is not None:
                new = replace(new, blocks=tuple(a + b for a, b in zip(earlier.blocks, new.blocks, strict=True)))
            self._sequences[new.sequence] = new

    def of(self, sequence: str, tokens: int) -> SequenceKV | None:
        """Return where the KV of a sequence lies, of which so many tokens are known, prompt and answer; None: nowhere.

        Layers with a sliding window keep a token in the place of one that fell out of it. A prompt is computed in
        chunks: one that was in flight may have written over tokens that have to be there to compute it again, so of a
        prompt longer than a window there is nothing.
        """
        kv = self._sequences.get(sequence)
        if kv is None:
            return None
        if kv.decoding:
            return replace(kv, computed=tokens - 1)
        windows = [window for window in self._source.format.windows if window is not None]
        if windows and tokens > min(windows):
            return None
        return kv

    def sectors_of(self, sequences: Iterable[SequenceKV]) -> tuple[SectorPages, ...]:
        """Return the pages of the sectors in which the blocks of sequences are, as far as they are known."""
        sectors: dict[tuple[int, int], SectorPages] = {}
        for kv in sequences:
            for group, blocks in enumerate(kv.blocks):
                for block in blocks if self._sizes.get(group) else ():
                    key = group, block // self._sizes[group]
                    if key in self._sectors:
                        sectors[key] = self._sectors[key]
        return tuple(sectors.values())
