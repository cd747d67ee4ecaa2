"""Options of pruned matrices, and the names that stand for them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from elastic.errors import ConfigError, is_integer, is_number

CALIBRATED = ("wanda", "sparsegpt")
"""Criteria that need samples of a matrix's inputs."""
CRITERIA = ("magnitude", *CALIBRATED)


class _ByCriterion:
    """A way of pruning in which a criterion chooses what stays."""

    criteria: ClassVar[tuple[str, ...]] = CRITERIA
    by: str
    calibrated: bool
    """True if it needs samples of a matrix's inputs."""

    def __post_init__(self) -> None:
        if self.by not in self.criteria:
            raise ConfigError(f"by={self.by!r} is not supported; use one of: {', '.join(self.criteria)}")
        object.__setattr__(self, "calibrated", self.by in CALIBRATED)


@dataclass(frozen=True)
class SemiStructured(_ByCriterion):
    """N:M sparsity: of every `of` neighbouring inputs of an output, `kept` weights stay.

    The kept weights are stored in the dtype of the model, with one bit for each weight that says where they are.
    """

    kept: int = 2
    of: int = 4
    """2 of 4, or 4 of 8."""
    by: str = "magnitude"
    """What chooses them: "magnitude"; "wanda" (Sun et al., 2023); or "sparsegpt" (Frantar and Alistarh, 2023), which
    also changes those that stay. The latter two need calibration text."""

    def __post_init__(self) -> None:
        whole = is_integer(self.kept) and is_integer(self.of)
        if not whole or (self.kept, self.of) not in ((2, 4), (4, 8)):
            raise ConfigError(f"{self.kept}:{self.of} is no pattern that can be stored; use 2:4 or 4:8")
        super().__post_init__()


@dataclass(frozen=True)
class Unstructured(_ByCriterion):
    """Unstructured sparsity: a share of a matrix's weights is zero, anywhere in it.

    The kept weights are stored in the dtype of the model, with one bit for each weight that says where they are. So at
    16 bits a matrix takes 1 - sparsity + 1/16 of its bytes.
    """

    sparsity: float = 0.5
    """The share of weights that are zero, from 0.1 to 0.95: with less there would be little or nothing to save."""
    by: str = "magnitude"
    """What chooses them: "magnitude", among all weights of the matrix; "wanda", among those of an output; "sparsegpt",
    among those of 128 inputs, and it changes those that stay. The latter two need calibration text."""

    def __post_init__(self) -> None:
        if not is_number(self.sparsity) or not 0.1 <= self.sparsity <= 0.95:
            raise ConfigError(f"sparsity={self.sparsity!r} is not supported; use a share from 0.1 to 0.95")
        super().__post_init__()

    def removed(self, inputs: int) -> int:
        """Return how many of the first `inputs` weights of an output are zero, on average over the outputs."""
        return round(self.sparsity * inputs)


@dataclass(frozen=True)
class Structured(_ByCriterion):
    """Structured pruning: whole columns of a layer's FFN, or whole query heads, are left out of its matrices.

    Activations keep their shape, and so does the KV cache: key and value heads stay. The least important of a layer go
    first: those with the smallest weights ("magnitude", over all matrices that they are in, as in LLM-Pruner), or whose
    share of the output is the smallest ("wanda": the norm of their activations on calibration text times that of the
    weights which these are multiplied with).
    """

    criteria = ("magnitude", "wanda")
    ffn: float = 1.0
    """The share of the FFN's columns that stay; rounded to a multiple of 8 columns."""
    heads: float = 1.0
    """The share of the query heads that stay."""
    by: str = "magnitude"

    def __post_init__(self) -> None:
        for name, share in (("ffn", self.ffn), ("heads", self.heads)):
            if not is_number(share) or not 0.05 <= share <= 1:
                raise ConfigError(f"{name}={share!r} is not supported; use a share from 0.05 to 1")
        if self.ffn == self.heads == 1:
            raise ConfigError("Structured() removes nothing; give ffn or heads a share below 1")
        super().__post_init__()


Sparse = SemiStructured | Unstructured
Pruned = Sparse | Structured

NAMES = "2:4, 4:8, sparse50, ffn75, heads75"
"""Names that are known, for messages; the last three with any other percentage too."""


def pruned_by_name(name: str) -> Pruned | None:
    """Return what a plain name stands for, by magnitude; None if it is none of these.

    "2:4" and "4:8"; "sparse50": half of the weights are zero; "ffn75": three quarters of the FFN's columns stay;
    "heads75": three quarters of the query heads stay. Raises `ConfigError` for such a name with impossible numbers.
    """
    if pattern := re.fullmatch(r"(\d{1,3}):(\d{1,3})", name):
        return SemiStructured(int(pattern[1]), int(pattern[2]))
    percentage = re.fullmatch(r"(sparse|ffn|heads)(\d{1,3})", name)
    if percentage is None:
        return None
    share = int(percentage[2]) / 100
    if percentage[1] == "sparse":
        return Unstructured(share)
    return Structured(ffn=share) if percentage[1] == "ffn" else Structured(heads=share)


def name_of(config: Pruned) -> str:
    """Return a name for a config: the plain one that stands for it, and its criterion where that is not magnitude."""
    if isinstance(config, SemiStructured):
        name = f"{config.kept}:{config.of}"
    elif isinstance(config, Unstructured):
        name = f"sparse{100 * config.sparsity:g}"
    else:
        shares = (("ffn", config.ffn), ("heads", config.heads))
        name = "-".join(f"{kind}{100 * share:g}" for kind, share in shares if share < 1)
    return name if config.by == "magnitude" else f"{name}-{config.by}"
