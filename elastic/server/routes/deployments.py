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

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter

from elastic.errors import StateError
from elastic.planning.estimate.intent import Intent
from elastic.planning.estimate.performance import USUAL_LOAD
from elastic.server.protocol.fleet import DeployBody, IntendBody, ResizeBody, UndeployBody
from elastic.server.routes.acting import ActingRoutes
from elastic.server.routes.catalogue import Catalogue

if TYPE_CHECKING:
    from elastic.cluster.deployment.deployments import Deployments

NO_DEPLOYMENTS = "this server deploys no models; start it with elastic serve MODEL --devices DEVICES"


def routes(models: Catalogue) -> APIRouter:
    """Make the endpoints: once one has acted, it is seen what is deployed."""

    def deploy(deployments: Deployments, body: DeployBody) -> dict[str, Any]:
        if models.options is not None:
            models.options(body.path)  # what nobody could ask for is refused before it takes devices
        load = body.load.over(USUAL_LOAD) if body.load is not None else None
        options: dict[str, Any] = {"name": body.name, "weights": body.weights, "replicas": body.replicas}
        return {"deployed": deployments.deploy(body.path, Intent(**body.intent.model_dump()), load=load, **options)}

    def undeploy(deployments: Deployments, body: UndeployBody) -> dict[str, Any]:
        if body.name == models.own.name:
            raise StateError(f"{body.name!r} is the server's own model; end the server instead")
        deployments.remove(body.name, drain=body.drain)
        return {"undeployed": body.name}

    deployed = ActingRoutes(models.deployments, NO_DEPLOYMENTS, models.refresh)
    deployed.add("deploy", DeployBody, deploy)
    deployed.add("intend", IntendBody, _intend)
    deployed.add("resize", ResizeBody, _resize)
    deployed.add("undeploy", UndeployBody, undeploy)
    return deployed.router


def _intend(deployments: Deployments, body: IntendBody) -> dict[str, Any]:
    intent = Intent(**body.intent.model_dump()) if body.intent is not None else None
    load = body.load.over(deployments.expected(body.name)) if body.load is not None else None
    told = deployments.intend(body.name, intent, load=load, replicas=body.replicas, dry_run=body.dry_run)
    return {"intended": told}


def _resize(deployments: Deployments, body: ResizeBody) -> dict[str, Any]:
    deployments.resize(body.device, body.memory)
    return {"devices": deployments.devices()}
