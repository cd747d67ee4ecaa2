"""The runtime of a wrapped model: plan, check, prepare, commit, record. Reached as `model.elastic`."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from queue import SimpleQueue
from typing import Any, Literal, Protocol, overload

from elastic.errors import ConfigError, StateError
from elastic.hooks.gate import Gate
from elastic.hooks.weights import ModelWeights
from elastic.kvcache.control import KV
from elastic.memory.host import host
from elastic.memory.pool import PagePool
from elastic.types import Action, Change, Event, PlanStep, Release, Resize, ResizeKV, Restore, Result, Status

Layers = int | str | Iterable[int | str]
EVENTS_KEPT = 1000
RETRY = "pages came free"
_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()


class RuntimeState(Enum):
    NEW = "new"
    RUNNING = "running"
    CLOSED = "closed"


class Mechanism(Protocol):
    """One kind of action. What `prepare` returns goes through `commit`, and `rollback` or `finish`."""

    def foresee(self, action: Any) -> PlanStep:
        """What the action would do now. Raises if it cannot be done at all."""
        ...

    def prepare(self, action: Any) -> Any:
        """Check, and do what can be done beside forward passes. On an error nothing is held."""
        ...

    def commit(self, prepared: Any) -> None:
        """Flip, at the safe point."""
        ...

    def rollback(self, prepared: Any) -> None:
        """Undo `prepare`, and `commit` if it was reached; at the safe point."""
        ...

    def finish(self, prepared: Any) -> Any:
        """After the safe point: give back what is no longer needed; the result."""
        ...

    def pending(self) -> Action | None:
        """An action that was deferred, to be tried again when pages have come free."""
        ...


class Runtime:
    """Everything that changes a wrapped model goes through here. Thread-safe.

    Actions run one after another on a worker thread. It prepares them beside running forward passes and commits them
    between two (law 6), all actions of one call together or none (law 5).
    """

    def __init__(
        self,
        gate: Gate,
        kv: Callable[[Runtime], KV],
        weights: ModelWeights,
        places: Sequence[PagePool],
        mechanisms: Mapping[type, Mechanism],
    ) -> None:
        self.state = RuntimeState.NEW
        self.kv = kv(self)
        self._gate = gate
        self._weights = weights
        self._places = tuple(places)
        self._mechanisms = dict(mechanisms)
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._event_ids = itertools.count()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._retrying = False
        self._worker = threading.Thread(target=self._work, name="elastic-runtime", daemon=True)
        self._pid = os.getpid()

    # -- public

    def status(self) -> Status:
        """A snapshot: places with their ledgers, the KV cache, where the layers are."""
        return Status(
            layers=len(self._weights.layers),
            places=tuple(pool.status() for pool in self._places),
            kv=tuple(pool.status() for pool in self.kv.memory.pools),
            residencies=self._weights.residencies(),
            host=host.status(),
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
        steps = tuple(replace(self._for(a).foresee(a), pause_ms=self._last_pause_ms(type(a))) for a in actions)
        if not dry_run:
            self.apply(actions)
        return steps

    @overload
    def release(self, layers: Layers, *, wait: Literal[True] = True) -> Change: ...

    @overload
    def release(self, layers: Layers, *, wait: Literal[False]) -> Future[tuple[Change]]: ...

    def release(self, layers: Layers, *, wait: bool = True) -> Change | Future[tuple[Change]]:
        """Have the weights of decoder layers leave their place, for host memory; their pages are KV capacity then.

        `layers` are indices or module names, one or several. A released layer that is called is streamed back for the
        time of the call, so the model goes on working, slower. Raises `ConfigError` for what is no layer, and
        `CapacityError` if host memory is short or there is no room for a stage. With `wait=False`, a future.
        """
        done = self.apply((Release(self._weights.find(layers)),), wait=wait)
        return done if isinstance(done, Future) else done[0]

    @overload
    def restore(self, layers: Layers | None = None, *, wait: Literal[True] = True) -> Change: ...

    @overload
    def restore(self, layers: Layers | None = None, *, wait: Literal[False]) -> Future[tuple[Change]]: ...

    def restore(self, layers: Layers | None = None, *, wait: bool = True) -> Change | Future[tuple[Change]]:
        """Have the weights of decoder layers at their place again, bit for bit. None: all that `wrap` left there.

        The KV cache gives up free pages, idle caches, and caches at rest (to the host), never what a running one holds:
        then the answer is `deferred`, new caches do not get these pages, and the layers return as pages come free.
        Raises `ConfigError` for what is no layer, and `CapacityError` for more layers than the place has room for.
        """
        found = self._weights.find(self._weights.at_home if layers is None else layers)
        done = self.apply((Restore(found),), wait=wait)
        return done if isinstance(done, Future) else done[0]

    def apply(self, actions: Sequence[Action], *, why: str = "by hand", wait: bool = True) -> Any:
        """Do actions, all or none. Returns their results in order, or with `wait=False` a future of them.

        They are prepared together and committed together, so one call moves a layer once: else `ConfigError`. Waiting
        inside a forward pass of the same thread is a `StateError`.
        """
        self._require_running()
        _require_once([layer for a in actions if isinstance(a, Release | Restore) for layer in a.layers])
        if wait and self._gate.inside:
            raise StateError("an action cannot be awaited inside a forward pass; call it with wait=False")
        job = _Job(tuple(actions), why)
        self._jobs.put(job)
        done = job.done
        del job
        if not wait:
            return done
        try:
            return done.result()
        finally:
            del done  # an error knows this frame: it must not know the error, or both live until garbage is collected

    def pages_came_free(self) -> None:
        """Try deferred actions again. Called under the tenants' lock of a place, so it only leaves a note."""
        if self.state is RuntimeState.RUNNING and not self._retrying and self._pending():
            self._retrying = True
            self._jobs.put(_Job((), RETRY))

    def start(self) -> None:
        """Start the worker."""
        self.state = RuntimeState.RUNNING
        _runtimes.add(self)
        self._worker.start()

    def close(self, timeout_s: float | None = None) -> None:
        """Finish the actions that were asked for and take no more. Can be called twice."""
        if self.state is RuntimeState.CLOSED:
            return
        self.state = RuntimeState.CLOSED
        if os.getpid() == self._pid:
            self._jobs.put(None)
            self._worker.join(timeout_s)

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
        return _arrive_unwrapped, ()

    # -- the worker

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.done.set_result(self._run(job.actions, job.why))
            except BaseException as error:  # handed to whoever waits for the result
                job.done.set_exception(error)
            del job

    def _run(self, actions: tuple[Action, ...], why: str) -> tuple[Result, ...]:
        if why == RETRY:
            self._retrying = False
            actions = self._pending()
        timing = Timing()
        try:
            prepared = self._prepare(actions, timing)
            self._commit(prepared, timing)
        except Exception as error:  # whatever it is: the record has it, and who asked gets it
            for action in actions:
                self._record(action, why, timing, False, str(error))
            raise
        results = tuple(mechanism.finish(one) for mechanism, one in prepared)
        for action, result in zip(actions, results, strict=True):
            if why != RETRY or result.layers:
                self._record(action, why, timing, True, result.status, result.released_bytes, _moved(result))
        return results

    def _prepare(self, actions: Sequence[Action], timing: Timing) -> list[tuple[Mechanism, Any]]:
        start = time.perf_counter()
        prepared: list[tuple[Mechanism, Any]] = []
        try:
            for action in actions:
                prepared.append((self._for(action), self._for(action).prepare(action)))
        except BaseException:
            with self._gate.exclusive():
                self._roll_back(prepared)
            raise
        timing.prepare_ms = (time.perf_counter() - start) * 1e3
        return prepared

    def _commit(self, prepared: Sequence[tuple[Mechanism, Any]], timing: Timing) -> None:
        with self._gate.exclusive() as waited_s:
            timing.wait_ms = waited_s * 1e3
            start = time.perf_counter()
            try:
                for mechanism, one in prepared:
                    mechanism.commit(one)
            except BaseException:
                self._roll_back(prepared)
                raise
            timing.pause_ms = (time.perf_counter() - start) * 1e3

    def _roll_back(self, prepared: Sequence[tuple[Mechanism, Any]]) -> None:
        for mechanism, one in reversed(prepared):
            mechanism.rollback(one)

    def _pending(self) -> tuple[Action, ...]:
        found = (mechanism.pending() for mechanism in self._mechanisms.values())
        return tuple(action for action in found if action is not None)

    def _for(self, action: Action) -> Mechanism:
        if type(action) not in self._mechanisms:
            kinds = ", ".join(kind.__name__ for kind in self._mechanisms)
            raise ConfigError(f"{action!r} is no action of this model; there are {kinds}")
        return self._mechanisms[type(action)]

    def _last_pause_ms(self, kind: type) -> float:
        pauses = (e.pause_ms for e in reversed(self.events()) if e.pause_ms and isinstance(e.action, kind))
        return next(pauses, 0.0)

    def _record(
        self, action: Action, why: str, timing: Timing, ok: bool, outcome: str, released: int = 0, moved: int = 0
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


class _Job:
    def __init__(self, actions: tuple[Action, ...], why: str) -> None:
        self.actions = actions
        self.why = why
        self.done: Future[tuple[Result, ...]] = Future()


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


def _require_once(layers: list[int]) -> None:
    twice = sorted({layer for layer in layers if layers.count(layer) > 1})
    if twice:
        raise ConfigError(f"one call would move layers {twice} twice; make two calls of it")


def _moved(result: Result) -> int:
    return result.moved_bytes


def _arrive_unwrapped() -> None:
    """What a runtime becomes in a pickled copy of its model: nothing; but the copy still names our attention."""
    from elastic.kvcache.attention import register

    register()


def _refuse_in_child() -> None:
    """After a fork: the pages belong to the parent, so no forward pass of a wrapped model may run here."""
    for known in list(_runtimes):
        known.refuse("this model was wrapped before the process forked; call elastic.unwrap(model) and wrap it again")


def _finish() -> None:
    """At exit: a worker that is in torch when the interpreter ends would abort it."""
    for known in list(_runtimes):
        known.close(timeout_s=10)


os.register_at_fork(after_in_child=_refuse_in_child)
atexit.register(_finish)
