"""Ranks as actors of Ray, which places them on its hosts. Extra `ray`.

Written against Ray 2.60. Ray starts processes and tells of their end; what is said to ranks goes over connections of
our own.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from elastic.cluster.control.connection import SocketConnection, encode
from elastic.cluster.control.handshake import connect
from elastic.cluster.control.listener import LOOPBACK, Listener
from elastic.cluster.control.processes import Exit
from elastic.cluster.launch.base import START_S, await_hello, of_a_directory
from elastic.cluster.rank.client import RankClient
from elastic.cluster.rank.process import serve
from elastic.cluster.rank.spec import RankSpec
from elastic.errors import BackendUnavailable, ConfigError, StateError, is_integer, is_number, require_period

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise BackendUnavailable("launch='ray' needs Ray: pip install 'elastic-llm[ray]'") from error

CLOSED = "the launcher was closed; make a new one"
ROOM_S = 60.0
"""How long Ray may take to find, or to start, a host with room for a rank."""


class RankActor:
    """What Ray runs: one rank."""

    def serve(self, address: tuple[str, int], key: bytes, spec: RankSpec) -> None:
        """Be a rank of the fleet that listens there, until it ends."""
        serve(connect(address, key), spec)


class RayProcess:
    """A rank's actor: a `RankProcess`."""

    def __init__(self, actor: Any, served: Any, give_back: Callable[[], None]) -> None:
        self._actor, self._served, self._give_back = actor, served, give_back
        self.ended = os.eventfd(0)
        self._exit: Exit | None = None
        self._known = threading.Event()
        self._lock = threading.Lock()  # of the descriptor
        self.open = True
        """Whether it was not closed yet."""
        try:
            threading.Thread(target=self._watch, name="elastic-ray-actor", daemon=True).start()
        except RuntimeError:  # there are no threads left
            os.close(self.ended)
            raise

    def kill(self) -> None:
        """Have Ray end the actor's process at once."""
        with suppress(Exception):  # it has ended, or Ray has: there is nothing left to kill
            ray.kill(self._actor, no_restart=True)

    def wait(self, timeout_s: float) -> Exit | None:
        """Wait until Ray has told how it ended."""
        self._known.wait(timeout_s)
        return self._exit

    def close(self) -> None:
        """End the actor, which would idle after its rank's end, and give its bundle back."""
        self.kill()
        with self._lock:
            was_open, self.open = self.open, False
            if was_open:
                os.close(self.ended)
        if was_open:
            self._give_back()

    def _watch(self) -> None:
        try:
            ray.get(self._served)
            reason = "its actor has ended"
        except Exception as error:  # its death, an error of its own, the end of Ray: it has ended in each case
            said = " ".join(str(error).split())
            reason = f"its actor has ended: {type(error).__name__}: {said[:300]}"
        self._exit = Exit(reason)
        self._known.set()
        with self._lock:
            if self.open:
                os.eventfd_write(self.ended, 1)


def _join_ray() -> None:
    """Join Ray, or start it. Raises `StateError`.

    On a thread that stays: the kernel ends the processes that Ray has started when the thread ends that did it.
    """
    joined: Future[None] = Future()

    def join() -> None:
        try:
            ray.init()
        except BaseException as error:  # Ray raises errors of many kinds; whoever asked gets them
            joined.set_exception(error)
            return
        joined.set_result(None)
        threading.Event().wait()

    threading.Thread(target=join, name="elastic-ray", daemon=True).start()
    try:
        joined.result()
    except Exception as error:  # as above
        raise StateError(f"Ray could be neither joined nor started: {error}") from error


class RayLauncher:
    """Starts each rank as an actor in a bundle of its own: `{"CPU": cpus, "GPU": gpus}`.

    The first `ranks` bundles are one placement group, placed by `strategy`, all or none; further ranks get groups of
    their own, which Ray's autoscaler sees when there is no room. The bundle of a lost rank is for its replacement, a
    new actor: Ray itself restarts none. Ranks connect to `host`; give an address that the other hosts reach, if there
    are any. Ray is started, or joined, if it was not; the model's directory must be there on all hosts.
    """

    name = "ray"

    def __init__(
        self,
        *,
        ranks: int = 1,
        cpus: float = 1,
        gpus: float = 0,
        host: str = LOOPBACK,
        strategy: str = "PACK",
        room_s: float = ROOM_S,
        start_timeout_s: float = START_S,
    ) -> None:
        require_period(room_s, "room_s")
        require_period(start_timeout_s, "start_timeout_s")
        amounts = all(is_number(amount) and amount >= 0 for amount in (cpus, gpus))
        if not (is_integer(ranks) and ranks >= 1 and amounts):
            raise ConfigError(f"ranks={ranks}, cpus={cpus}, gpus={gpus}: give at least one rank, and no less than 0")
        if strategy not in ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"):
            raise ConfigError(f"strategy={strategy!r} must be PACK, SPREAD, STRICT_PACK or STRICT_SPREAD")
        self._bundle = {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
        self._cpus, self._gpus = cpus, gpus
        self._first, self._strategy, self._host = ranks, strategy, host
        self._room_s, self._start_timeout_s = room_s, start_timeout_s
        self._placing = threading.Lock()  # held while room is sought: ranks that start together share the first group
        self._lock = threading.Lock()  # of all below
        self._groups: list[Any] = []
        self._free: list[tuple[Any, int]] = []  # groups and numbers of bundles that no rank has
        self._processes: list[RayProcess] = []
        self._closed = False

    def start(self, spec: RankSpec) -> RankClient:
        """Start a rank; see `Launcher`."""
        spec = of_a_directory(spec)
        encode(spec)  # raises in words for what cannot be sent
        came: SimpleQueue[SocketConnection] = SimpleQueue()
        key = secrets.token_bytes(32)
        listener = Listener((self._host, 0), key, came.put)
        try:
            process = self._start_actor(listener.address, key, spec)
            with ExitStack() as failed:
                failed.callback(process.close)
                connection = self._await(came, process, spec.name)
                failed.pop_all()
        finally:
            listener.close()
            while not came.empty():  # it came when nobody waited any more
                came.get().close()
        return await_hello(connection, process, spec.name, timeout_s=self._start_timeout_s)

    def close(self) -> None:
        """End all actors, and give their bundles back to Ray. Can be called twice."""
        with self._lock:
            self._closed = True
            processes, groups = self._processes, self._groups
            self._processes, self._groups, self._free = [], [], []
        for process in processes:
            process.kill()
        for group in groups:
            with suppress(Exception):  # Ray has ended, and the group with it
                remove_placement_group(group)

    def _start_actor(self, address: tuple[str, int], key: bytes, spec: RankSpec) -> RayProcess:
        group, number = self._take_bundle()
        with ExitStack() as failed:
            failed.callback(self._give_back, group, number)
            scheduling = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            options = {"num_cpus": self._cpus, "num_gpus": self._gpus, "max_restarts": 0}
            actor = ray.remote(RankActor).options(scheduling_strategy=scheduling, **options).remote()
            failed.callback(ray.kill, actor)
            served = actor.serve.remote(address, key, spec)
            try:
                process = RayProcess(actor, served, partial(self._give_back, group, number))
            except (OSError, RuntimeError) as error:  # no descriptors or threads are left
                raise StateError(f"rank {spec.name!r} cannot be started now: {error}") from error
            failed.pop_all()
        with self._lock:
            if not self._closed:
                self._processes.append(process)
                return process
        process.close()
        raise StateError(CLOSED)

    def _await(self, came: SimpleQueue[SocketConnection], process: RayProcess, name: str) -> SocketConnection:
        """Return the connection of an actor. Raises `StateError` if it ends before it connects."""
        until_s = time.monotonic() + self._start_timeout_s
        while time.monotonic() < until_s:
            with suppress(Empty):
                return came.get(timeout=0.1)
            if (ended := process.wait(0)) is not None:
                raise StateError(f"rank {name!r} did not start: {ended.reason}")
        raise StateError(
            f"rank {name!r} did not connect to {self._host} within {self._start_timeout_s:.0f} s; where Ray has other "
            "hosts, give RayLauncher(host=) an address of this one that they reach"
        )

    def _take_bundle(self) -> tuple[Any, int]:
        """Return a bundle that no rank has, of a new group if need be. Raises `StateError` where there is no room."""
        with self._placing:
            if not ray.is_initialized():
                _join_ray()
            with self._lock:
                if self._closed:
                    raise StateError(CLOSED)
                if self._free:
                    return self._free.pop()
                count = 1 if self._groups else self._first
            return self._new_group(count), 0

    def _new_group(self, count: int) -> Any:
        """Return a new group of so many bundles, all free but for the first one. Raises `StateError`."""
        group = placement_group([self._bundle] * count, strategy=self._strategy)
        with ExitStack() as failed:
            failed.callback(remove_placement_group, group)
            if not group.wait(self._room_s):
                has = ray.available_resources()
                raise StateError(f"Ray has no room for {count} times {self._bundle}; it has {has}")
            with self._lock:
                if self._closed:
                    raise StateError(CLOSED)
                self._groups.append(group)
                self._free += [(group, number) for number in range(1, count)]
            failed.pop_all()
        return group

    def _give_back(self, group: Any, number: int) -> None:
        with self._lock:
            self._processes = [process for process in self._processes if process.open]
            if not self._closed:
                self._free.append((group, number))
