"""What each choice does to a model by itself, and how far apart configurations are. (iServe, sections 1 and 3)"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from elastic.errors import ConfigError
from elastic.planning.estimate.configuration import FULL
from elastic.planning.estimate.ranking import Estimate

FIGURES: Mapping[str, Callable[[Estimate], float]] = {
    "TTFT": lambda each: each.ttft_s,
    "TPOT": lambda each: each.tpot_s,
    "latency": lambda each: each.latency_s,
    "memory": lambda each: each.memory_bytes,
    "cost": lambda each: each.cost,
    "GPU s": lambda each: 3600 * each.gpu_hours,
}
_CHOICES = ("pp", "tp", "weights", "kv")


def alone(estimates: Sequence[Estimate]) -> tuple[Estimate, tuple[Estimate, ...]]:
    """Return the plainest configuration that fits, and those that differ from it in one choice, choice by choice.

    The plainest one has full weights, keys and values, on as few ranks as they fit on, in stages where these are
    several. Raises `ConfigError` where none fits.
    """
    fitting = [each for each in estimates if each.fits]
    full = [each for each in fitting if each.configuration.form == FULL]
    if not full:
        raise ConfigError("nothing fits in full weights, to compare others with; give more devices, or larger ones")
    base = min(full, key=lambda each: (each.configuration.ranks, each.configuration.tp))
    by_choice: dict[str, list[Estimate]] = {choice: [] for choice in _CHOICES}
    for each in sorted(fitting, key=lambda each: each.configuration.ranks):
        differing = [c for c in _CHOICES if getattr(each.configuration, c) != getattr(base.configuration, c)]
        if len(differing) == 1:
            by_choice[differing[0]].append(each)
    return base, tuple(each for alternatives in by_choice.values() for each in alternatives)


def ranges(estimates: Sequence[Estimate]) -> dict[str, float]:
    """Return by how much the largest of each figure is above the smallest, of the configurations that fit."""
    fitting = [each for each in estimates if each.fits]
    return {name: max(map(figure, fitting)) / min(map(figure, fitting)) for name, figure in FIGURES.items()}
