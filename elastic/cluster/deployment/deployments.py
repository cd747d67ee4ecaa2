"""`Deployments`: several models on the same devices, each as its intent wants it. (iServe, section 4.2)"""

from __future__ import annotations

import atexit
import inspect
import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from elastic.cluster.deployment.choice import Chooser
from elastic.cluster.deployment.deployed import Deployed
from elastic.cluster.deployment.devices import DeviceBook
from elastic.cluster.deployment.harvest import Harvester
from elastic.cluster.deployment.hysteresis import Replanning
from elastic.cluster.deployment.ranks import RankViews
from elastic.cluster.deployment.status import DeploymentStatus, DeviceStatus, Replanned
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.records.delivery import Delivery
from elastic.cluster.fleet.ticks import TickThread
from elastic.cluster.rank.spec import options_of
from elastic.config import parse_bytes
from elastic.errors import CapacityError, ConfigError, ElasticError, NotFound, StateError, require, require_flag
from elastic.estimation.device_list import parse_devices
from elastic.estimation.estimate import KV_INT8, check_losses
from elastic.estimation.profile import CostProfile
from elastic.estimation.profiles.store import ProfileStore
from elastic.planning.deployment.placing import Deployment, Refusal
from elastic.planning.deployment.policies import THETA, PolicyName, preferred
from elastic.planning.deployment.replicas import ReplicaRange
from elastic.planning.estimate.configuration import FULL, named_forms
from elastic.planning.estimate.devices import Device
from elastic.planning.estimate.intent import Intent, Objective
from elastic.planning.estimate.performance import USUAL_LOAD, Load

logger = logging.getLogger(__name__)
_CHOSEN = {"model", "ranks", "places", "cores", "dtype", "shards", "tp", "pp"}
"""Arguments of a fleet that follow from the configuration, and the devices, of a deployment."""
_open: weakref.WeakSet[Deployments] = weakref.WeakSet()


class Deployments:
    """Models on devices that they share. `deploy` one, ask for its fleet by its name, and change what is wanted of it.

    `devices` are places with what all models together may have there ("cuda:0=80GiB", of the data sheet `kind`;
    "cpu#a=1GiB"), separated by commas in text; all are of one kind. `policy` places models: "hybrid", "packing" or
    "least-loaded"; devices with a load below `theta` are packed by "hybrid". `weights` and `kv` are the forms that
    models may get unless `deploy` says others; `losses` say by how much a form raises the mean loss of a token, for
    intents that bound it. Without `weights` these are full ones and those of which `losses` tells: quality is lost to
    no intent unasked. `launch` is that of each fleet, `fleet` has further options of `Fleet`. `replanning` says when
    deployments change by themselves; None: only when told. With `harvest` models are measured on devices that have
    little to do; what is found is kept in `store` (beside the checkpoint unless it says otherwise), and estimates are
    made of it. Nothing runs before `start`, or `with`.
    """

    def __init__(
        self,
        devices: str | Sequence[str | Device],
        *,
        kind: str | None = None,
        policy: PolicyName = "hybrid",
        theta: float = THETA,
        weights: Sequence[str] | None = None,
        kv: Sequence[str] = (FULL,),
        losses: Mapping[str, float] | None = None,
        launch: str = "local",
        fleet: Mapping[str, Any] | None = None,
        replanning: Replanning | None = Replanning(),  # noqa: B008  (frozen)
        harvest: bool = False,
        store: ProfileStore | None = None,
    ) -> None:
        available = parse_devices(devices, kind)
        kinds = {device.kind.name for device in available}
        if len(kinds) > 1:
            raise ConfigError(f"devices of kinds {', '.join(sorted(kinds))}: deployments are for devices of one kind")
        sheets = [device.name for device in available if not device.is_place]
        if sheets:
            raise ConfigError(
                f"devices: {sheets[0]} is of a data sheet, on which nothing can be deployed; name places of this "
                "machine such as cuda:0=80GiB, with kind= for their data sheet (elastic place plans for data sheets)"
            )
        preferred((), policy, theta)
        check_losses(losses or {})
        require(isinstance(replanning, Replanning | None), "replanning", replanning, "an elastic.Replanning, or None")
        require(isinstance(store, ProfileStore | None), "store", store, "a ProfileStore, or None")
        require_flag(harvest, "harvest")
        self._book, self._order, self._losses = DeviceBook(available), (policy, theta), losses
        every = (FULL, *(form for form in losses or () if form != KV_INT8)) if weights is None else weights
        self._weights, self._kv = named_forms(every, "weights"), named_forms(kv, "kv")
        self._fleet_options = {"launch": launch, **_options(fleet)}
        self._replanning, self._store = replanning or Replanning(), store or ProfileStore()
        self._harvester = Harvester(self._book, self._store, self._measured) if harvest else None
        self._watches = replanning is not None
        self._deployed: dict[str, Deployed] = {}
        self._beginning: dict[str, Deployed] = {}
        self._ending: dict[str, Deployed] = {}
        self._lock = threading.RLock()  # of changes
        self._one_begins = threading.Lock()  # which has all that is free of its devices, until it serves
        self._started = self._ended = False
        self._process = os.getpid()
        failed = "deployments could not be looked after"
        self._ticks = TickThread(self._tick, self._replanning.tick_s, "elastic-deployments", failed)

    def start(self) -> None:
        """Begin to look after deployments. Raises `StateError` where that was done before."""
        if self._started:
            raise StateError("these deployments were started before; make new ones")
        self._started = True
        _open.add(self)
        self._ticks.start()

    def stop(self, *, drain: bool = True) -> None:
        """End all deployments; with `drain` when their requests have ended. Can be called twice."""
        require_flag(drain, "drain")
        Delivery.forbid("deployments cannot be changed")
        self._ended = True
        self._ticks.stop()
        with self._lock:
            if self._harvester is not None:
                self._harvester.stop()
            self._ending |= self._deployed | self._beginning
            self._deployed.clear()
            left = list(self._ending)
        for name in left:
            self._end(name, drain)
        _open.discard(self)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __getitem__(self, name: str) -> Fleet:
        """Return the fleet of a deployment: an engine. Raises `ConfigError` for an unknown name."""
        return self._named(name).fleet

    # -- what is wanted

    def deploy(
        self,
        path: str | Path,
        intent: Intent | Objective = "cost",
        *,
        name: str | None = None,
        load: Load | None = None,
        weights: Sequence[str] | None = None,
        kv: Sequence[str] | None = None,
        fleet: Mapping[str, Any] | None = None,
        replicas: int | str = 1,
    ) -> DeploymentStatus:
        """Serve the model of a directory, in the configuration that is best for an intent; return when it serves.

        Its name is that of the directory, unless it is said. `load` are the requests that it is to be ready for (None:
        one at a time, of 512 tokens that get 128); what is measured counts where it is more. `weights` and `kv` are the
        forms that it may have, the others are never chosen; `fleet` has further options of its `Fleet`. So many
        `replicas` have the configuration, each on devices of its own, and share the requests; in a
        range, such as "1-4", their number follows the load.

        Raises `ConfigError` for what is no model, for other replicas, for a name that is taken, and what ranks raise;
        `CapacityError` with the reasons of each configuration where none fits.
        """
        is_path = isinstance(path, str | Path) and "\0" not in str(path)
        require(is_path, "path", path, "the directory of a model")
        name = Path(path).resolve().name if name is None else name
        is_name = isinstance(name, str) and bool(name.strip()) and name.isprintable()
        require(is_name, "name", name, "a text that is not empty and can be printed")
        wanted, count = Intent.of(intent), ReplicaRange.of(replicas)
        require(load is None or isinstance(load, Load), "load", load, "an elastic.Load, or None")
        options = {**self._fleet_options, **_options(fleet)}
        forms = (
            named_forms(self._weights if weights is None else weights, "weights"),
            named_forms(self._kv if kv is None else kv, "kv"),
        )
        Delivery.forbid("deployments cannot be changed")
        with self._lock:
            self._require_new(name)
        with self._one_begins:
            with self._lock:
                self._require_new(name)
                devices = [*self._book.devices.values()]
                chooser = Chooser(path, devices, *forms, *self._order, self._losses, options.get("engine"))
                expected = load or chooser.bounded(USUAL_LOAD)
                about = (chooser, self._book, wanted, expected, self._replanning, options, self._store, count)
                try:
                    deployed = Deployed(name, str(path), *about)
                except BaseException:
                    self._book.release(name)
                    raise
                self._beginning[name] = deployed
            return self._begin(name, deployed)

    def intend(
        self,
        name: str,
        intent: Intent | Objective | None = None,
        *,
        load: Load | None = None,
        replicas: int | str | None = None,
        dry_run: bool = False,
    ) -> Replanned:
        """Want something else of a deployment, or be ready for other requests; return when it is as is best for that.

        It keeps as many replicas as it was to have, unless it is to have others. Its requests go on meanwhile, and none
        is lost. With `dry_run` nothing is done: the answer says what would be,
        and about what it takes. Raises `ConfigError` for an unknown name, `CapacityError` where nothing fits; then it
        stays as it is. While another deployment begins, which has all that is free of its devices, it is waited for
        before anything is refused for room.
        """
        wanted = None if intent is None else Intent.of(intent)
        count = None if replicas is None else ReplicaRange.of(replicas)
        require(load is None or isinstance(load, Load), "load", load, "an elastic.Load, or None")
        require_flag(dry_run, "dry_run")
        Delivery.forbid("deployments cannot be changed")
        with self._lock:
            try:
                return self._named(name).change(wanted, load, count, dry_run=dry_run)
            except CapacityError:
                if not self._beginning:
                    raise
        with self._one_begins, self._lock:
            if self._ended:
                raise StateError(f"the deployments were stopped while a change of {name!r} waited for room")
            return self._named(name).change(wanted, load, count, dry_run=dry_run)

    def plan(self, name: str) -> Deployment | Refusal:
        """Return what would be best for a deployment as things are now, whether or not it is that."""
        return self._named(name).best()

    def remove(self, name: str, *, drain: bool = True) -> None:
        """End a deployment; with `drain` when its requests have ended. Raises `ConfigError` for an unknown name."""
        require_flag(drain, "drain")
        Delivery.forbid("deployments cannot be changed")
        with self._lock:
            self._ending[name] = self._named(name)
            del self._deployed[name]
        self._end(name, drain)

    def resize(self, device: str, memory: int | str) -> None:
        """Have more or less of a device from now on (bytes, or such as "1GiB"); deployments change when they must, or
        when that is better. Raises `ConfigError` for an unknown device."""
        self._book.resize(device, parse_bytes(memory, option=f"memory of {device}"))

    # -- how it is

    def names(self) -> tuple[str, ...]:
        """Return the names of what is deployed."""
        return tuple(self._deployed)

    def status(self) -> tuple[DeploymentStatus, ...]:
        """Return what is deployed."""
        return tuple(deployed.status() for deployed in list(self._deployed.values()))

    def expected(self, name: str) -> Load:
        """Return the requests that a deployment is to be ready for. Raises `ConfigError` for an unknown name."""
        return self._named(name).meter.expected

    def devices(self) -> tuple[DeviceStatus, ...]:
        """Return the devices, with what is free there and how busy they are."""
        free, shares = self._book.free(), self._book.busy.shares()
        guests = self._harvester.at if self._harvester is not None else {}
        return tuple(
            DeviceStatus(
                name,
                self._book.memory(name),
                free[name],
                shares.get(name, 0.0),
                tuple(who for who in self._book.models(name) if who in self._deployed),
                guests.get(name, ""),
            )
            for name in self._book.devices
        )

    # -- inside

    def _tick(self) -> None:
        with self._lock:  # what has come while it was waited for is told of before it is measured
            now_s, deployed = time.monotonic(), list(self._deployed.values())
            views = {each.name: each.ranks.look() for each in deployed}
            self._book.busy.tell(now_s, *_busy(views))
            if self._harvester is not None:
                self._harvester.tick(now_s, deployed)
            for each in deployed:
                each.looks.attempt(partial(self._look, each, now_s, views[each.name]))

    def _begin(self, name: str, deployed: Deployed) -> DeploymentStatus:
        """Start a deployment, beside changes of others; it is one of them when it serves."""
        stopped = StateError(f"the deployments were stopped while {name!r} began")
        try:
            deployed.start()
            with self._lock:
                if not self._ended:
                    self._deployed[name] = deployed
                    return deployed.status()
            deployed.ranks.stop(drain=False)  # whoever stopped all may have looked before it could be ended
            raise stopped
        except ElasticError:
            if self._ended:
                raise stopped from None
            raise
        finally:
            with self._lock:
                del self._beginning[name]

    def _end(self, name: str, drain: bool) -> None:
        """End what is to end, beside changes of others; where that fails, or is interrupted, it can be ended again."""
        deployed = self._ending.get(name)
        if deployed is None:
            return  # somebody else has ended it
        try:
            deployed.ranks.stop(drain=drain)
        except BaseException:
            self._deployed[name] = deployed
            raise
        finally:
            self._ending.pop(name, None)

    def _look(self, deployed: Deployed, now_s: float, views: RankViews) -> None:
        """Look at a deployment; where that fails it serves on as it is, and others are looked at."""
        deployed.give_back()
        changed = deployed.look(now_s, views) if self._watches else None
        if changed is not None:
            logger.info("%s: %s to %s, %s", deployed.name, changed.before, changed.after, changed.why)

    def _measured(self, path: str, profile: CostProfile) -> None:
        """Estimate all deployments of a model by what was measured of it, if that is all their forms."""
        for each in list(self._deployed.values()):
            if each.path == path and profile.around.keys() >= set(each.forms):
                each.measured(profile)

    def _require_new(self, name: str) -> None:
        """Raise what `deploy` raises where nothing can be deployed, or not under this name."""
        if not self._started or self._ended:
            raise StateError("start the deployments first, or make new ones: `with elastic.Deployments(...) as fleet`")
        if name in self._deployed:
            raise ConfigError(f"{name!r} is deployed; give another name, or change it with intend({name!r}, ...)")
        if name in self._beginning:
            raise StateError(f"{name!r} begins; wait until it serves, or give another name")
        if name in self._ending:
            raise StateError(f"{name!r} ends when its requests have; wait for that, or give another name")

    def _named(self, name: str) -> Deployed:
        deployed = self._deployed.get(name) if isinstance(name, str) else None
        if deployed is None:
            raise NotFound(f"there is no deployment {name!r}; there are: {', '.join(self._deployed) or 'none'}")
        return deployed


def _options(fleet: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return further options of each fleet. Raises `ConfigError` for what is none, or is chosen here."""
    require(isinstance(fleet, Mapping | None), "fleet", fleet, "a mapping from options of Fleet to their values")
    allowed = inspect.signature(Fleet).parameters.keys() - _CHOSEN
    for option in fleet or {}:
        if option not in allowed:
            raise ConfigError(f"fleet: no option {option!r} can be said here; there are {', '.join(sorted(allowed))}")
    for kind in ("wrap", "engine"):
        options_of(kind, (fleet or {}).get(kind))
    if "kv_cache_dtype" in ((fleet or {}).get("engine") or {}):
        raise ConfigError("fleet: the form of keys and values is that of the configuration; say kv= instead")
    return dict(fleet or {})


def _busy(views: Mapping[str, RankViews]) -> tuple[dict[tuple[str, str, str], float], dict[str, float]]:
    """Return for how long each rank has computed, by its device, model and name; and how busy devices are, by NVML.

    `views` are those of each model's ranks.
    """
    told, utilization = {}, dict[str, float]()
    for model, ranks in views.items():
        for (device, rank), view in ranks.items():
            told[device, model, rank] = view.times.busy_s
            if view.utilization is not None:
                utilization[device] = max(view.utilization, utilization.get(device, 0.0))
    return told, utilization


def _stop_all() -> None:
    for deployments in list(_open):
        if deployments._process == os.getpid():
            deployments.stop(drain=False)


atexit.register(_stop_all)
