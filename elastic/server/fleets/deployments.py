"""The interface of deployments to a server. Nothing of `elastic.cluster` is imported here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from elastic.engines.base import Engine
from elastic.planning.estimate.intent import Intent
from elastic.planning.estimate.performance import Load

if TYPE_CHECKING:
    from elastic.cluster.deployment.status import DeploymentStatus, DeviceStatus


class ServedDeployments(Protocol):
    """What a server asks of `elastic.Deployments`."""

    def __getitem__(self, name: str) -> Engine:
        """Return the fleet of a deployment."""

    def status(self) -> tuple[DeploymentStatus, ...]:
        """Return what is deployed."""

    def devices(self) -> tuple[DeviceStatus, ...]:
        """Return the devices that deployments share."""

    def expected(self, name: str) -> Load:
        """Return the requests that a deployment is to be ready for."""

    def deploy(
        self,
        path: str,
        intent: Intent,
        *,
        name: str | None = None,
        load: Load | None = None,
        weights: Sequence[str] | None = None,
        replicas: int | str = 1,
    ) -> Any:
        """Serve one more model."""

    def intend(
        self,
        name: str,
        intent: Intent | None,
        *,
        load: Load | None = None,
        replicas: int | str | None = None,
        dry_run: bool = False,
    ) -> Any:
        """Want something else of a deployment."""

    def resize(self, device: str, memory: int | str) -> None:
        """Have more or less of a device from now on."""

    def remove(self, name: str, *, drain: bool = True) -> None:
        """End a deployment."""
