"""Profiling in spare time: fingerprints are measured on devices that have little to do. (iServe, 4.2 and 8.6)"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from elastic.cluster.deployment.devices import DeviceBook
from elastic.errors import CapacityError, ElasticError, StateError
from elastic.estimation.profile import CostProfile
from elastic.estimation.profiles.guest import SHARE, ProfilingProcess, guest_bytes
from elastic.estimation.profiles.store import ProfileStore

logger = logging.getLogger(__name__)
SPARE_LOAD = 0.3
"""A device that is busier has no guest."""
REST_S = 10.0
"""Behind one that was cancelled none begins so soon."""
CONTEXT = 512
_WHO = "a guest that measures"


class Measuring(Protocol):
    """A guest."""

    @property
    def ended(self) -> bool: ...
    def result(self) -> CostProfile: ...
    def cancel(self) -> None: ...


class Measured(Protocol):
    """A model whose seconds are wanted."""

    name: str
    path: str

    @property
    def forms(self) -> tuple[str, ...]: ...


Starter = Callable[[str, Sequence[str], str], Measuring]


def _start(model: str, forms: Sequence[str], device: str) -> Measuring:
    return ProfilingProcess(model, forms, device, context=CONTEXT, share=SHARE)


class Harvester:
    """Measures what is not known of models, a form at a time, one guest in all. One thread's at a time.

    `stored` is called with a model's directory and its profile as soon as all its forms are known.
    """

    def __init__(
        self,
        book: DeviceBook,
        store: ProfileStore,
        stored: Callable[[str, CostProfile], object],
        start: Starter = _start,
        needs: Callable[[str | Path, Sequence[str], int], int] = guest_bytes,
    ) -> None:
        self._book, self._store, self._stored, self._start, self._needs = book, store, stored, start, needs
        self._guest: Measuring | None = None
        self._model: Measured | None = None
        self._device = ""
        self._not_before_s = 0.0
        self._failed: set[tuple[str, str]] = set()  # (path, form) that cannot be measured
        self.cancelled = 0
        """How many guests were."""

    @property
    def at(self) -> dict[str, str]:
        """Device -> the model that is measured there."""
        return {self._device: self._model.name} if self._model is not None else {}

    def tick(self, now_s: float, models: Sequence[Measured]) -> None:
        """Look at the guest, or begin with one."""
        if self._guest is not None and self._model is not None:
            self._watch(now_s, self._guest, self._model, models)
        elif now_s >= self._not_before_s:
            for model in models:
                if missing := self._missing(model):
                    self._begin(model, missing[0])
                    return

    def stop(self) -> None:
        """End the guest."""
        if self._guest is not None:
            self._guest.cancel()
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

    def known(self, model: Measured) -> CostProfile | None:
        """Return the profile of a model, if all its forms are in it."""
        return self._store.load(model.path, self._kind, model.forms)

    @property
    def _kind(self) -> str:
        return next(iter(self._book.devices.values())).kind.type

    def _missing(self, model: Measured) -> list[str]:
        profile = self._store.load(model.path, self._kind)
        measured = profile.around if profile is not None else {}
        return [form for form in model.forms if form not in measured and (model.path, form) not in self._failed]

    def _begin(self, model: Measured, form: str) -> None:
        try:
            nbytes = self._needs(model.path, (form,), CONTEXT)
        except ElasticError as error:
            self._give_up(model, form, error)
            return
        for device in self._book.devices:
            try:
                self.require_spare(device, nbytes)
                self._book.reserve(_WHO, {device: nbytes})
            except (CapacityError, StateError):
                continue
            self._guest = self._start(model.path, (form,), device.partition("#")[0])
            self._model, self._device = model, device
            return

    def _watch(self, now_s: float, guest: Measuring, model: Measured, models: Sequence[Measured]) -> None:
        gone = all(model is not each for each in models)
        busy = self._book.busy
        others = max(0.0, busy.others().get(self._device, 0.0) - SHARE)  # the guest is one of them
        if gone or busy.recent().get(self._device, 0.0) + others >= SPARE_LOAD:
            guest.cancel()
            self.cancelled += not gone
            self._not_before_s = now_s + REST_S
            self._leave()
        elif guest.ended:
            form = next(iter(self._missing(model)), "")
            try:
                self._store.save(model.path, guest.result())
            except ElasticError as error:
                self._give_up(model, form, error)
            self._leave()
            if (profile := self.known(model)) is not None:
                self._stored(model.path, profile)

    def _leave(self) -> None:
        self._guest = self._model = None
        self._device = ""
        self._book.release(_WHO)

    def _give_up(self, model: Measured, form: str, error: ElasticError) -> None:
        self._failed.add((model.path, form))
        logger.warning("%s in %s is not measured: %s", model.path, form, error)
