"""The ranks of a deployment, by their devices: looked at, and changed step by step while they serve."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from elastic.cluster.control.messages import RuntimeView
from elastic.cluster.deployment.devices import DeviceBook
from elastic.cluster.deployment.status import TransitionStep
from elastic.cluster.deployment.steps import Instances
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.groups.results import Exchanged
from elastic.errors import ElasticError, StateError
from elastic.planning.estimate.configuration import FULL
from elastic.planning.estimate.ranking import RankBytes
from elastic.types import DROPPED, HOST, PlaceStatus, ResizeKV, Restore, Swap

SETTLE_S, POLL_S = 2.0, 0.05
"""How long to wait until the caps of a group have followed a limit; live requests may take longer."""
WHY = "the deployment changes its configuration"
RankViews = Mapping[tuple[str, str], RuntimeView]
"""What ranks said of themselves, by their device and name."""


class DeployedRanks:
    """A fleet of one rank on each of some devices, and what of these is reserved for it. One thread's at a time.

    `options` are further ones of `Fleet`. Until their limits are set, the ranks may have all that is free.
    """

    def __init__(
        self, name: str, book: DeviceBook, path: str, devices: Sequence[str], options: Mapping[str, Any]
    ) -> None:
        self.by_device: dict[str, str] = {}
        """Device -> the rank that is there."""
        self.above_limits = False
        """Whether requests had more keys and values than the limits when these were set."""
        self._name, self._book = name, book
        self._numbers = count()
        self._places: dict[str, str] = {}  # device -> that of its last rank, as text
        book.reserve_all(name, devices)
        self.fleet = Fleet(path, ranks=[[self._place(device)] for device in devices], **options)

    def stop(self, *, drain: bool) -> None:
        """End them, with `drain` when their requests have ended; what they had of devices is free then."""
        self.fleet.stop(drain=drain)
        self._book.release(self._name)

    # -- what there is

    def replaced(self) -> set[str]:
        """Return the lost ranks in whose places others begin now."""
        return {rank for rank in self.by_device.values() if self.fleet.replaces(rank)}

    def follow(self) -> None:
        """See which ranks are in the places of lost ones, and forget those that are gone for good."""
        kept = self.replaced()
        ranks = self.fleet.status().ranks
        kept |= self.replaced() | {rank.name for rank in ranks if rank.up}  # one may be lost, or come, meanwhile
        serving = {rank.places: rank.name for rank in ranks if rank.serves}
        for device, place in self._places.items():
            if (place,) in serving:
                self.by_device[device] = serving[place,]
            elif self.by_device.get(device) not in kept:
                self.by_device.pop(device, None)

    def look(self) -> RankViews:
        """Follow them, and look at each once; one that has just gone is left out."""
        self.follow()
        views = dict[tuple[str, str], RuntimeView]()
        for device, rank in self.by_device.items():
            try:
                views[device, rank] = self.fleet.look(rank)
            except ElasticError:
                continue
        return views

    def instances(self) -> Instances:
        """Return the instances that there are."""
        device_of = {rank: device for device, rank in self.by_device.items()}
        told = dict[frozenset[tuple[str, int]], tuple[int, int]]()
        for group in self.fleet.groups():
            dropped = group.dropped
            firsts = {
                device_of[r]: next(i for i in count() if i not in dropped[r]) for r in group.members if r in device_of
            }
            stages = len(group.members) // group.tp if any(dropped.values()) else 1
            if firsts and group.tp * stages > 1:
                told[frozenset(firsts.items())] = group.tp, stages
        shared = {device for each in told for device, _ in each}
        return {**told, **{frozenset([(device, 0)]): (1, 1) for device in self.by_device if device not in shared}}

    # -- changes

    def do(self, step: TransitionStep) -> None:
        """Do one step, other than limits; requests are served meanwhile.

        Raises what the verbs of fleets do, and `StateError` for one that cannot be done now.
        """
        if step.kind == "add":
            for device in step.devices:
                self.by_device[device] = self.fleet.add([self._place(device)])
            return
        ranks = [self._rank(device) for device in step.devices]
        if step.kind in ("part", "share", "drop"):  # keys and values are copied: for that, there is more room
            self._make_room(step.devices)
        match step.kind:
            case "remove":
                for device, rank in zip(step.devices, ranks, strict=True):
                    self.fleet.remove(rank)
                    del self.by_device[device]
            case "part":
                self._part(ranks)
            case "restore" | "swap":
                for rank, kept in zip(ranks, step.layers, strict=True):
                    action = Swap(tuple(kept), step.weights) if step.kind == "swap" else Restore(tuple(kept))
                    self.fleet.apply(rank, (action,), why=WHY)
            case "share":
                _require(self.fleet.reshard(ranks, tp=len(ranks), why=WHY))
            case "drop":
                every = range(step.layers[-1].stop)
                gone = {
                    rank: [n for n in every if n not in kept] for rank, kept in zip(ranks, step.layers, strict=True)
                }
                _require(self.fleet.drop(layers=gone, why=WHY))

    def limit(self, shares: Mapping[str, RankBytes], wait_s: float = SETTLE_S) -> None:
        """Give the rank of each device its share for keys and values, and give the rest of the devices back.

        What live requests have above a limit behind `wait_s` is given back when this is called again behind their end.
        """
        free, others, limits = self._book.free(self._name), dict[str, int](), dict[str, int]()
        for device, share in shares.items():
            place = self._status(device)
            others[device] = _held_bytes(place) + share.activations + share.copied
            limits[device] = max(0, min(share.kv, free[device] - others[device]))
            self._resize(device, place, limits[device])
        until_s = time.monotonic() + wait_s
        kept = {device: max(limit, self._settle(device, limit, until_s)) for device, limit in limits.items()}
        self.above_limits = kept != limits
        self._book.reserve(self._name, {device: min(free[device], others[device] + kept[device]) for device in kept})

    # -- inside

    def _place(self, device: str) -> str:
        """Return a place on a device of its own, with all that is free there."""
        base, _, label = device.partition("#")
        slug = re.sub(r"\W", "_", self._name, flags=re.ASCII)
        own = f"{label}_{slug}_{next(self._numbers)}".lstrip("_")
        self._places[device] = f"{base}#{own}={self._book.free(self._name)[device]}"
        return self._places[device]

    def _rank(self, device: str) -> str:
        if device not in self.by_device:
            raise StateError(f"the rank of {self._name!r} on {device} was lost meanwhile; try again")
        return self.by_device[device]

    def _status(self, device: str) -> PlaceStatus:
        place: PlaceStatus = self.fleet.look(self._rank(device)).status.places[0]
        return place

    def _resize(self, device: str, place: PlaceStatus, kv_bytes: int | None) -> None:
        """Have the KV cache of a rank be so large at the most; None: as large as its place allows."""
        self.fleet.apply(self._rank(device), (ResizeKV(place.name, kv_bytes),), why=WHY)

    def _make_room(self, devices: Sequence[str]) -> None:
        """Let ranks have all that is free on their devices."""
        free = self._book.free(self._name)
        for device in devices:
            place = self._status(device)
            left = max(0, free[device] - _held_bytes(place))
            self._resize(device, place, None if place.budget_bytes <= free[device] else left)

    def _settle(self, device: str, kv_bytes: int, until_s: float) -> int:
        """Wait a little until a rank has no more keys and values than its limit; return the bytes that it has.

        Of a group a rank has those of all instances, whose caps follow the limit.
        """
        while (held := self._status(device).owners.get("kv", 0)) > kv_bytes and time.monotonic() < until_s:
            time.sleep(POLL_S)
        return held

    def _part(self, ranks: Sequence[str]) -> None:
        for group in self.fleet.groups():
            members = [name for name in group.members if name in ranks]
            if members and group.tp > 1:
                _require(self.fleet.reshard(members, tp=1, why=WHY))
            elif members:
                _require(self.fleet.restore(members[0], why=WHY))


def forms_in(view: RuntimeView) -> frozenset[str]:
    """Return the forms that the layers of a rank are in; of those that are not in its memory none is known."""
    homes = [home[0] for home in view.status.residencies.values() if home[0].place not in (HOST, DROPPED)]
    names = [name for home in homes for name in home.variant.split("+")]  # several, where parts were swapped
    return frozenset(name if name in view.variants else FULL for name in names)


def _held_bytes(place: PlaceStatus) -> int:
    """Return what a rank holds in pages besides keys and values."""
    return sum(nbytes for owner, nbytes in place.owners.items() if owner != "kv")


def _require(done: Exchanged) -> None:
    if done.status != "applied":
        raise StateError(f"layers did not change their rank ({done.status}): {done.why}; try again later")
