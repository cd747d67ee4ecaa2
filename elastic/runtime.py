"""The runtime of a wrapped model: plan, check, prepare, commit, record. Reached as `model.elastic`."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, overload

from elastic.config import parse_bytes
from elastic.errors import StateError
from elastic.hooks.gate import Gate
from elastic.memory.pool import PagePool
from elastic.types import Action, Event, KVStatus, PlanStep, Residency, Resize, ResizeKV, Status

if TYPE_CHECKING:
    from elastic.kvcache.memory import KVMemory
    from elastic.kvcache.resize import PreparedResize, ResizeMechanism

EVENTS_KEPT = 1000
_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()


class RuntimeState(Enum):
    NEW = "new"
    RUNNING = "running"
    CLOSED = "closed"


class Runtime:
    """Everything that changes a wrapped model goes through here. Thread-safe.

    Actions run one after another on a worker thread. It prepares them beside running forward passes and commits them
    between two (law 6), all actions of one call together or none (law 5).
    """

    def __init__(
        self, gate: Gate, memory: KVMemory, places: Sequence[PagePool], residencies: dict[str, tuple[Residency, ...]]
    ) -> None:
        self.state = RuntimeState.NEW
        self.kv = KV(self, memory)
        self._gate = gate
        self._places = tuple(places)
        self._residencies = residencies
        self._mechanism = _mechanism(memory)
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._event_ids = itertools.count()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="elastic-runtime", daemon=True)
        self._pid = os.getpid()

    # -- public

    def status(self) -> Status:
        """A snapshot: places with their ledgers, the KV cache, where the layers are."""
        return Status(
            layers=len(self._residencies),
            places=tuple(pool.status() for pool in self._places),
            kv=tuple(pool.status() for pool in self.kv.memory.pools),
            residencies=dict(self._residencies),
            events=len(self._events),
        )

    def events(self) -> tuple[Event, ...]:
        """The last actions, oldest first; a bounded ring."""
        return tuple(self._events)

    def check(self) -> None:
        """Recount every ledger between two forward passes. Raises `IntegrityError` with both sides of what differs."""
        self._require_running()
        with self._gate.exclusive():
            self.kv.memory.check()
            for pool in self._places:
                with pool.tenants:
                    pool.check()

    def plan(self, actions: Action | Sequence[Action], *, dry_run: bool = True) -> tuple[PlanStep, ...]:
        """What actions would do. With `dry_run=False` they are done too, after all of them were checked.

        Raises `ConfigError` or `CapacityError` if one cannot be done at all.
        """
        self._require_running()
        actions = (actions,) if isinstance(actions, Action) else tuple(actions)
        pause_ms = next((e.pause_ms for e in reversed(self.events()) if e.pause_ms), 0.0)
        steps = tuple(replace(self._mechanism.foresee(action), pause_ms=pause_ms) for action in actions)
        if not dry_run:
            self.apply(actions)
        return steps

    def apply(self, actions: Sequence[Action], *, why: str = "by hand", wait: bool = True) -> Any:
        """Do actions, all or none. Returns their results in order, or with `wait=False` a future of them.

        Waiting inside a forward pass of the same thread is a `StateError`.
        """
        self._require_running()
        if wait and self._gate.inside:
            raise StateError("an action cannot be awaited inside a forward pass; call it with wait=False")
        job = _Job(tuple(actions), why)
        self._jobs.put(job)
        return job.done.result() if wait else job.done

    def start(self) -> None:
        """Start the worker."""
        self.state = RuntimeState.RUNNING
        _runtimes.add(self)
        self._worker.start()

    def close(self) -> None:
        """Finish the actions that were asked for and take no more. Can be called twice."""
        if self.state is RuntimeState.CLOSED:
            return
        self.state = RuntimeState.CLOSED
        if os.getpid() == self._pid:
            self._jobs.put(None)
            self._worker.join()

    @contextmanager
    def last_safe_point(self) -> Iterator[None]:
        """Finish the actions that were asked for; then hold forward passes while the model is unwrapped."""
        if self._gate.inside:
            raise StateError("a model cannot be unwrapped inside one of its forward passes")
        self.close()
        with self._gate.exclusive():
            yield

    @property
    def in_forked_child(self) -> bool:
        """Whether this process is a fork of the one that wrapped the model: its pages are not ours to touch."""
        return os.getpid() != self._pid

    def refuse(self, reason: str) -> None:
        """Let no forward pass begin any more."""
        self._gate.refusal = reason

    def settled(self, place: str, result: Resize) -> None:
        """Record a deferred resize that is over. Called under the lock of the KV pool, so it takes none."""
        action = ResizeKV(place, result.limit_bytes, result.revision)
        self._record(action, "caches ended", Timing(), True, "applied after being deferred", result.released_bytes)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a wrapped model is not wrapped."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()

    # -- the worker

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.done.set_result(self._run(job))
            except BaseException as error:  # handed to whoever waits for the result
                job.done.set_exception(error)
            del job

    def _run(self, job: _Job) -> tuple[Resize, ...]:
        timing = Timing()
        try:
            start = time.perf_counter()
            prepared = [self._mechanism.prepare(action) for action in job.actions]
            timing.prepare_ms = (time.perf_counter() - start) * 1e3
            with self._gate.exclusive() as waited_s:
                timing.wait_ms = waited_s * 1e3
                start = time.perf_counter()
                results = self._commit(prepared)
                timing.pause_ms = (time.perf_counter() - start) * 1e3
        except Exception as error:
            for action in job.actions:
                self._record(action, job.why, timing, False, str(error), 0)
            raise
        for action, result, moved in zip(job.actions, results, (p.moved_bytes for p in prepared), strict=True):
            self._record(action, job.why, timing, True, result.status, result.released_bytes, moved)
        return results

    def _commit(self, prepared: Sequence[PreparedResize]) -> tuple[Resize, ...]:
        done: list[PreparedResize] = []
        try:
            for one in prepared:
                self._mechanism.commit(one)
                done.append(one)
        except BaseException:
            for one in reversed(done):
                self._mechanism.rollback(one)
            raise
        return tuple(self._mechanism.commit(one) for one in prepared)

    def _record(
        self, action: Action, why: str, timing: Timing, ok: bool, outcome: str, released: int, moved: int = 0
    ) -> None:
        event = Event(
            id=next(self._event_ids),
            action=action,
            when_s=time.time(),
            why=why,
            moved_bytes=moved,
            released_bytes=released,
            prepare_ms=timing.prepare_ms,
            wait_ms=timing.wait_ms,
            pause_ms=timing.pause_ms,
            ok=ok,
            outcome=outcome,
        )
        self._events.append(event)

    def _require_running(self) -> None:
        if self.in_forked_child:
            raise StateError("this model was wrapped before the process forked; wrap it again in the child")
        if self.state is not RuntimeState.RUNNING:
            raise StateError("the model was unwrapped; wrap it again")


class KV:
    """The KV cache of a wrapped model: `rt.kv`. Sizes are bytes, summed over the places of the model."""

    def __init__(self, runtime: Runtime, memory: KVMemory) -> None:
        self.memory = memory
        self._runtime = weakref.ref(runtime)

    @property
    def capacity_bytes(self) -> int:
        """What new and running caches may hold together now."""
        return self._sum(lambda status: status.capacity_bytes)

    @property
    def limit_bytes(self) -> int:
        """The limit last set."""
        return self._sum(lambda status: status.limit_bytes)

    @property
    def maximum_bytes(self) -> int:
        """The highest limit: the places' budgets less the model itself."""
        return self._sum(lambda status: status.maximum_bytes)

    @property
    def used_bytes(self) -> int:
        """Mapped for caches that are alive, in whole pages."""
        return self._sum(lambda status: status.used_bytes)

    @overload
    def resize(
        self, size: int | str, *, place: str | None = None, revision: int | None = None, wait: Literal[True] = True
    ) -> Resize: ...

    @overload
    def resize(
        self, size: int | str, *, place: str | None = None, revision: int | None = None, wait: Literal[False]
    ) -> Future[tuple[Resize, ...]]: ...

    def resize(
        self, size: int | str, *, place: str | None = None, revision: int | None = None, wait: bool = True
    ) -> Resize | Future[tuple[Resize, ...]]:
        """Set the most bytes that new caches may hold (docs/design.md).

        `applied`: what lies above the new limit was given back. `deferred`: live caches hold more than the limit; they
        go on, and the rest is given back as they end. `stale`: `revision` is not above the last one; nothing changed.
        On several places the size is shared out in proportion to their maxima. Raises `CapacityError` above the
        maximum, `ConfigError` for what is no size. With `wait=False`, a future of a tuple of results.
        """
        limit = parse_bytes(size, option="kv size")
        actions = self._share(limit, place, revision)
        done = self._require_runtime().apply(actions, wait=wait)
        return done if isinstance(done, Future) else _total(done)

    def trim(self) -> int:
        """Give every page that no living cache needs back to the system; returns bytes."""
        self._require_runtime()
        return sum(pool.trim() for pool in self.memory.pools)

    def _share(self, limit: int, place: str | None, revision: int | None) -> list[ResizeKV]:
        pools = self.memory.pools
        if place is not None or len(pools) == 1:
            return [ResizeKV(place or pools[0].pool.name, limit, revision)]
        maxima = [pool.status().maximum_bytes for pool in pools]
        return [
            ResizeKV(pool.pool.name, limit * maximum // sum(maxima), revision)
            for pool, maximum in zip(pools, maxima, strict=True)
        ]

    def _sum(self, field: Callable[[KVStatus], int]) -> int:
        return sum(field(pool.status()) for pool in self.memory.pools)

    def _require_runtime(self) -> Runtime:
        runtime = self._runtime()
        if runtime is None:
            raise StateError("the model was unwrapped; wrap it again")
        return runtime


class _Job:
    def __init__(self, actions: tuple[Action, ...], why: str) -> None:
        self.actions = actions
        self.why = why
        self.done: Future[tuple[Resize, ...]] = Future()


@dataclass
class Timing:
    """Milliseconds of the stages of one job."""

    prepare_ms: float = 0.0
    wait_ms: float = 0.0
    pause_ms: float = 0.0


def runtime(model: Any) -> Runtime:
    """The runtime of a wrapped model; also `model.elastic`. Raises `StateError` for one that is not wrapped."""
    found = getattr(model, "elastic", None)
    if not isinstance(found, Runtime):
        raise StateError(f"{type(model).__name__} is not wrapped; call elastic.wrap(model) first")
    return found


def _total(results: Sequence[Resize]) -> Resize:
    """One result for what was shared out over several places."""
    order = ("applied", "stale", "deferred")
    return Resize(
        status=max((r.status for r in results), key=order.index),
        limit_bytes=sum(r.limit_bytes for r in results),
        used_bytes=sum(r.used_bytes for r in results),
        overage_bytes=sum(r.overage_bytes for r in results),
        released_bytes=sum(r.released_bytes for r in results),
        revision=max(r.revision for r in results),
    )


def _mechanism(memory: KVMemory) -> ResizeMechanism:
    from elastic.kvcache.resize import ResizeMechanism  # needs transformers, which `import elastic` does not

    return ResizeMechanism(memory)


def _nothing() -> None:
    return None


def _refuse_in_child() -> None:
    """After a fork: the pages belong to the parent, so no forward pass of a wrapped model may run here."""
    for known in list(_runtimes):
        known.refuse("this model was wrapped before the process forked; call elastic.unwrap(model) and wrap it again")


os.register_at_fork(after_in_child=_refuse_in_child)
