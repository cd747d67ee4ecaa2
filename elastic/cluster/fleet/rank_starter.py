"""Starting the ranks of a fleet, and ending them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from elastic import clock
from elastic.cluster.fleet.instance import Instance
from elastic.cluster.fleet.membership import Membership
from elastic.cluster.launch.base import Launcher
from elastic.cluster.rank.client import RankClient
from elastic.cluster.rank.spec import RankSpec, rank_places
from elastic.config import Place, require
from elastic.errors import ConfigError, ElasticError, StateError, is_integer, is_list, require_whole
from elastic.planning.sharding.share import Share

logger = logging.getLogger(__name__)
END_S = 10.0
"""How long ranks may take to end in order."""


def rank_count(ranks: Any) -> int:
    """Return how many ranks there are to be, which are given as a number, or by their places. Raises `ConfigError`."""
    is_given = is_list(ranks, lambda _: True)
    count = len(ranks) if is_given else ranks
    require(is_integer(count) and count >= 1, "ranks", ranks, "at least 1, or for each rank its places")
    return int(count)


class _Starts:
    """Ranks that are started side by side; those that were not taken end with it, also such as come after that."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._lock = clock.current().lock()
        self._left: list[RankClient] = []
        self._over = False

    def start(self, spec: RankSpec) -> RankClient:
        """Start a rank, on a thread of its own."""
        client = self._launcher.start(spec)
        with self._lock:
            if not self._over:
                self._left.append(client)
                return client
        client.kill("nobody waits for it any more")
        raise StateError(f"nobody waits for rank {spec.name!r} any more")

    def take(self, client: RankClient) -> RankClient:
        """Return a rank of which somebody else sees to its end from now on."""
        with self._lock:
            self._left.remove(client)
        return client

    def end(self) -> None:
        """End what was not taken."""
        with self._lock:
            self._over = True
        for client in self._left:
            client.kill("nobody waits for it any more")


class RankStarter:
    """Has ranks started and join. Thread-safe. `options` are further fields of `RankSpec`."""

    def __init__(self, launcher: Launcher, members: Membership, model: Any, options: Mapping[str, Any]) -> None:
        self.launcher = launcher
        self.waits = hasattr(launcher, "pass_on")
        """Whether ranks come by themselves."""
        self._members, self._model, self._options = members, model, options
        self._numbers, self._units = itertools.count(), itertools.count()
        self._ended = False
        self.on_joined: Callable[[Instance], None] = lambda _: None
        """Called with each rank that has joined, by who started it; what it raises, that raises."""

    def specs(
        self,
        ranks: int | Sequence[Sequence[str]],
        places: Sequence[str],
        cores: Sequence[Sequence[int]],
        each: Sequence[Share],
    ) -> list[RankSpec]:
        """Return what the first ranks are to be; `each` is what those have that have a model together."""
        count = rank_count(ranks)
        require(is_list(cores, lambda _: True), "cores", cores, "a list, for each rank of its cores")
        if cores and len(cores) != count:
            raise ConfigError(f"cores: given for {len(cores)} ranks, there are {count}")
        at = [places] * count if isinstance(ranks, int) else ranks
        return self.in_units([self.spec(at[i], cores[i] if cores else ()) for i in range(count)], each)

    def like(self, first: RankSpec, count: int, each: Sequence[Share]) -> list[RankSpec]:
        """Return what so many more ranks are to be, with places as one has them; `each` as of `specs`."""
        require_whole(count, "ranks")
        return self.in_units([self.spec(first.places) for _ in range(count)], each)

    def in_units(self, specs: Sequence[RankSpec], each: Sequence[Share]) -> list[RankSpec]:
        """Return what ranks are to be of which as many as there are shares have a model together, in their order."""
        if len(each) == 1:
            return list(specs)
        if self.waits:
            raise ConfigError(
                "tp=, pp=: ranks that join by themselves have all of the model; have the fleet start them"
            )
        if len(specs) % len(each):
            raise ConfigError(f"ranks: {len(each)} have the model together; {len(specs)} are no multiple of that")
        units = [next(self._units) for _ in range(0, len(specs), len(each))]
        return [
            replace(spec, share=each[number % len(each)], unit=units[number // len(each)])
            for number, spec in enumerate(specs)
        ]

    def spec(self, places: Sequence[str], cores: Sequence[int] = ()) -> RankSpec:
        """Return what one more rank is to be."""
        if isinstance(places, str):
            raise ConfigError(f"places={places!r} must be a list of places, such as [{places!r}]")
        is_places = is_list(places, lambda place: isinstance(place, str))
        require(is_places, "places", places, "a list of places, such as ['cpu#0=4GiB']; [] has them chosen")
        is_cores = is_list(cores, lambda core: is_integer(core) and core >= 0)
        require(is_cores, "cores", cores, "a list of the numbers of CPU cores")
        return RankSpec(self.next_name(), self._model, tuple(places), cores=tuple(cores), **self._options)

    def next_name(self) -> str:
        """Return a name that no rank had."""
        return f"r{next(self._numbers)}"

    def start(self, spec: RankSpec) -> Instance:
        """Start a rank and have it join. Raises what it raised."""
        self._require_memory([spec])
        return self._join(self.launcher.start(spec), spec)

    def start_all(self, specs: Sequence[RankSpec]) -> tuple[str, ...]:
        """Start ranks side by side, and have them join in this order; return their names.

        Raises the first error when all others have joined; `ConfigError` before any is started where this host has
        less memory than they would have together. Where the wait is interrupted those that had not joined end.
        """
        names, errors = self._start_each(specs)
        if errors:
            raise errors[0]
        return names

    def start_some(self, specs: Sequence[RankSpec]) -> tuple[str, ...]:
        """Start ranks side by side; return the names of those that joined. Raises the first error if none did."""
        names, errors = self._start_each(specs)
        if errors and not names:
            raise errors[0]
        return names

    def _start_each(self, specs: Sequence[RankSpec]) -> tuple[tuple[str, ...], list[Exception]]:
        self._require_memory(specs)
        names, errors = list[str](), list[Exception]()
        with ExitStack() as stack:
            starts = _Starts(self.launcher)
            stack.callback(starts.end)
            calls = [partial(starts.start, spec) for spec in specs]
            for spec, client in zip(specs, clock.current().run_together(calls, "elastic-fleet-start"), strict=True):
                try:
                    names.append(self._join(starts.take(client.result()), spec).name)
                except Exception as error:  # whatever it is, it is of one rank: the others are there, and join
                    errors.append(error)
        return tuple(names), errors

    def _require_memory(self, specs: Sequence[RankSpec]) -> None:
        """Hold what processes of this host are to have of its memory against it; of a GPU only they can tell."""
        if self.launcher.name == "local":
            on_cpu = {s.name: [p for p in s.places if Place.parse(p).device.type == "cpu"] for s in specs}
            self._members.require_memory({name: rank_places(places) for name, places in on_cpu.items()})

    def _join(self, client: RankClient, spec: RankSpec) -> Instance:
        if self._ended:
            client.kill("the fleet has stopped")
            client.close()
            raise StateError("the fleet has stopped")
        if not client.hello.name:
            client.hello = replace(client.hello, name=self._free_name(spec.name))
        instance = self._members.join(client, spec, self.launcher.name)
        try:
            self.on_joined(instance)
        except BaseException as error:  # also what ends the calling thread
            instance.leaving = True
            client.kill(f"it cannot serve: {error}")
            raise
        return instance

    def _free_name(self, name: str) -> str:
        """Return a name, or another where a rank that chose its own has it."""
        while self._members.has(name):
            name = self.next_name()
        return name

    def take(self, client: RankClient) -> None:
        """Have a rank join that came by itself."""
        try:
            self._join(client, RankSpec(client.hello.name or self.next_name(), self._model))
        except ElasticError as error:
            logger.warning("a rank came that cannot serve: %s", error)

    def end_all(self) -> None:
        """End all ranks in order, and start none any more; what was interrupted can be done again.

        Without threads: none can be made when the interpreter ends.
        """
        self._ended = True
        instances = self._members.dismiss()
        for instance in instances:
            instance.client.leave()
        for instance in instances:
            instance.client.close(timeout_s=END_S)
