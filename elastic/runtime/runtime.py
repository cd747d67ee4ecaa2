"""The runtime of a wrapped model: plan, check, prepare, commit, record. Reached as `model.elastic`."""

from __future__ import annotations

import atexit
import itertools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any, Literal, overload

from elastic.actions.base import ActionHandler
from elastic.actions.executor import ActionExecutor, ActionOutcome, ActionTiming
from elastic.actions.results import together
from elastic.config import SLO
from elastic.controller.loop import Controller, ControllerHealth
from elastic.controller.sensors.monitor import Monitor
from elastic.controller.sensors.request_metrics import RequestMetrics
from elastic.controller.snapshot import Snapshot
from elastic.errors import ConfigError, StateError
from elastic.hooks.forward_gate import ForwardGate
from elastic.hooks.forward_state import ForwardState
from elastic.hooks.request_tracking import CacheRequestTracker
from elastic.kvcache.api import KV
from elastic.memory.host_store import host
from elastic.memory.page_pool import PagePool
from elastic.runtime.acting import Layers
from elastic.runtime.migration import Migrating
from elastic.runtime.replication import Replicating
from elastic.types import (
    Action,
    Change,
    Event,
    Evict,
    Migrate,
    MigrateKV,
    PlanStep,
    Release,
    Replicate,
    Resize,
    ResizeKV,
    Restore,
    Status,
    Swap,
)
from elastic.weights.model import ModelWeights

EVENTS_KEPT = 1000
ON_LAYERS = Release | Swap | Restore | Migrate | Replicate | Evict
_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()


class RuntimeState(Enum):
    NEW = "new"
    RUNNING = "running"
    CLOSED = "closed"


class Runtime(Migrating, Replicating):
    """Everything that changes a wrapped model goes through here. Thread-safe.

    Actions run one after another on a worker thread. It prepares them beside running forward passes and commits them
    between two (law 6), all actions of one call together or none (law 5).
    """

    def __init__(
        self,
        gate: ForwardGate,
        kv: Callable[[Runtime], KV],
        weights: ModelWeights,
        forward: ForwardState,
        places: Sequence[PagePool],
        mechanisms: Mapping[type, ActionHandler],
    ) -> None:
        self.state = RuntimeState.NEW
        self.kv = kv(self)
        self._gate = gate
        self._weights = weights
        self.forward = forward
        """What the layers do beside computing: set by actions, at safe points."""
        self._places = tuple(places)
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._event_ids = itertools.count()
        self._worker = ActionExecutor(gate, mechanisms, self._record)
        self._occupied: list[str] = []
        self.counters = RequestMetrics()
        """What requests experience: told by the hooks, or by an engine that said `observe(False)` first."""
        self.generations = CacheRequestTracker()
        self.generations.observer = self.counters
        self.monitor: Monitor
        """What `snapshot` reads."""
        self.controller: Controller | None = None
        """None with `policy="manual"`."""
        self.slo: SLO | None = None
        self._pid = os.getpid()

    # -- public

    def status(self) -> Status:
        """A snapshot: places with their ledgers, the KV cache, where the layers are."""
        return Status(
            layers=len(self._weights.layers),
            places=tuple(pool.status() for pool in self._places),
            kv=self.kv.memory.status(),
            residencies=self._weights.residencies(),
            host=host.status(),
            events=len(self._events),
        )

    @property
    def at_home(self) -> tuple[int, ...]:
        """The decoder layers that `wrap` left at their place: what `restore()` restores."""
        return self._weights.initially_resident

    def events(self) -> tuple[Event, ...]:
        """The last actions, oldest first; a bounded ring."""
        return tuple(self._events)

    def snapshot(self) -> Snapshot:
        """What a policy sees now."""
        self._require_running()
        return self.monitor.read()

    def health(self) -> ControllerHealth:
        """How the controller is: whether it runs, what it last decided and why, what went wrong, what it costs."""
        return self.controller.health() if self.controller else ControllerHealth(last_reason="policy='manual'")

    def observe(self, generations: bool) -> None:
        """Whether the hooks count generations into `counters`. An engine that counts its requests itself says False."""
        self.generations.observer = self.counters if generations else None

    @property
    def busy(self) -> bool:
        """Whether actions that were asked for are under way or deferred."""
        return self._worker.busy

    @property
    def closed(self) -> bool:
        """Whether the model was unwrapped, or is gone."""
        return self.state is RuntimeState.CLOSED

    def check(self) -> None:
        """Recount every ledger between two forward passes. Raises `IntegrityError` with both sides of what differs."""
        self._require_running()
        with self._gate.exclusive():
            self.kv.memory.check()
            for pool in self._places:
                with pool.mapping_lock:
                    pool.check()

    def plan(self, actions: Action | Sequence[Action], *, dry_run: bool = True) -> tuple[PlanStep, ...]:
        """What actions would do. With `dry_run=False` they are done too, after all of them were checked.

        Raises `ConfigError` or `CapacityError` if one cannot be done at all.
        """
        self._require_running()
        actions = (actions,) if isinstance(actions, Action) else tuple(actions)
        steps = [self._worker.mechanism(action).dry_run(action) for action in actions]
        steps = [replace(step, pause_ms=self._last_pause_ms(type(step.action))) for step in steps]
        if not dry_run:
            self.apply(actions)
        return tuple(steps)

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
        done = self.apply((Release(self._weights.layer_indices(layers)),), wait=wait)
        return done if isinstance(done, Future) else done[0]

    @overload
    def restore(self, layers: Layers | None = None, *, wait: Literal[True] = True) -> Change: ...

    @overload
    def restore(self, layers: Layers | None = None, *, wait: Literal[False]) -> Future[tuple[Change, ...]]: ...

    def restore(self, layers: Layers | None = None, *, wait: bool = True) -> Change | Future[tuple[Change, ...]]:
        """Have the full weights of decoder layers at their place again, bit for bit. None: all that `wrap` left there.

        `layers` are indices or module names; also of modules inside a layer, where parts of it were swapped.
        The KV cache gives up free pages, idle caches, and caches at rest (to the host), never what a running one holds:
        then the answer is `deferred`, new caches do not get these pages, and the layers return as pages come free.
        Raises `ConfigError` for what is no layer, and `CapacityError` for more layers than the place has room for.
        """
        found = self._weights.find_parts(self._weights.initially_resident if layers is None else layers)
        done = self.apply([Restore(indices, parts) for parts, indices in found.items()], wait=wait)
        return done if isinstance(done, Future) else together(done)

    @overload
    def swap(self, layers: Layers, variant: str, *, wait: Literal[True] = True) -> Change: ...

    @overload
    def swap(self, layers: Layers, variant: str, *, wait: Literal[False]) -> Future[tuple[Change, ...]]: ...

    def swap(self, layers: Layers, variant: str, *, wait: bool = True) -> Change | Future[tuple[Change, ...]]:
        """Have decoder layers at their place in a variant that `wrap` was asked for, such as `"int4"`.

        `layers` are indices or module names, also of modules inside a layer (`"model.layers.3.mlp"`). It goes from any
        variant to any other, and from host memory; the KV cache and all generations go on, and what the layers no
        longer need is KV capacity. Where pages are short, layers go one after another through a reserve; those that
        find none are `deferred`, as by `restore`. The full weights stay in host memory. Raises `ConfigError` for what
        is no layer or no variant. With `wait=False`, a future. (MorphServe, section 3.3.)
        """
        found = self._weights.find_parts(layers)
        done = self.apply([Swap(indices, variant, parts) for parts, indices in found.items()], wait=wait)
        return done if isinstance(done, Future) else together(done)

    def apply(self, actions: Sequence[Action], *, why: str = "by hand", wait: bool = True) -> Any:
        """Do actions, all or none. Returns their results in order, or with `wait=False` a future of them.

        They are prepared together and committed together, so one call moves a layer once: else `ConfigError`. Waiting
        inside a forward pass of the same thread is a `StateError`.
        """
        self._require_running()
        _require_once(a.layers for a in actions if isinstance(a, ON_LAYERS))
        _require_once(a.layers for a in actions if isinstance(a, MigrateKV))
        if wait and self._gate.inside:
            raise StateError("an action cannot be awaited inside a forward pass; call it with wait=False")
        done = self._worker.put(actions, why)
        if not wait:
            return done
        try:
            return done.result()
        finally:
            del done  # an error knows this frame: it must not know the error, or both live until garbage is collected

    def pages_came_free(self) -> None:
        """Try deferred actions again. Called under the tenants' lock of a place, so it only leaves a note."""
        if self.state is RuntimeState.RUNNING:
            self._worker.retry()

    def form(self) -> tuple[str, ...]:
        """The variant that each decoder layer is in; `absent` for a released one."""
        return self._weights.form()

    def occupy(self, by: str) -> Callable[[], None]:
        """Refuse to be unwrapped, with these words, until the returned function is called."""
        self._occupied.append(by)
        return partial(self._occupied.remove, by)

    def start(self, *, controlled: bool = True) -> None:
        """Start the worker, and with `controlled` the controller, if there is one."""
        self.state = RuntimeState.RUNNING
        _runtimes.add(self)
        self._worker.start()
        if self.controller and controlled:
            self.controller.start()

    def close(self, timeout_s: float | None = None) -> None:
        """Finish the actions that were asked for and take no more. Can be called twice."""
        if self.closed:
            return
        if self.controller:
            self.controller.stop(timeout_s)
        self.state = RuntimeState.CLOSED
        if os.getpid() == self._pid:
            self._worker.close(timeout_s)

    @contextmanager
    def last_safe_point(self) -> Iterator[None]:
        """Finish the actions that were asked for; then hold forward passes while the model is unwrapped."""
        if self._gate.inside:
            raise StateError("a model cannot be unwrapped inside one of its forward passes")
        if self._occupied:
            raise StateError(f"the model is in use by {self._occupied[0]}")
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
        self._record(ActionOutcome(action, "caches ended", ActionTiming(), result), "applied after being deferred")

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a wrapped model is not wrapped."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive_unwrapped, ()

    def _last_pause_ms(self, kind: type) -> float:
        pauses = (e.pause_ms for e in reversed(self.events()) if e.pause_ms and isinstance(e.action, kind))
        return next(pauses, 0.0)

    def _record(self, outcome: ActionOutcome, words: str = "") -> None:
        result, timing = outcome.result, outcome.timing
        event = Event(
            id=next(self._event_ids),
            action=outcome.action,
            when_s=time.time(),
            why=outcome.why,
            moved_bytes=result.moved_bytes if result else 0,
            released_bytes=result.released_bytes if result else 0,
            prepare_ms=timing.prepare_ms,
            wait_ms=timing.wait_ms,
            pause_ms=timing.pause_ms,
            ok=result is not None,
            outcome=words or (result.status if result else outcome.error),
        )
        self._events.append(event)

    def _require_running(self) -> None:
        if self.in_forked_child:
            raise StateError("this model was wrapped before the process forked; wrap it again in the child")
        if self.state is not RuntimeState.RUNNING:
            raise StateError("the model was unwrapped; wrap it again")


def runtime(model: Any) -> Runtime:
    """The runtime of a wrapped model; also `model.elastic`. Raises `StateError` for one that is not wrapped."""
    found = getattr(model, "elastic", None)
    if not isinstance(found, Runtime):
        raise StateError(f"{type(model).__name__} is not wrapped; call elastic.wrap(model) first")
    return found


def _require_once(moved: Iterable[tuple[int, ...]]) -> None:
    layers = list(itertools.chain.from_iterable(moved))
    if twice := sorted({layer for layer in layers if layers.count(layer) > 1}):
        raise ConfigError(f"one call would move layers {twice} twice; make two calls of it")


def _arrive_unwrapped() -> None:
    """What a runtime becomes in a pickled copy of its model: nothing."""


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
