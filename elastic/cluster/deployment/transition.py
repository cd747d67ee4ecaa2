"""A deployment's fleet, changed step by step while it serves: each step is a verb of the fleet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence

from elastic.cluster.deployment.status import TransitionStep
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.groups.results import Exchanged
from elastic.errors import ElasticError, StateError
from elastic.planning.estimate.configuration import FULL, Configuration
from elastic.types import DROPPED, HOST, PlaceStatus, ResizeKV, Restore, Swap

SETTLE_S, POLL_S = 2.0, 0.05
"""How long to wait until the caps of a group have followed a limit; live requests may take longer."""
WHY = "the deployment changes its configuration"


class DeploymentTransition:
    """Does steps with a fleet. `ranks` says which rank is on which device, and is kept up to date.

    `places` says which place, as text, was last given to a rank of each device; `place` gives one to a new rank.
    """

    def __init__(
        self,
        fleet: Fleet,
        ranks: MutableMapping[str, str],
        places: Mapping[str, str],
        place: Callable[[str], str],
    ) -> None:
        self._fleet, self._ranks, self._places, self._place = fleet, ranks, places, place

    @property
    def awaited(self) -> str:
        """A lost rank in whose place another one begins; "": there is none."""
        return min(self._replaced_now(), default="")

    def follow(self) -> None:
        """See which ranks are in the places of lost ones, and forget those that are gone for good."""
        kept = self._replaced_now()
        ranks = self._fleet.status().ranks
        kept |= self._replaced_now() | {rank.name for rank in ranks if rank.up}  # one may be lost, or come, meanwhile
        serving = {rank.places: rank.name for rank in ranks if rank.serves}
        for device, place in self._places.items():
            if (place,) in serving:
                self._ranks[device] = serving[place,]
            elif self._ranks.get(device) not in kept:
                self._ranks.pop(device, None)

    def _replaced_now(self) -> set[str]:
        return {rank for rank in self._ranks.values() if self._fleet.replaces(rank)}

    def do(self, step: TransitionStep) -> None:
        """Do one step; requests are served meanwhile. Raises what the verbs do, and `StateError` for one that cannot
        be done now."""
        ranks = [self._ranks[device] for device in step.devices if device in self._ranks]
        match step.kind:
            case "add":
                for device in step.devices:
                    self._ranks[device] = self._fleet.add([self._place(device)])
            case "remove":
                for device, rank in zip(step.devices, ranks, strict=True):
                    self._fleet.remove(rank)
                    del self._ranks[device]
            case "part":
                self._part(ranks)
            case "restore" | "swap":
                for rank, kept in zip(ranks, step.layers, strict=True):
                    action = Swap(tuple(kept), step.weights) if step.kind == "swap" else Restore(tuple(kept))
                    self._fleet.apply(rank, (action,), why=WHY)
            case "share":
                _require(self._fleet.reshard(ranks, tp=len(ranks), why=WHY))
            case "drop":
                every = range(step.layers[-1].stop)
                gone = {
                    rank: [n for n in every if n not in kept] for rank, kept in zip(ranks, step.layers, strict=True)
                }
                _require(self._fleet.drop(layers=gone, why=WHY))

    def limit(self, device: str, kv_bytes: int | None) -> None:
        """Have the KV cache of a rank be so large at the most; None: as large as its place allows."""
        rank = self._ranks[device]
        self._fleet.apply(rank, (ResizeKV(self._status(device).name, kv_bytes),), why=WHY)

    def held_bytes(self, device: str) -> int:
        """Return what a rank holds in pages besides keys and values."""
        return sum(nbytes for owner, nbytes in self._status(device).owners.items() if owner != "kv")

    def settle(self, device: str, kv_bytes: int) -> int:
        """Wait a little until a rank has no more keys and values than its limit; return the bytes that it has.

        Of a group a rank has those of all instances, whose caps follow the limit.
        """
        until_s = time.monotonic() + SETTLE_S
        while (held := self._status(device).owners.get("kv", 0)) > kv_bytes and time.monotonic() < until_s:
            time.sleep(POLL_S)
        return held

    def budget(self, device: str) -> int:
        """Return the size of the place of a rank."""
        return self._status(device).budget_bytes

    def _status(self, device: str) -> PlaceStatus:
        place: PlaceStatus = self._fleet.look(self._ranks[device]).status.places[0]
        return place

    def _part(self, ranks: Sequence[str]) -> None:
        for group in self._fleet.groups():
            members = [name for name in group.members if name in ranks]
            if members and group.tp > 1:
                _require(self._fleet.reshard(members, tp=1, why=WHY))
            elif members:
                _require(self._fleet.restore(members[0], why=WHY))


def observed(fleet: Fleet, ranks: Sequence[str]) -> Configuration:
    """Return the configuration that a fleet is in: what its ranks share and hold, and the form of their layers.

    Keys and values are not looked at. Of layers in several forms it is the last one's.
    """
    groups = [group for group in fleet.groups() if set(group.members) & set(ranks)]
    tp = max((group.tp for group in groups), default=1)
    staged = [group for group in groups if any(group.dropped.values())]
    pp = max((len(group.members) // group.tp for group in staged), default=1)
    view = fleet.look(ranks[0])
    forms = [homes[0].variant for homes in view.status.residencies.values()]
    weights = next((form for form in reversed(forms) if form in view.variants), FULL)
    return Configuration(tp, pp, weights)


def forms_at(fleet: Fleet, ranks: Iterable[str]) -> frozenset[str]:
    """Return the forms that layers of ranks are in; of those that are not in their memory none is known."""
    forms = set[str]()
    for rank in ranks:
        try:
            view = fleet.look(rank)
        except ElasticError:  # it has just gone
            continue
        homes = [home[0] for home in view.status.residencies.values() if home[0].place not in (HOST, DROPPED)]
        names = [name for home in homes for name in home.variant.split("+")]  # several, where parts were swapped
        forms.update(name if name in view.variants else FULL for name in names)
    return frozenset(forms)


def _require(done: Exchanged) -> None:
    if done.status != "applied":
        raise StateError(f"layers did not change their rank ({done.status}): {done.why}; try again later")
