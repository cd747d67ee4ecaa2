"""The parts of one elastic model, made by `assemble` and used by its runtime."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elastic.actions.base import ActionHandler
from elastic.hooks.forward_gate import ForwardGate
from elastic.hooks.forward_state import ForwardState
from elastic.memory.pages.page_pool import PagePool
from elastic.weights.model import ModelWeights

if TYPE_CHECKING:  # they import transformers, which `import elastic` does not
    from elastic.actions.pages.broker import PageBroker
    from elastic.kvcache.manager import KVMemory


@dataclass(frozen=True)
class ModelParts:
    """Everything that `wrap` makes for a model, from the ground up. Holds no module."""

    pools: tuple[PagePool, ...]
    """Of the places, in the order in which they were asked for."""
    weights: ModelWeights
    kv: KVMemory
    broker: PageBroker
    """Between the two."""
    gate: ForwardGate
    forward: ForwardState
    handlers: dict[type, ActionHandler] = field(default_factory=dict)
    """By the type of action."""
