"""Elastic: a language model that changes shape while it serves."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from elastic.config import SLO, Lengths, Overload, Place, Policy, Scale
from elastic.errors import (
    BackendUnavailable,
    CapacityError,
    ConfigError,
    ElasticError,
    IntegrityError,
    NotFound,
    Overloaded,
    RankLost,
    StateError,
)
from elastic.runtime.runtime import Runtime, runtime
from elastic.types import (
    Change,
    Drop,
    Event,
    Evict,
    Fetch,
    HostStatus,
    KVStatus,
    Migrate,
    MigrateKV,
    PlaceStatus,
    PlanStep,
    Prepared,
    Release,
    Replicate,
    Residency,
    Resize,
    ResizeKV,
    Restore,
    Status,
    Swap,
    WeightsSource,
)
from elastic.wrap import unwrap, wrap

if TYPE_CHECKING:
    from elastic.cluster.control.status import FleetStatus
    from elastic.cluster.deployment.deployments import Deployments
    from elastic.cluster.deployment.hysteresis import Replanning
    from elastic.cluster.fleet.fleet import Fleet
    from elastic.controller.decision import Plan
    from elastic.controller.snapshot import Snapshot
    from elastic.engines.base import Engine, Output, Request, Sampling
    from elastic.engines.continuous.engine import ContinuousEngine
    from elastic.estimation.estimate import estimate
    from elastic.kvcache.hf_cache import ElasticCache
    from elastic.planning.estimate.intent import Intent
    from elastic.planning.estimate.performance import Load
    from elastic.planning.estimate.ranking import Estimate
    from elastic.profiling import profile
    from elastic.quant.formats.integer import Integers
    from elastic.quant.formats.pruned import SemiStructured, Structured, Unstructured
    from elastic.quant.sensitivity.profile_file import Profile
    from elastic.quant.variants.variant import Variant

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "CapacityError",
    "Change",
    "ConfigError",
    "ContinuousEngine",
    "Deployments",
    "Drop",
    "ElasticCache",
    "ElasticError",
    "Engine",
    "Estimate",
    "Event",
    "Evict",
    "Fetch",
    "Fleet",
    "FleetStatus",
    "HostStatus",
    "Integers",
    "IntegrityError",
    "Intent",
    "KVStatus",
    "Lengths",
    "Load",
    "Migrate",
    "MigrateKV",
    "NotFound",
    "Output",
    "Overload",
    "Overloaded",
    "Place",
    "PlaceStatus",
    "Plan",
    "PlanStep",
    "Policy",
    "Prepared",
    "Profile",
    "RankLost",
    "Release",
    "Replanning",
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
    "SemiStructured",
    "Snapshot",
    "StateError",
    "Status",
    "Structured",
    "Swap",
    "Unstructured",
    "Variant",
    "WeightsSource",
    "estimate",
    "profile",
    "runtime",
    "unwrap",
    "wrap",
]


_LATER = {
    "ContinuousEngine": "elastic.engines.continuous.engine",
    **dict.fromkeys(("Engine", "Output", "Request", "Sampling"), "elastic.engines.base"),
    "Estimate": "elastic.planning.estimate.ranking",
    "Intent": "elastic.planning.estimate.intent",
    "Load": "elastic.planning.estimate.performance",
    "estimate": "elastic.estimation.estimate",
    "Deployments": "elastic.cluster.deployment.deployments",
    "Replanning": "elastic.cluster.deployment.hysteresis",
    "Fleet": "elastic.cluster.fleet.fleet",
    "FleetStatus": "elastic.cluster.control.status",
    "ElasticCache": "elastic.kvcache.hf_cache",  # needs transformers, which `import elastic` does not
    "Integers": "elastic.quant.formats.integer",
    **dict.fromkeys(("SemiStructured", "Structured", "Unstructured"), "elastic.quant.formats.pruned"),
    "Plan": "elastic.controller.decision",
    "Profile": "elastic.quant.sensitivity.profile_file",
    "Snapshot": "elastic.controller.snapshot",
    "Variant": "elastic.quant.variants.variant",
    "profile": "elastic.profiling",
}


def __getattr__(name: str) -> Any:
    if name == "vllm":
        return importlib.import_module("elastic.vllm")
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'elastic' has no attribute {name!r}")
