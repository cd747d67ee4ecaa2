"""Models that are deployed beside a server's own, and what is wanted of them. For holders of the token of actions.

`POST /elastic/fleet/deploy {"path", "name", "intent", "load", "weights", "replicas"}`, of which all but the path may be
left out; `POST /elastic/fleet/intend {"name", "intent", "load", "replicas", "dry_run"}`; `POST /elastic/fleet/undeploy
{"name", "drain"}`; `POST /elastic/fleet/resize {"device", "memory"}`, which answers with the fields of `DeviceStatus`.
An intent is `{"minimize": "latency", "latency_s": 1.5, "cost": 40, "quality_loss": 0.01}`, each part of its own; a load
`{"prompt": 512, "new": 128, "rate": 2}`, of which `intend` leaves as it was what is left out; replicas are a number, or
text such as `"1-4"`. They answer when it is done, with the fields of `DeploymentStatus` and `Replanned`; what is
deployed is in `GET /elastic/status`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from elastic.errors import StateError
from elastic.planning.estimate.intent import Intent, Objective
from elastic.planning.estimate.performance import USUAL_LOAD, Load
from elastic.server.fleets.deployments import ServedDeployments
from elastic.server.protocol.errors import APIError
from elastic.server.routes.acting import ActingRoute, act
from elastic.server.routes.catalogue import Catalogue
from elastic.server.routes.status import plain

Name = Annotated[str, Field(min_length=1, max_length=200)]
Tokens = Annotated[int, Field(ge=1, lt=2**31)]
Replicas = Annotated[int, Field(ge=1, lt=2**16)] | Annotated[str, Field(pattern=r"^\d{1,5}(-\d{1,5})?$")]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class IntentBody(_Body):
    """What is to be small, and what may not be exceeded."""

    minimize: Objective | None = None
    latency_s: float | None = None
    cost: float | None = None
    quality_loss: float | None = None
    tolerance: float = 0.0

    @property
    def intent(self) -> Intent:
        """The intent. Raises `ConfigError` for bounds that cannot be."""
        return Intent(self.minimize, self.latency_s, self.cost, self.quality_loss, self.tolerance)


class LoadBody(_Body):
    """The requests to be ready for."""

    prompt: Tokens | None = None
    new: Tokens | None = None
    rate: Annotated[float, Field(ge=0, lt=1e9)] | None = None

    def over(self, usual: Load) -> Load:
        """Return the load, which is as usual in what it leaves out."""
        return replace(usual, **self.model_dump(exclude_none=True))


class DeployBody(_Body):
    """A model's directory on the server."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    name: Name | None = None
    intent: IntentBody = IntentBody()
    load: LoadBody | None = None
    weights: Annotated[list[Name], Field(min_length=1, max_length=100, fail_fast=True)] | None = None
    replicas: Replicas = 1


class IntendBody(_Body):
    """What is wanted of a deployment now."""

    name: Name
    intent: IntentBody | None = None
    load: LoadBody | None = None
    replicas: Replicas | None = None
    dry_run: bool = False


class ResizeBody(_Body):
    """What all deployments together may have of a device from now on: bytes, or such as "40GiB"."""

    device: Name
    memory: Annotated[int, Field(ge=0, lt=2**63)] | Annotated[str, Field(min_length=1, max_length=40)]


class UndeployBody(_Body):
    """A deployment that is to end; with `drain`, when its requests have ended."""

    name: Name
    drain: bool = True


def routes(models: Catalogue) -> APIRouter:
    """Make the endpoints."""
    router = APIRouter(route_class=ActingRoute)

    @router.post("/elastic/fleet/deploy")
    async def deploy(body: DeployBody) -> dict[str, Any]:
        def work(deployments: ServedDeployments) -> dict[str, Any]:
            load = body.load.over(USUAL_LOAD) if body.load is not None else None
            told = deployments.deploy(
                body.path,
                body.intent.intent,
                name=body.name,
                load=load,
                weights=body.weights or None,
                replicas=body.replicas,
            )
            return {"deployed": plain(told)}

        return await _done(models, work)

    @router.post("/elastic/fleet/intend")
    async def intend(body: IntendBody) -> dict[str, Any]:
        def work(deployments: ServedDeployments) -> dict[str, Any]:
            intent = body.intent.intent if body.intent is not None else None
            load = body.load.over(deployments.expected(body.name)) if body.load is not None else None
            told = deployments.intend(body.name, intent, load=load, replicas=body.replicas, dry_run=body.dry_run)
            return {"intended": plain(told)}

        return await _done(models, work)

    @router.post("/elastic/fleet/resize")
    async def resize(body: ResizeBody) -> dict[str, Any]:
        def work(deployments: ServedDeployments) -> dict[str, Any]:
            deployments.resize(body.device, body.memory)
            return {"devices": [plain(device) for device in deployments.devices()]}

        return await _done(models, work)

    @router.post("/elastic/fleet/undeploy")
    async def undeploy(body: UndeployBody) -> dict[str, Any]:
        def work(deployments: ServedDeployments) -> dict[str, Any]:
            if body.name == models.own.name:
                raise StateError(f"{body.name!r} is the server's own model; end the server instead")
            deployments.remove(body.name, drain=body.drain)
            return {"undeployed": body.name}

        return await _done(models, work)

    return router


async def _done(models: Catalogue, work: Callable[[ServedDeployments], dict[str, Any]]) -> dict[str, Any]:
    """Act on a thread, and see then what is deployed."""
    deployments = models.deployments
    if deployments is None:
        message = "this server deploys no models; start it with elastic serve MODEL --devices DEVICES"
        raise APIError(404, message, code="not_found")

    def change() -> dict[str, Any]:
        answer = work(deployments)
        models.refresh()
        return answer

    return await act(change)
