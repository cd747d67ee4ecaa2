"""The model of simulated ranks by layers and their shards: pages, seconds, and the links between ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from elastic.config import is_number, require
from elastic.engines.core.kv_state import KVFormat
from elastic.errors import ConfigError
from elastic.planning.pipeline.chunk_cost import Chunk, ChunkCost, ModelCost
from elastic.planning.sharding.heads import kv_parts
from elastic.planning.sharding.numbers import by_layer
from elastic.planning.sharding.shard_pages import ShardPages
from elastic.sim.core.fleet import RankModel


@dataclass(frozen=True)
class Links:
    """What lies between ranks, and between a rank and its checkpoint."""

    bytes_s: float = 25e9
    """To or from one rank: 200 Gb/s, unless it is said."""
    hop_s: float = 1e-5
    """For a message, besides its bytes."""
    core_s: float = 0.0
    """For each exchange of ranks that share a layer, of the core of each of them, which computes besides."""
    stage_s: float = 0.0
    """For each run of layers that a step has at one rank of several: to take the step there, and to hand it on."""
    answer_s: float = 5e-4
    """For a rank to answer the fleet."""
    flip_s: float = 1e-3
    """That an instance stands still when its steps take another way, besides what is copied in that time."""
    checkpoint_bytes_s: float = 2e9
    """Of weights that no rank has."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for what cannot be."""
        for name, value in vars(self).items():
            positive = name in ("bytes_s", "checkpoint_bytes_s")
            good = is_number(value) and (value > 0 if positive else value >= 0)
            require(good, f"links.{name}", value, f"a number {'above' if positive else 'of at least'} 0")


@dataclass(frozen=True)
class Packed:
    """A variant of the layers."""

    name: str = "int4"
    share: float = 0.28
    """Of a full layer's pages."""
    seconds: float = 1.0
    """Of a full layer's seconds."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for what cannot be."""
        require(isinstance(self.name, str) and bool(self.name), "packed.name", self.name, "a name")
        require(is_number(self.share) and 0 < self.share < 1, "packed.share", self.share, "a share between 0 and 1")
        require(is_number(self.seconds) and self.seconds > 0, "packed.seconds", self.seconds, "a number above 0")


class StepParts(NamedTuple):
    """Seconds of a step."""

    cut_s: float
    """Of one layer, what its ranks divide by their shards."""
    whole_s: float
    """Of one layer, what each of its ranks computes: matrices that are not cut, and what is done once for a module."""
    rest_s: float
    """Of what is not in layers,"""
    beside_s: float = 0.0
    """and of what home does beside its turn to compute."""

    def alone_s(self, layers: float) -> float:
        """Return the seconds of a step of one rank by itself."""
        return self.beside_s + self.rest_s + (self.cut_s + self.whole_s) * layers


@dataclass(frozen=True)
class LayeredModel:
    """A model whose layers are all alike, as instances of a fleet have it."""

    rank: RankModel
    """Of an instance that computes all layers itself."""
    shards: int = 1
    """In how many parts each layer is cut."""
    kv_shards: int = 1
    """Of these, how many have keys and values of their own."""
    page_bytes: int = 2 << 20
    token_bytes: int = 8192
    """Of the hidden states of a token, between two layers."""
    rest: float = 0.05
    """Of a step's seconds, the share that is not in layers: embedding, norm, head, sampling. They are at home."""
    links: Links = field(default_factory=Links)
    packed: Packed | None = None
    beside_s: float = 0.0
    """Of a step's seconds, those in which home has nothing computed: it schedules, samples and tells;"""
    beside_chunk_s: float = 0.0
    """and for each chunk after the first."""
    _counted: dict[tuple[frozenset[int], frozenset[int]], int] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Pages of weights by shards and packed layers, as far as they were counted."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for what cannot be."""
        pages, parts = self.rank.pages, self.layers * self.kv_shards
        require(
            self.shards >= 1 and self.shards % self.kv_shards == 0, "shards", self.shards, "a multiple of kv_shards"
        )
        require(0 <= self.rest < 1, "rest", self.rest, "at least 0 and below 1")
        for name in ("beside_s", "beside_chunk_s"):
            value = getattr(self, name)
            require(is_number(value) and value >= 0, name, value, "a number of at least 0")
        if pages.sector % parts:
            raise ConfigError(
                f"a sector of {pages.sector} pages cannot be had in {parts} parts alike; say it otherwise"
            )
        if pages.layer_weights * pages.layers > pages.weights:
            raise ConfigError(f"weights of {pages.weights} pages are fewer than those of the layers they are of")

    @property
    def layers(self) -> int:
        """The number of decoder layers."""
        return self.rank.pages.layers

    @cached_property
    def kv(self) -> KVFormat:
        """The form of keys and values, with blocks of the right size."""
        pages, block_tokens = self.rank.pages, self.rank.engine.block_tokens
        part_bytes = self.part_pages * self.page_bytes // pages.blocks_per_sector
        parts = tuple(range(self.layers * self.kv_shards))
        dim = max(1, part_bytes // (4 * block_tokens))
        return KVFormat(block_tokens, "head_centric", "float16", 1, dim, ((parts, None),), self.kv_shards)

    @property
    def part_pages(self) -> int:
        """The pages of a sector in one part of the KV cache."""
        return self.rank.pages.sector // (self.layers * self.kv_shards)

    @property
    def fixed_pages(self) -> int:
        """The pages of a rank that are neither of layers nor for keys and values."""
        return self.rank.pages.weights - self.layers * self.rank.pages.layer_weights

    @cached_property
    def layer_pages(self) -> ShardPages:
        """The pages of a layer, by its shards."""
        pages = self.rank.pages.layer_weights
        bounds = [part * pages // self.shards for part in range(self.shards + 1)]
        return ShardPages((), tuple((range(a, b),) for a, b in pairwise(bounds)))

    def weight_pages(self, shards: Collection[int], packed: Collection[int] = ()) -> int:
        """Count the pages of these shards' weights; of `packed` layers all are there, and smaller."""
        key = frozenset(shards), frozenset(packed)
        if key not in self._counted:
            small = self.packed_pages if self.packed is not None else 0
            layers = by_layer(shards, self.shards).items()
            self._counted[key] = sum(small if n in packed else self.layer_pages.pages(parts) for n, parts in layers)
        return self._counted[key]

    @property
    def packed_pages(self) -> int:
        """The pages of a layer in the variant."""
        return -(-int(1000 * (self.packed.share if self.packed else 1) * self.rank.pages.layer_weights) // 1000)

    def kv_parts(self, shards: Iterable[int]) -> tuple[int, ...]:
        """Return the parts of the KV cache that shards have, by number."""
        return kv_parts(shards, self.shards, self.kv_shards)

    def kv_pages(self, shards: Iterable[int]) -> int:
        """Count the pages of a sector in what these shards have of the KV cache."""
        return self.part_pages * len(self.kv_parts(shards))

    @property
    def model_cost(self) -> ModelCost | None:
        """What ranks say that steps cost; None: it is no cost of chunks."""
        whole = self.rank.cost
        if not isinstance(whole, ChunkCost):
            return None
        return ModelCost(whole.times((1 - self.rest) / self.layers), whole.times(self.rest), self.layers)

    def parts(self, chunks: Sequence[Chunk]) -> StepParts:
        """Return the seconds of one layer, and of what is not in layers."""
        whole = self.rank.cost.batch(chunks)
        beside = min(whole, self.beside_s + self.beside_chunk_s * (len(chunks) - 1)) if chunks else 0.0
        seconds = whole - beside
        within = seconds * (1 - self.rest)
        cut = within if self.rank.cut is None else min(within, self.rank.cut.batch(chunks))
        return StepParts(cut / self.layers, (within - cut) / self.layers, seconds - within, beside)


@dataclass(frozen=True)
class WeightLocation:
    """Where weights lie: as answers of simulated ranks say it."""

    rank: str
    shards: frozenset[int]
