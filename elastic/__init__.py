"""Elastic: a language model that changes shape while it serves."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from elastic.config import SLO, Place, Policy, Scale
from elastic.errors import (
    BackendUnavailable,
    CapacityError,
    ConfigError,
    ElasticError,
    IntegrityError,
    Overloaded,
    StateError,
)
from elastic.runtime import Runtime, runtime
from elastic.types import (
    Change,
    Event,
    Evict,
    HostStatus,
    KVStatus,
    Migrate,
    MigrateKV,
    PlaceStatus,
    PlanStep,
    Release,
    Replicate,
    Residency,
    Resize,
    ResizeKV,
    Restore,
    Status,
    Swap,
)
from elastic.wrap import unwrap, wrap

if TYPE_CHECKING:
    from elastic.engines.continuous import ContinuousEngine
    from elastic.engines.engine import Engine, Output, Request, Sampling
    from elastic.kvcache.cache import ElasticCache
    from elastic.profiling import profile
    from elastic.quant.codes import Integers
    from elastic.quant.profile_file import Profile
    from elastic.quant.variants import Variant

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "CapacityError",
    "Change",
    "ConfigError",
    "ContinuousEngine",
    "ElasticCache",
    "ElasticError",
    "Engine",
    "Event",
    "Evict",
    "HostStatus",
    "Integers",
    "IntegrityError",
    "KVStatus",
    "Migrate",
    "MigrateKV",
    "Output",
    "Overloaded",
    "Place",
    "PlaceStatus",
    "PlanStep",
    "Policy",
    "Profile",
    "Release",
    "Replicate",
    "Request",
    "Residency",
    "Resize",
    "ResizeKV",
    "Restore",
    "Runtime",
    "SLO",
    "Sampling",
    "Scale",
    "StateError",
    "Status",
    "Swap",
    "Variant",
    "profile",
    "runtime",
    "unwrap",
    "wrap",
]


_LATER = {
    "ContinuousEngine": "elastic.engines.continuous",
    **dict.fromkeys(("Engine", "Output", "Request", "Sampling"), "elastic.engines.engine"),
    "ElasticCache": "elastic.kvcache.cache",  # needs transformers, which `import elastic` does not
    "Integers": "elastic.quant.codes",
    "Profile": "elastic.quant.profile_file",
    "Variant": "elastic.quant.variants",
    "profile": "elastic.profiling",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'elastic' has no attribute {name!r}")
