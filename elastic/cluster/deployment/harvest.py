"""Profiling in spare time: fingerprints, and what ranks do to each other, are measured on devices that have little to
do. (iServe, 4.2 and 8.6)"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from elastic.cluster.deployment.busy import NOW_S
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
"""Behind one that was cancelled none begins so soon; behind one that was killed or did not start, ever later."""
CONTEXT = 512
LINKS = "links"
"""Instead of a form: what two ranks do to each other."""
_WHO = "a guest that measures\n"
"""In the book of devices; no deployment has a name that cannot be printed."""
Starter = Callable[[str, Sequence[str], str], GuestProcess]


def _start(model: str, forms: Sequence[str], device: str) -> GuestProcess:
    if LINKS in forms:
        return LinkProfilingProcess(SHARE)
    return ProfilingProcess(model, forms, device, context=CONTEXT, share=SHARE)


def _needed_bytes(model: str | Path, forms: Sequence[str], context: int) -> int:
    return link_guest_bytes() if LINKS in forms else guest_bytes(model, forms, context)


@dataclass
class MeasuredModel:
    """What is known of a model."""

    profile: CostProfile | None
    needed: dict[str, int] = field(default_factory=dict)
    """Form -> the memory that it takes to measure it."""
    rests: dict[str, float] = field(default_factory=dict)
    """Form -> for how long it is let be behind a guest that measured nothing; inf: it cannot be measured."""
    not_before_s: dict[str, float] = field(default_factory=dict)
    """Form -> when that ends."""


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
        self._kind = next(iter(book.devices.values())).kind.type
        self._guest: GuestProcess | None = None
        self._model: Deployed | None = None
        self._form = ""
        self.at: dict[str, str] = {}
        """Device -> the model that is measured there."""
        self._links: CostProfile | None = None  # of whichever model they were measured for
        self._now_s = self._not_before_s = 0.0
        self._known: dict[str, MeasuredModel] = {}  # by path, of what is deployed
        self.cancelled = 0
        """How many guests were."""

    def tick(self, now_s: float, models: Sequence[Deployed]) -> None:
        """Look at the guest, or begin with one."""
        self._now_s = now_s
        self._known = {path: each for path, each in self._known.items() if any(path == m.path for m in models)}
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
        guest = self._guest  # whoever wants its memory may end it at the same time
        if guest is not None:
            guest.cancel()
            self._not_before_s = self._now_s + REST_S
            self._leave()

    def require_spare(self, device: str, nbytes: int) -> None:
        """Raise for a device where a guest would disturb: `StateError` for its load, `CapacityError` for its memory."""
        if not self._book.busy.settled(device):
            raise StateError(f"{device} was not looked at for long enough to say how busy it is; try again in seconds")
        load = max(self._book.busy.of_ranks(NOW_S).get(device, 0.0), self._book.busy.shares().get(device, 0.0))
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
        profile = self._of(model.path).profile
        return profile if profile is not None and profile.around.keys() >= set(model.forms) else None

    def _of(self, path: str) -> MeasuredModel:
        """Return what is known of a model: its files are read once. Raises `ConfigError` where there is no model."""
        if path not in self._known:
            self._known[path] = MeasuredModel(self._store.load(path, self._kind))
        return self._known[path]

    def _missing(self, model: Deployed) -> list[str]:
        """Return the forms that could be measured now."""
        try:
            of_model = self._of(model.path)
        except ElasticError as error:  # its directory has gone: it serves on
            self._known[model.path] = MeasuredModel(None)
            for form in (*model.forms, LINKS):
                self._put_off(model, form, error)
            return []
        profile = of_model.profile
        measured = set(profile.around) if profile is not None else set()
        linked = self._kind == "cpu" and len(self._book.devices) > 1 and measured.issuperset(model.forms)
        if not linked or (profile is not None and profile.link is not None):
            measured.add(LINKS)
        missing = [form for form in (*model.forms, LINKS) if form not in measured]
        return [form for form in missing if of_model.not_before_s.get(form, 0.0) <= self._now_s]

    def _begin(self, model: Deployed, form: str) -> None:
        if form == LINKS and (links := self._links) is not None:
            self._keep(model, form, lambda: links)
            return
        needed = self._of(model.path).needed
        try:
            nbytes = needed[form] = needed.get(form) or self._needs(model.path, (form,), CONTEXT)
        except ElasticError as error:
            self._put_off(model, form, error)
            return
        for devices in self._choices(model, form):
            try:
                for device in devices:
                    self.require_spare(device, nbytes)
                self._book.reserve(_WHO, dict.fromkeys(devices, nbytes), self._give_way)
            except (CapacityError, StateError):
                continue
            try:
                self._guest = self._start(model.path, (form,), devices[0].partition("#")[0])
            except OSError as error:  # no more processes or files can be had
                self._leave()
                self._put_off(model, form, error, again=True)
                return
            self._model, self._form, self.at = model, form, dict.fromkeys(devices, model.name)
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
        elif self._book.lacking(_WHO) or any(self._load_beside(device) >= SPARE_LOAD for device in self.at):
            self._give_way()

    def _give_way(self) -> None:
        """End the guest where others want what it has."""
        self.cancelled += 1
        self.stop()

    def _load_beside(self, device: str) -> float:
        """Return the load of a device beside the guest, which others see as one of theirs."""
        busy = self._book.busy
        return busy.of_ranks(NOW_S).get(device, 0.0) + max(0.0, busy.others().get(device, 0.0) - SHARE)

    def _keep(self, model: Deployed, form: str, result: Callable[[], CostProfile]) -> None:
        """Keep what was measured, and tell of it where all forms of the model are known."""
        of_model = self._of(model.path)
        try:
            profile = result()
            self._store.save(model.path, profile)
            of_model.profile = self._store.load(model.path, self._kind)
        except StateError as error:  # it was cancelled meanwhile, or killed: by hand, or where memory was short
            self._put_off(model, form, error, again=True)
            return
        except ElasticError as error:
            self._put_off(model, form, error)
            return
        if form == LINKS:
            self._links = profile
        if (whole := self.known(model)) is not None:
            self._stored(model.path, whole)

    def _leave(self) -> None:
        self._guest = self._model = None
        self._form, self.at = "", {}
        self._book.release(_WHO)

    def _put_off(self, model: Deployed, form: str, error: Exception, *, again: bool = False) -> None:
        """Measure something `again` later, each time twice as late, or not as long as the model is deployed."""
        of_model = self._of(model.path)
        rest_s = 2 * of_model.rests.get(form, REST_S / 2) if again else math.inf
        of_model.rests[form], of_model.not_before_s[form] = rest_s, self._now_s + rest_s
        until = "" if rest_s == math.inf else f" for {rest_s:.0f} s"
        logger.warning("%s in %s is not measured%s: %s", model.path, form, until, error)
