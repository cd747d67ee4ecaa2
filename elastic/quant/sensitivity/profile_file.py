"""A sensitivity order with all its scores, and the JSON file that keeps it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastic.directories import replacing
from elastic.errors import ConfigError, require_path
from elastic.memory.checksum import digest

FILE_FORMAT = 2


@dataclass(frozen=True)
class ProfileSettings:
    """The settings that the scores depend on: profiles with equal settings are equal."""

    variant: str
    """The variant that replaced layers, such as "int4"."""
    config: Mapping[str, Any]
    """The config of the variant, in full."""
    alpha1: float
    alpha2: float
    beta: float
    lazy: bool
    """True if candidates that could not win a round were left out of it."""
    dtype: str
    """The dtype of the activations."""
    layers: tuple[str, ...]
    """The `fingerprint` of each layer's weights."""
    text: str
    """The sha256 of the token ids."""
    sequences: int
    tokens: int
    """Tokens of one sequence."""


@dataclass(frozen=True)
class SearchRound:
    """One round of the greedy search: the scores of the candidates, and the layer that was chosen."""

    chosen: int
    mds: Mapping[int, float]
    """Model Degradation Sensitivity of each candidate, given the layers chosen before (MorphServe, equation 4)."""
    lis: Mapping[int, float]
    """Layer Importance Score of each candidate (equation 5): the highest is chosen, of equal ones the first layer."""


@dataclass(frozen=True)
class Profile:
    """The order in which to swap the layers of a model, with the scores that it comes from."""

    setting: ProfileSettings
    lts: tuple[float, ...]
    """Layer Transformation Sensitivity of each layer (MorphServe, equation 2): a cosine, as all scores are."""
    lrs: tuple[float, ...]
    """Layer Replacement Sensitivity of each layer (equation 3)."""
    rounds: tuple[SearchRound, ...] = ()
    order: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The layer indices, the first to swap first."""
    complete: bool = field(init=False, repr=False, compare=False)
    """True if every layer is in the order."""

    def __post_init__(self) -> None:
        order = tuple(round_.chosen for round_ in self.rounds)
        object.__setattr__(self, "order", order)
        object.__setattr__(self, "complete", len(order) == len(self.lts))

    def check(self, layers: Sequence[nn.Module | str]) -> None:
        """Raise `ConfigError` unless this is a profile of a model with these decoder layers, or fingerprints of such.

        Weights in float32, bfloat16 or the dtype of the checkpoint have the same fingerprints; quantized ones have not.
        """
        if len(layers) != len(self.lts):
            raise ConfigError(f"the profile is of a model with {len(self.lts)} layers, this one has {len(layers)}")
        pairs = zip(layers, self.setting.layers, strict=True)
        changed = [
            index
            for index, (layer, expected) in enumerate(pairs)
            if (layer if isinstance(layer, str) else fingerprint(layer)) != expected
        ]
        if changed:
            raise ConfigError(
                f"the profile is of another model: the weights of {len(changed)} of {len(layers)} layers differ "
                f"(the first is layer {changed[0]}); profile this model"
            )

    def save(self, path: str | Path) -> None:
        """Write a JSON file; one that was there is replaced in one step, or stays whole."""
        path = require_path(path, "path")
        scores = {"lts": self.lts, "lrs": self.lrs, "rounds": [dataclasses.asdict(r) for r in self.rounds]}
        setting = dataclasses.asdict(self.setting)
        content = {"format": FILE_FORMAT, "complete": self.complete, "order": self.order, "setting": setting, **scores}
        try:
            with replacing(path) as partial:
                partial.write_text(json.dumps(content, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"the profile cannot be written to {path}: {error.strerror}") from error

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a complete profile. Raises `ConfigError` for one that is absent, damaged or unfinished."""
        profile = read(require_path(path, "path"))
        if not profile.complete:
            done, layers = len(profile.rounds), len(profile.lts)
            raise ConfigError(
                f"{path} is unfinished ({done} of {layers} layers); profile in the same way again to go on"
            )
        return profile


def read(path: Path) -> Profile:
    """Read a profile, finished or not. Raises `ConfigError` for a file that is none."""
    try:
        content = json.loads(path.read_text())
        profile = _parse(content)
        _check(profile, content)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, ArithmeticError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path} is no profile, or a damaged one ({reason}); remove it and profile again") from error
    return profile


def fingerprint(layer: nn.Module) -> str:
    """Return a checksum of the names, shapes and values of a layer's weights.

    Values are compared as bfloat16, so that a model loaded in float32 is the same model in bfloat16.
    """
    weights = ((name, parameter.detach()) for name, parameter in layer.named_parameters())
    return fingerprint_of((name, tuple(weight.shape), digest(weight.to(torch.bfloat16))) for name, weight in weights)


def fingerprint_of(weights: Iterable[tuple[str, tuple[int, ...], int]]) -> str:
    """Return the `fingerprint` of weights by their names, shapes, and digests as bfloat16, as the layer has them."""
    text = "".join(f"{name} {shape} {checksum}\n" for name, shape, checksum in weights)
    return hashlib.sha256(text.encode()).hexdigest()


def _parse(content: Any) -> Profile:
    if content["format"] != FILE_FORMAT:
        raise ValueError(f"format {content['format']!r}, where {FILE_FORMAT} is known")
    setting = ProfileSettings(**{**content["setting"], "layers": tuple(content["setting"]["layers"])})
    rounds = []
    for row in content["rounds"]:
        mds, lis = ({int(layer): _score(score) for layer, score in row[name].items()} for name in ("mds", "lis"))
        rounds.append(SearchRound(int(row["chosen"]), mds, lis))
    return Profile(setting, tuple(map(_score, content["lts"])), tuple(map(_score, content["lrs"])), tuple(rounds))


def _score(score: float) -> float:
    if not math.isfinite(score):
        raise ValueError(f"a score of {score}")
    return float(score)


def _check(profile: Profile, content: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless the parts of a profile agree with one another."""
    layers = len(profile.setting.layers)
    if not len(profile.lts) == len(profile.lrs) == layers:
        raise ValueError(f"{len(profile.lts)} and {len(profile.lrs)} scores for {layers} layers")
    order = profile.order
    if len(set(order)) < len(order) or not set(order) <= set(range(layers)) or list(order) != content["order"]:
        raise ValueError(f"order {content['order']} of {layers} layers")
    if content["complete"] is not profile.complete:
        raise ValueError(f"{len(order)} rounds, said to be {'complete' if content['complete'] else 'unfinished'}")
    for round_ in profile.rounds:
        if round_.mds.keys() != round_.lis.keys() or round_.chosen not in round_.lis:
            raise ValueError(f"a round without the scores of layer {round_.chosen}")
