"""Asking the ranks of a group, and having them know each other."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any

from elastic import clock
from elastic.cluster.control.messages import Question
from elastic.cluster.control.stage_questions import (
    Bulk,
    LosePeer,
    MeasureRoom,
    MeetPeers,
    OpenPeers,
    Room,
    SetCap,
    WeightDigests,
)
from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.instance import Instance
from elastic.cluster.fleet.refusals import not_there
from elastic.engines.core.load import EngineLoad
from elastic.errors import ConfigError, ElasticError, RankLost, StateError

logger = logging.getLogger(__name__)
ANSWER_S = 300.0
"""How long a rank may take to answer. One that is dead or hangs is noticed before."""


class Ranks:
    """The ranks of a fleet, by name. Thread-safe."""

    def __init__(self, dispatcher: Dispatcher, bulk: Bulk) -> None:
        self.dispatcher, self._bulk = dispatcher, bulk
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._addresses: dict[str, tuple[str, int]] = {}
        self._met: dict[str, set[str]] = {}  # rank -> those that know where it listens
        self._asked: frozenset[str] = frozenset()  # to get ready

    def serving(self) -> list[Instance]:
        """List the instances that take requests."""
        with self.dispatcher.lock:
            return [instance for instance in self.dispatcher.serving() if not instance.client.lost]

    def present(self) -> dict[str, Instance]:
        """Return the instances that take requests, or will when they are put together."""
        with self.dispatcher.lock:
            there = {name: each for name, each in self.dispatcher.instances.items() if not each.client.lost}
        return {name: each for name, each in there.items() if each.state in ("starting", "serving")}

    def there(self, rank: str) -> bool:
        """Return whether a rank has not gone."""
        with self.dispatcher.lock:
            instance = self.dispatcher.instances.get(rank)
        return instance is not None and not instance.client.lost

    def instance(self, rank: str) -> Instance:
        """Return an instance. Raises `RankLost` for one that has gone, `NotFound` for a name that none ever had."""
        with self.dispatcher.lock:
            instance = self.dispatcher.instances.get(rank)
            there = tuple(self.dispatcher.instances)
            if instance is None and rank not in self.dispatcher.gone:
                raise not_there(f"rank {rank!r}", there)
        if instance is None:
            raise RankLost(f"rank {rank!r} is not there any more; there are: {', '.join(there) or 'none'}", rank=rank)
        return instance

    def ask(self, rank: str, question: Question) -> Any:
        """Return what a rank answers. Raises what it raised, `RankLost` if it did not."""
        instance = self.instance(rank)
        return result(instance, instance.client.ask(question))

    def ask_all(self, questions: Mapping[str, Question]) -> dict[str, Any]:
        """Ask ranks at the same time. Raises the first error when all have answered."""
        return dict(zip(questions, self.ask_each(questions.items()), strict=True))

    def ask_each(self, questions: Iterable[tuple[str, Question]]) -> list[Any]:
        """Ask ranks at the same time, one also several questions. Raises the first error when all have answered."""
        answers = self.answers(questions)
        for answer in answers:
            if isinstance(answer, ElasticError):
                raise answer
        return answers

    def answers(self, questions: Iterable[tuple[str, Question]], *, within_s: float = ANSWER_S) -> list[Any]:
        """Ask as `ask_each`; return what each answered within so many seconds of now, or raised.

        Raises `RankLost` for one that is not there, and has asked nobody then.
        """
        there = [(self.instance(rank), question) for rank, question in questions]
        asked = [(instance, instance.client.ask(question)) for instance, question in there]
        answers: list[Any] = []
        until_s = clock.now() + within_s
        for instance, answer in asked:
            try:
                answers.append(result(instance, answer, max(0.0, until_s - clock.now())))
            except ElasticError as error:
                answers.append(error)
        return answers

    def measure(self, ranks: Iterable[str]) -> dict[str, Room]:
        """Return the room of ranks."""
        return self.ask_all({rank: MeasureRoom(rank) for rank in ranks})

    def set_caps(self, caps: Mapping[str, int | None]) -> None:
        """Have instances map no more sectors than their caps, None: any number; requests see all change at once.

        They are given nothing meanwhile. Raises `RankLost`.
        """
        dispatcher, loads = self.dispatcher, dict[str, EngineLoad]()
        with dispatcher.lock:  # or all that waits would go to the one whose news come first
            changing = dispatcher.present(caps).values()
            for instance in changing:
                instance.limit_changes += 1
        try:
            loads = self.ask_all({home: SetCap(cap) for home, cap in caps.items()})
        finally:
            with dispatcher.lock:
                for instance in changing:
                    instance.limit_changes -= 1
                    if instance.name in loads:
                        instance.hear(loads[instance.name], clock.now())
                dispatcher.dispatch()

    @contextmanager
    def flipping(self, names: Iterable[str]) -> Iterator[None]:
        """Have the status tell meanwhile that who computes layers of instances of these ranks changes."""
        with self.dispatcher.lock:
            there = self.dispatcher.present(names).values()
            for instance in there:
                instance.flips += 1
        try:
            yield
        finally:
            with self.dispatcher.lock:
                for instance in there:
                    instance.flips -= 1

    def get_ready(self) -> None:
        """Have ranks that came since listen for others, and begin to compute checksums of their weights. One thread.

        Nobody waits for the checksums; a verb that needs them does, if they are not there yet. What cannot be done is
        said by the verb, too.
        """
        serving = frozenset(instance.name for instance in self.serving())
        new = sorted(serving - self._asked)
        if len(serving) < 2 or not new:
            return
        self._asked = serving
        try:
            self.listen(new)
            for rank, room in self.measure(new).items():
                self.instance(rank).client.ask(WeightDigests(tuple(sorted(room.resident))))
        except ElasticError as error:
            logger.debug("ranks could not get ready for layers to change their rank: %s", error)

    def introduce(self, ranks: Iterable[str]) -> None:
        """Have ranks know where each other listens."""
        names = tuple(ranks)
        addresses = self.listen(names)
        require_reachable({rank: self.instance(rank).hello.host for rank in names}, addresses)
        with self._lock:
            for rank in names:
                self._met.setdefault(rank, set()).update(other for other in names if other != rank)
        self.ask_all({rank: MeetPeers(addresses) for rank in names})

    def listen(self, ranks: Iterable[str]) -> dict[str, tuple[str, int]]:
        """Have ranks listen for others, unless they do; return where. Raises `RankLost`."""
        names = tuple(ranks)
        with self._lock:
            addresses = {rank: self._addresses[rank] for rank in names if rank in self._addresses}
        addresses |= self.ask_all({r: OpenPeers(r, self._key, self._bulk) for r in names if r not in addresses})
        with self._lock:
            self._addresses |= addresses
        for rank in names:
            if not self.there(rank):  # it has gone meanwhile
                with self._lock:
                    self._addresses.pop(rank, None)
                raise RankLost(f"rank {rank!r} is not there any more", rank=rank)
        return addresses

    def lose(self, rank: str) -> None:
        """Tell those that have met a rank that it has gone, and wait for none of them."""
        with self._lock:
            self._addresses.pop(rank, None)
            others = self._met.pop(rank, ())
            for other in others:
                self._met.get(other, set()).discard(rank)
        with self.dispatcher.lock:
            there = self.dispatcher.present(others).values()
        for instance in there:
            instance.client.ask(LosePeer(rank))


def require_reachable(hosts: Mapping[str, str], addresses: Mapping[str, tuple[str, int]]) -> None:
    """Raise `ConfigError` for ranks of several hosts of which one listens to its own host alone."""
    if len({host.split("/")[0] for host in hosts.values()}) > 1:
        for rank, (host, _) in addresses.items():
            if ip_address(host).is_loopback:
                raise ConfigError(
                    f"rank {rank!r} listens at {host}, where ranks of other hosts do not find it; have it join the "
                    "fleet over the network: elastic rank MODEL --join HOST:PORT"
                )


def require_all(members: Sequence[str], present: Collection[str]) -> None:
    """Raise `StateError` where a rank is not there that would be in a group."""
    if gone := [name for name in members if name not in present]:
        others = ", ".join(name for name in members if name not in gone)
        raise StateError(
            f"rank {gone[0]!r}, with which {others} would be one group, was lost or is being removed; "
            "try again when the others go on without it"
        )


def require_like(instances: Sequence[Instance]) -> None:
    """Raise in words if instances cannot compute each other's layers."""
    first = instances[0].hello
    for hello in (instance.hello for instance in instances):
        if hello.kv != first.kv:
            raise ConfigError(
                f"ranks {first.name!r} and {hello.name!r} have other forms of KV cache, {first.kv} and {hello.kv}; "
                "start them with the same options"
            )


def result(instance: Instance, answer: Future[Any], within_s: float = ANSWER_S) -> Any:
    """Return what a rank answers. Raises what it raised, `RankLost` if it did not."""
    try:
        return answer.result(within_s)
    except TimeoutError as error:
        raise RankLost(f"rank {instance.name!r} did not answer in time", rank=instance.name) from error
    except StateError as error:
        if instance.client.lost:
            raise RankLost(str(error), rank=instance.name) from error
        raise
