"""Seconds of chunks of prompts and of batches of them, fitted to measurements.

KunServe, section 4.3, equations 1 to 3: a chunk of c new tokens behind p earlier ones costs
alpha (p c + c² + c) + beta c + gamma. The chunks of a batch share what it pays once, such as reading the weights. The
paper takes that to be all of gamma, and calls it lambda elsewhere, which is fitted: here it is fitted by itself. Pairs
within a chunk have an alpha of their own, as half of them are masked, and a term is added: keys and values of earlier
tokens are read once for a chunk, whatever its length, rho p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

from elastic.errors import ConfigError
from elastic.planning.least_squares import not_negative


class Chunk(NamedTuple):
    """Consecutive tokens of one request that are computed in one batch; a decode step has one token."""

    request: str
    start: int
    """Tokens of the request before."""
    tokens: int
    """New ones."""

    def cut(self, count: int) -> tuple[Chunk, Chunk]:
        """Cut it behind so many of its tokens; the second part has the longer prefix."""
        request, start, total = self
        return Chunk(request, start, count), Chunk(request, start + count, total - count)


class BatchTiming(NamedTuple):
    """A batch that was measured: (earlier tokens, new tokens) of each chunk, and seconds."""

    chunks: tuple[tuple[int, int], ...]
    seconds: float


@dataclass(frozen=True)
class ChunkCost:
    """Seconds of chunks and batches; no coefficient is below zero. Costs of layers add up to those of a stage."""

    prefix: float
    """For each pair of a new token and one before the chunk: alpha."""
    own: float
    """For each of c² + c pairs within a chunk of c tokens: alpha, too, in the paper."""
    token: float
    """For each new token: beta."""
    chunk: float
    """For each chunk: gamma."""
    shared: float
    """Of `chunk`, what the chunks of one batch pay once: lambda, or gamma where both are one."""
    read: float = 0.0
    """For each token before a chunk, whose keys and values are read for it: rho, not in the paper."""

    def __call__(self, chunk: Chunk) -> float:
        """Return the seconds of a chunk that is a batch by itself. (Equation 1, and what is read)"""
        _, start, count = chunk
        return count * (self.prefix * start + self.own * (count + 1) + self.token) + self.read * start + self.chunk

    def batch(self, chunks: Sequence[Chunk]) -> float:
        """Return the seconds of a batch; 0.0 for none. (Equation 3)"""
        return math.fsum(map(self, chunks)) - (len(chunks) - 1) * self.shared if chunks else 0.0

    def tokens_within(self, chunk: Chunk, seconds: float) -> int:
        """Return how many of a chunk's first tokens cost so much at the most, as a batch by themselves."""
        linear = self.prefix * chunk.start + self.own + self.token
        left_s = seconds - self.chunk - self.read * chunk.start
        tokens = larger_root(self.own, linear, -left_s) if left_s > 0 else 0.0
        return max(0, math.floor(min(chunk.tokens, tokens) + 1e-9))  # infinitely many, where tokens cost nothing

    def __add__(self, other: ChunkCost) -> ChunkCost:
        return ChunkCost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def times(self, factor: float) -> ChunkCost:
        """Return so many times these seconds, such as those of several layers alike."""
        return ChunkCost(*(factor * a for a in astuple(self)))

    @classmethod
    def fit(cls, samples: Sequence[BatchTiming], form: str = "two alphas and reads") -> ChunkCost:
        """Fit by least squares of relative errors, no coefficient below zero. `form` is one of `FORMS`.

        Raises `ConfigError` for fewer samples than coefficients, and for seconds that are not above zero.
        """
        terms = FORMS[form]
        if len(samples) < len(terms) or min(sample.seconds for sample in samples) <= 0:
            raise ConfigError(
                f"{len(samples)} samples cannot be fitted; measure {len(terms)} batches or more, in seconds above 0"
            )
        rows = [[AMOUNTS[term](sample.chunks) / sample.seconds for term in terms] for sample in samples]
        fitted = dict(zip(terms, not_negative(rows), strict=True))
        alpha, extra, shared = fitted.get("alpha", 0.0), fitted.get("extra", 0.0), fitted.get("batch", 0.0)
        return cls(
            prefix=fitted.get("prefix", alpha),
            own=fitted.get("own", alpha),
            token=fitted.get("token", 0.0),
            chunk=extra + shared,
            shared=shared,
            read=fitted.get("read", 0.0),
        )


@dataclass(frozen=True)
class ModelCost:
    """Seconds of a model's decoder layers, all alike, and of what is before and behind them."""

    layer: ChunkCost
    rest: ChunkCost
    """Embedding, final norm, head and sampling."""
    layers: int

    @property
    def whole(self) -> ChunkCost:
        """The cost of the whole model."""
        return self.stage(self.layers, last=True)

    def stage(self, layers: int, *, last: bool) -> ChunkCost:
        """Return the cost of so many layers, and of the rest, which is the last stage's."""
        cost = self.layer.times(layers)
        return cost + self.rest if last else cost


@dataclass(frozen=True)
class ChunkProfile:
    """Batches that were measured in a model, its decoder layers and what is around them apart."""

    layer: tuple[BatchTiming, ...]
    """Seconds of one layer, of as many as there are on the average."""
    rest: tuple[BatchTiming, ...]
    layers: int

    @property
    def whole(self) -> tuple[BatchTiming, ...]:
        """The seconds of the whole model."""
        pairs = zip(self.layer, self.rest, strict=True)
        return tuple(BatchTiming(layer.chunks, self.layers * layer.seconds + rest.seconds) for layer, rest in pairs)

    def fit(self, form: str = "two alphas and reads") -> ModelCost:
        """Fit the layers and the rest, in which there is no attention."""
        return ModelCost(ChunkCost.fit(self.layer, form), ChunkCost.fit(self.rest, "linear"), self.layers)


AMOUNTS: Mapping[str, Callable[[Sequence[tuple[int, int]]], float]] = {
    "alpha": lambda chunks: sum(start * count + count * count + count for start, count in chunks),
    "prefix": lambda chunks: sum(start * count for start, count in chunks),
    "own": lambda chunks: sum(count * count + count for _, count in chunks),
    "read": lambda chunks: sum(start for start, _ in chunks),
    "token": lambda chunks: sum(count for _, count in chunks),
    "extra": len,
    "batch": lambda chunks: 1.0,
}
"""What coefficients are multiplied with, for a batch. Of n chunks gamma n - lambda (n - 1) is (gamma - lambda) n +
lambda: neither `extra` nor `batch` is below zero."""
_LINEAR = ("token", "extra", "batch")
FORMS: Mapping[str, tuple[str, ...]] = {
    "paper": ("alpha", *_LINEAR),
    "reads": ("alpha", *_LINEAR, "read"),
    "two alphas and reads": ("prefix", "own", "read", *_LINEAR),
    "two alphas": ("prefix", "own", *_LINEAR),
    "no prefix": ("own", *_LINEAR),  # as DistServe
    "no self-attention": ("prefix", *_LINEAR),  # as NanoFlow
    "linear": _LINEAR,
    "tokens": ("token", "batch"),
}
"""The coefficients that are fitted."""


def larger_root(square: float, linear: float, constant: float) -> float:
    """Return the larger root of square x² + linear x + constant, written so that a small `square` does no harm."""
    if square <= 0 and linear <= 0:
        return math.inf if constant < 0 else 0.0
    below = math.sqrt(max(0.0, linear * linear - 4 * square * constant))
    if linear >= 0:
        return -2 * constant / (linear + below) if linear + below else math.inf
    return (below - linear) / (2 * square)
