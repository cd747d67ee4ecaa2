"""The sampling that a model's `generation_config.json` recommends, for what a request leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic.config import require
from elastic.engines.base import Sampling

NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def of_generation_config(config: Any) -> dict[str, float]:
    """Return what a generation config of transformers says of sampling, without what are defaults of the class."""
    if config is None:
        return {}
    told = config.to_diff_dict()
    return {name: float(told[name]) for name in NAMES if isinstance(told.get(name), int | float)}


def checked(defaults: Mapping[str, float]) -> dict[str, float]:
    """Return the defaults. Raises `ConfigError` for names that are none, and for values that sampling refuses."""
    for name in defaults:
        require(name in NAMES, "sampling_defaults", name, f"one of {', '.join(NAMES)}")
    top_k = int(defaults.get("top_k", 0))
    require(top_k >= -1, "top_k", top_k, "at least 1, or 0 or -1 for all")
    others: dict[str, Any] = {name: value for name, value in defaults.items() if name != "top_k"}
    Sampling(**others)
    return dict(defaults)
