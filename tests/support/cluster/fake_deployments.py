"""Deployments without models, for tests of what stands in front of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic.cluster.deployment.status import DeploymentStatus, DeviceStatus, Replanned, TransitionStep
from elastic.errors import CapacityError, ConfigError, NotFound
from elastic.planning.estimate.configuration import Configuration
from elastic.planning.estimate.intent import Intent
from elastic.planning.estimate.performance import Load
from elastic.planning.estimate.ranking import Estimate
from support.serving.fake_engine import FakeEngine


class FakeDeployments:
    """Deploys an engine without a model for each path."""

    def __init__(self) -> None:
        self.engines: dict[str, FakeEngine] = {}
        self.told: dict[str, DeploymentStatus] = {}
        self.asked: list[tuple[Any, ...]] = []

    def names(self) -> tuple[str, ...]:
        return tuple(self.told)

    def __getitem__(self, name: str) -> FakeEngine:
        return self.engines[name]

    def status(self) -> tuple[DeploymentStatus, ...]:
        return tuple(self.told.values())

    def devices(self) -> tuple[DeviceStatus, ...]:
        return (DeviceStatus("cpu#a", 100, 40, 0.25, self.names()),)

    def deploy(
        self,
        path: str,
        intent: Intent,
        *,
        name: Any = None,
        load: Any = None,
        weights: Any = None,
        replicas: int | str = 1,
    ) -> Any:
        self.asked.append(("deploy", path, intent, load, weights))
        self.replicas: int | str | None = replicas
        if path == "/large":
            raise CapacityError("it has no place", requested_bytes=1, free_bytes=0, total_bytes=0)
        if weights == ["int2"]:
            raise ConfigError("weights: there is no variant 'int2'; choose some of full, int8, int4")
        name = name or path.rpartition("/")[2]
        self.engines[name] = FakeEngine(step_s=0.0005)
        self.engines[name].start()
        estimate = Estimate(Configuration(2), (), (), "measured", "", 3)
        self.told[name] = DeploymentStatus(
            name, path, "TP2 PP1 full", (), intent, load or Load(1, 1), estimate, "it was deployed", 0
        )
        return self.told[name]

    def intend(
        self, name: str, intent: Any, *, load: Any = None, replicas: int | str | None = None, dry_run: bool = False
    ) -> Replanned:
        self.replicas = replicas
        if name not in self.told:
            raise NotFound(f"there is no deployment {name!r}; there are: {', '.join(self.told)}")
        self.asked.append(("intend", name, intent, load, dry_run))
        if not dry_run:
            self.told[name] = replace(self.told[name], intent=intent or self.told[name].intent)
        steps = (TransitionStep("swap", ("cpu#a",), weights="int8", moved_bytes=4096, seconds=0.5),)
        return Replanned("planned" if dry_run else "applied", "TP1 PP1 full", "TP1 PP1 int8", steps, "test", 0.5, 4096)

    def expected(self, name: str) -> Load:
        return self.told[name].load

    def resize(self, device: str, memory: int | str) -> None:
        if device != "cpu#a":
            raise ConfigError(f"there is no device {device!r}; there are: cpu#a")
        self.asked.append(("resize", device, memory))

    def remove(self, name: str, *, drain: bool = True) -> None:
        self.engines.pop(name).stop()
        del self.told[name]
