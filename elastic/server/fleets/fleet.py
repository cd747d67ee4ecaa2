"""The interface of a fleet to a server. An engine that has it is one; nothing of `elastic.cluster` is imported here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from elastic.engines.base import Engine
from elastic.types import Action, Prepared, Result

if TYPE_CHECKING:
    from elastic.cluster.control.messages import RuntimeView
    from elastic.cluster.control.status import FleetEvent, FleetStatus


@runtime_checkable
class FleetEngine(Protocol):
    """What a server asks of `elastic.Fleet` beyond an `Engine`; `how` is further options of the verb there."""

    def status(self) -> FleetStatus:
        """Return ranks and instances as they are now, without asking them."""

    def events(self) -> tuple[FleetEvent, ...]:
        """Return the last events, oldest first."""

    def look(self, rank: str) -> RuntimeView:
        """Ask a rank for its runtime's status. Waits for it; raises `RankLost`, `ConfigError`."""

    def apply(self, rank: str, actions: Sequence[Action], *, dry_run: bool = False) -> Any:
        """Have a rank do actions, all or none, or plan them."""

    def prepare(self, rank: str, actions: Sequence[Action], id: str, timeout_s: float) -> Prepared:
        """Have a rank prepare actions."""

    def commit(self, rank: str, id: str) -> Sequence[Result]:
        """Have a rank commit what it has prepared."""

    def rollback(self, rank: str, id: str) -> Any:
        """Have a rank give back what it has prepared."""

    def move(self, request: str, instance: str) -> Any:
        """Have a request go on at another instance."""

    def add(self, places: Sequence[str] | None = None) -> Any:
        """Start one more rank; without `places`, as the first one."""

    def remove(self, name: str, *, drain: bool = True) -> Any:
        """End a rank."""

    def drop(
        self, need: int | str | None = None, *, layers: Mapping[str, Sequence[int]] | None = None, **how: Any
    ) -> Any:
        """Have instances compute each other's layers, and ranks drop those that they do not need then."""

    def plan(self, need: int | str) -> Any:
        """Price what could give so many bytes of KV to requests that wait."""

    def capacity(self, degrees: Sequence[int]) -> Any:
        """Return the blocks that an instance could have: of each rank, by how many like it share layers."""

    def restore(self, rank: str | None = None, **how: Any) -> Any:
        """Have dropped layers return: those of a rank's group, or all."""

    def reshard(self, instances: str | Sequence[str], *, tp: int, **how: Any) -> Any:
        """Have so many ranks each share every layer of their instances."""

    def migrate(self, home: str, layers: Sequence[int], rank: str, **how: Any) -> Any:
        """Have another rank compute layers of an instance."""

    def replicate(self, home: str, layers: Sequence[int], rank: str, *, dry_run: bool = False) -> Any:
        """Have another rank compute layers of an instance, too, for half of its requests."""

    def evict(self, home: str, layers: Sequence[int] | None = None) -> Any:
        """Have layers of an instance be computed by one rank again; None: all of them."""

    def merge(self, *ranks: str) -> Any:
        """Connect ranks, so that they can compute each other's layers."""

    def split(self, rank: str) -> Any:
        """Restore the group of a rank, and close its connections."""


def as_fleet(engine: Engine) -> FleetEngine | None:
    """Return an engine as the fleet that it is, or None."""
    return engine if isinstance(engine, FleetEngine) else None
