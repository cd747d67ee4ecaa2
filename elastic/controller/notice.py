"""What models that share places let each other know. Frozen records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic.controller.placement import Need
from elastic.controller.speedup import CostModel
from elastic.types import Action, Evict

if TYPE_CHECKING:
    from elastic.controller.snapshot import Snapshot


@dataclass(frozen=True)
class Ask:
    """What a model wants of another one of its group before it does anything else: that replicas leave."""

    model: str
    action: Evict


@dataclass(frozen=True)
class Notice:
    """One model of a group, as it was when it last looked."""

    name: str
    snapshot: Snapshot
    needs: tuple[Need, ...]
    """Of its decoder layers, as bytes."""
    model: Callable[[int], CostModel]
    """Its cost model, for so many rows."""
    rows: float = 0.0
    """Moving average of the requests that run."""
    pending: tuple[Action, ...] = ()
    """What it has asked its runtime for, and is not known to be done."""
    short: bool = False
    """Whether it sees a shortage."""
    asks: tuple[Ask, ...] = ()
