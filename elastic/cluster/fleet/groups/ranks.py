"""Asking the ranks of a group, and having them know each other."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from ipaddress import ip_address
from typing import Any

from elastic.cluster.control.messages import Question
from elastic.cluster.control.stage_questions import Bulk, LosePeer, MeetPeers, OpenPeers
from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.instance import Instance
from elastic.errors import ConfigError, ElasticError, RankLost, StateError

ANSWER_S = 300.0
"""How long a rank may take to answer. One that is dead or hangs is noticed before."""


class Ranks:
    """The ranks of a fleet, by name. Thread-safe."""

    def __init__(self, dispatcher: Dispatcher, bulk: Bulk) -> None:
        self.dispatcher, self._bulk = dispatcher, bulk
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._addresses: dict[str, tuple[str, int]] = {}

    def serving(self) -> list[Instance]:
        """List the instances that take requests."""
        with self.dispatcher.lock:
            return [instance for instance in self.dispatcher.instances.values() if instance.state == "serving"]

    def there(self, rank: str) -> bool:
        """Return whether a rank has not gone."""
        with self.dispatcher.lock:
            instance = self.dispatcher.instances.get(rank)
        return instance is not None and not instance.client.lost

    def instance(self, rank: str) -> Instance:
        """Return an instance. Raises `RankLost`."""
        with self.dispatcher.lock:
            instance = self.dispatcher.instances.get(rank)
        if instance is None:
            raise RankLost(f"rank {rank!r} is not there any more", rank=rank)
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

    def answers(self, questions: Iterable[tuple[str, Question]]) -> list[Any]:
        """Ask as `ask_each`; return what each answered, or raised. Raises `RankLost` for one that is not there."""
        asked = [(instance := self.instance(rank), instance.client.ask(question)) for rank, question in questions]
        answers: list[Any] = []
        for instance, answer in asked:
            try:
                answers.append(result(instance, answer))
            except ElasticError as error:
                answers.append(error)
        return answers

    def introduce(self, ranks: Iterable[str]) -> None:
        """Have ranks know where each other listens."""
        names = tuple(ranks)
        with self._lock:
            new = [rank for rank in names if rank not in self._addresses]
        found = self.ask_all({rank: OpenPeers(rank, self._key, self._bulk) for rank in new})
        with self._lock:
            self._addresses |= found
            addresses = {rank: self._addresses[rank] for rank in names}
        require_reachable({rank: self.instance(rank).hello.host for rank in names}, addresses)
        self.ask_all({rank: MeetPeers(addresses) for rank in names})

    def lose(self, rank: str, others: Iterable[str]) -> None:
        """Tell others that a rank has gone, and wait for none of them."""
        with self._lock:
            self._addresses.pop(rank, None)
        with self.dispatcher.lock:
            there = [i for name in others if name != rank and (i := self.dispatcher.instances.get(name)) is not None]
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


def result(instance: Instance, answer: Future[Any]) -> Any:
    """Return what a rank answers. Raises what it raised, `RankLost` if it did not."""
    try:
        return answer.result(ANSWER_S)
    except TimeoutError as error:
        raise RankLost(f"rank {instance.name!r} did not answer in {ANSWER_S:.0f} s", rank=instance.name) from error
    except StateError as error:
        if instance.client.lost:
            raise RankLost(str(error), rank=instance.name) from error
        raise
