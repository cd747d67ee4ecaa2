"""Profiling in spare time: fingerprints, and what ranks do to each other, are measured on devices that have little to
do. (iServe, 4.2 and 8.6)"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path

from elastic.cluster.deployment.deployed import Deployed
from elastic.cluster.deployment.devices import DeviceBook
from elastic.cluster.fleet.profiling.guest import LinkProfilingProcess, link_guest_bytes
from elastic.errors import CapacityError, ElasticError, StateError
from elastic.estimation.profile import CostProfile
from elastic.estimation.profiles.guest import SHARE, GuestProcess, ProfilingProcess, guest_bytes
from elastic.estimation.profiles.store import ProfileStore

logger = logging.getLogger(__name__)
SPARE_LOAD = 0.3
"""A device that is busier has no guest."""
REST_S = 10.0
"""Behind one that was cancelled none begins so soon."""
CONTEXT = 512
LINKS = "links"
"""Instead of a form: what two ranks do to each other."""
_WHO = "a guest that measures"
Starter = Callable[[str, Sequence[str], str], GuestProcess]


def _start(model: str, forms: Sequence[str], device: str) -> GuestProcess:
    if LINKS in forms:
        return LinkProfilingProcess(SHARE)
    return ProfilingProcess(model, forms, device, context=CONTEXT, share=SHARE)


def _needed_bytes(model: str | Path, forms: Sequence[str], context: int) -> int:
    return link_guest_bytes() if LINKS in forms else guest_bytes(model, forms, context)


class Harvester:
    """Measures what is not known of models, a form at a time, one guest in all. One thread's at a time.

    When all forms of a model are known, and it could have several ranks on CPUs of this host, links between them and
    contention are measured, too, on two devices at a time: by preference such as exchange in its deployment. They are
    alike for all models. `stored` is called with a model's directory and its profile as soon as all its forms are
    known, and again when links are.
    """

    def __init__(
        self,
        book: DeviceBook,
        store: ProfileStore,
        stored: Callable[[str, CostProfile], object],
        start: Starter = _start,
        needs: Callable[[str | Path, Sequence[str], int], int] = _needed_bytes,
    ) -> None:
        self._book, self._store, self._stored, self._start, self._needs = book, store, stored, start, needs
        self._guest: GuestProcess | None = None
        self._model: Deployed | None = None
        self._form = ""
        self._devices: tuple[str, ...] = ()
        self._links: CostProfile | None = None  # of whichever model they were measured for
        self._now_s = self._not_before_s = 0.0
        self._failed: set[tuple[str, str]] = set()  # (path, form) that cannot be measured
        self.cancelled = 0
        """How many guests were."""

    @property
    def at(self) -> dict[str, str]:
        """Device -> the model that is measured there."""
        return {} if self._model is None else dict.fromkeys(self._devices, self._model.name)

    def tick(self, now_s: float, models: Sequence[Deployed]) -> None:
        """Look at the guest, or begin with one."""
        self._now_s = now_s
        if self._guest is not None and self._model is not None:
            self._watch(self._guest, self._model, models)
        elif now_s >= self._not_before_s:
            for model in models:
                if missing := self._missing(model):
                    self._begin(model, missing[0])
                if self._guest is not None:
                    return

    def stop(self) -> None:
        """End the guest."""
        if self._guest is not None:
            self._guest.cancel()
            self._not_before_s = self._now_s + REST_S
            self._leave()

    def require_spare(self, device: str, nbytes: int) -> None:
        """Raise for a device where a guest would disturb: `StateError` for its load, `CapacityError` for its memory."""
        if not self._book.busy.settled(device):
            raise StateError(f"{device} was not looked at for long enough to say how busy it is; try again in seconds")
        load = max(self._book.busy.recent().get(device, 0.0), self._book.busy.shares().get(device, 0.0))
        if load >= SPARE_LOAD:
            raise StateError(
                f"{device} computes {load:.0%} of its time; models are measured below {SPARE_LOAD:.0%}: wait, or "
                "measure elsewhere with elastic estimate --profile"
            )
        free = self._book.free()[device]
        if free < nbytes:
            raise CapacityError(
                f"{device} has {free:,} bytes free, and the fingerprint takes {nbytes:,}; free some first",
                requested_bytes=nbytes,
                free_bytes=free,
                total_bytes=self._book.memory(device),
            )

    def known(self, model: Deployed) -> CostProfile | None:
        """Return the profile of a model, if all its forms are in it."""
        return self._store.load(model.path, self._kind, model.forms)

    @property
    def _kind(self) -> str:
        return next(iter(self._book.devices.values())).kind.type

    def _missing(self, model: Deployed) -> list[str]:
        wanted = [form for form in (*model.forms, LINKS) if (model.path, form) not in self._failed]
        try:
            profile = self._store.load(model.path, self._kind) if wanted else None
        except ElasticError as error:  # its directory has gone: it serves on
            for form in wanted:
                self._give_up(model, form, error)
            return []
        measured = set(profile.around) if profile is not None else set()
        linked = self._kind == "cpu" and len(self._book.devices) > 1 and measured.issuperset(model.forms)
        if not linked or (profile is not None and profile.link is not None):
            measured.add(LINKS)
        return [form for form in wanted if form not in measured]

    def _begin(self, model: Deployed, form: str) -> None:
        if form == LINKS and (links := self._links) is not None:
            self._keep(model, form, lambda: links)
            return
        try:
            nbytes = self._needs(model.path, (form,), CONTEXT)
        except ElasticError as error:
            self._give_up(model, form, error)
            return
        for devices in self._choices(model, form):
            try:
                for device in devices:
                    self.require_spare(device, nbytes)
                self._book.lend(_WHO, dict.fromkeys(devices, nbytes), self._give_way)
            except (CapacityError, StateError):
                continue
            self._guest = self._start(model.path, (form,), devices[0].partition("#")[0])
            self._model, self._form, self._devices = model, form, devices
            return

    def _choices(self, model: Deployed, form: str) -> Iterator[tuple[str, ...]]:
        """Yield where a guest could measure, what is best first."""
        if form == LINKS:
            yield from model.plan.links
            yield from combinations(self._book.devices, 2)
        else:
            yield from ((device,) for device in self._book.devices)

    def _watch(self, guest: GuestProcess, model: Deployed, models: Sequence[Deployed]) -> None:
        if all(model is not each for each in models):
            self.stop()
        elif guest.ended:
            form = self._form
            self._leave()
            self._keep(model, form, guest.result)
        elif self._book.lacking(_WHO) or any(self._load_beside(device) >= SPARE_LOAD for device in self._devices):
            self._give_way()

    def _give_way(self) -> None:
        """End the guest where others want what it has."""
        self.cancelled += 1
        self.stop()

    def _load_beside(self, device: str) -> float:
        """Return the load of a device beside the guest, which others see as one of theirs."""
        busy = self._book.busy
        return busy.recent().get(device, 0.0) + max(0.0, busy.others().get(device, 0.0) - SHARE)

    def _keep(self, model: Deployed, form: str, result: Callable[[], CostProfile]) -> None:
        """Keep what was measured, and tell of it where all forms of the model are known."""
        try:
            profile = result()
            self._store.save(model.path, profile)
        except ElasticError as error:
            self._give_up(model, form, error)
            return
        if form == LINKS:
            self._links = profile
        if (whole := self.known(model)) is not None:
            self._stored(model.path, whole)

    def _leave(self) -> None:
        self._guest = self._model = None
        self._form, self._devices = "", ()
        self._book.release(_WHO)

    def _give_up(self, model: Deployed, form: str, error: ElasticError) -> None:
        self._failed.add((model.path, form))
        logger.warning("%s in %s is not measured: %s", model.path, form, error)
