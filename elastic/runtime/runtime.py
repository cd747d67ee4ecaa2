"""The runtime of a wrapped model: plan, check, prepare, commit, record. Reached as `model.elastic`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any, Literal, overload

from elastic.actions.agreement import Agreement
from elastic.actions.event_log import EventLog
from elastic.actions.executor import ActionExecutor, ActionOutcome, ActionTiming
from elastic.actions.results import merge_changes
from elastic.config import SLO
from elastic.controller.loop import Controller, ControllerHealth
from elastic.controller.sensors.monitor import Monitor
from elastic.controller.sensors.request_metrics import RequestMetrics
from elastic.controller.snapshot import Snapshot
from elastic.errors import ConfigError, StateError
from elastic.hooks.forward_state import ShardTiming
from elastic.hooks.request_tracking import CacheRequestTracker
from elastic.kvcache.api import KV
from elastic.memory.backends.streams import require_no_capture
from elastic.memory.host_store import host
from elastic.runtime import lifecycle
from elastic.runtime.parts import ModelParts
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

ON_LAYERS = Release | Swap | Restore | Migrate | Replicate | Evict
Layers = int | str | Iterable[int | str]
"""Decoder layers by index or module name."""
Done = Change | Future[tuple[Change, ...]]


class RuntimeState(Enum):
    NEW = "new"
    RUNNING = "running"
    CLOSED = "closed"


class Runtime:
    """Everything that changes a wrapped model goes through here. Thread-safe.

    Actions run one after another on a worker thread. It prepares them beside running forward passes and commits them
    between two (law 6), all actions of one call together or none (law 5).
    """

    def __init__(self, parts: ModelParts, agreement: Agreement | None = None) -> None:
        self.state = RuntimeState.NEW
        self.kv = KV(parts.kv, self)
        self.forward = parts.forward
        """What the layers do beside computing: set by actions, at safe points."""
        self.counters = RequestMetrics()
        """What requests experience: told by the hooks, or by an engine that said `observe(False)` first."""
        self.generations = CacheRequestTracker()
        self.generations.observer = self.counters
        self.monitor: Monitor
        """What `snapshot` reads; set by `connect`, as are the two below."""
        self.controller: Controller | None = None
        """None with `policy="manual"`."""
        self.slo: SLO | None = None
        self._weights, self._places, self._gate = parts.weights, parts.pools, parts.gate
        self._log = EventLog()
        self.event_listeners = self._log.listeners
        self._executor = ActionExecutor(parts.gate, parts.handlers, self._log.record, agreement or Agreement())
        self._occupied: list[str] = []
        self._pid = os.getpid()

    # -- what there is

    def status(self) -> Status:
        """Return places with their ledgers, the KV cache, and where the layers are, as they are now."""
        return Status(
            layers=len(self._weights.layers),
            places=tuple(pool.status() for pool in self._places),
            kv=self.kv.memory.status(),
            residencies=self._weights.residencies(),
            host=host.status(),
            events=len(self._log),
        )

    @property
    def at_home(self) -> tuple[int, ...]:
        """The decoder layers that `wrap` left at their place: what `restore()` restores."""
        return self._weights.initially_resident

    @property
    def replicated(self) -> tuple[int, ...]:
        """The decoder layers that have replicas now."""
        return tuple(sorted(self._weights.replicas))

    def form(self) -> tuple[str, ...]:
        """Return the variant that each decoder layer is in; `absent` for a released one."""
        return self._weights.form()

    def events(self) -> tuple[Event, ...]:
        """Return the last actions, oldest first; a bounded ring."""
        return self._log.last()

    def passes(self) -> tuple[tuple[ShardTiming, ...], ...]:
        """Return when the places computed their rows in the last passes through replicated layers, oldest first."""
        return self.forward.dispatcher.passes() if self.forward.dispatcher is not None else ()

    def snapshot(self) -> Snapshot:
        """Return what a policy sees now."""
        self._require_running()
        return self.monitor.read()

    def health(self) -> ControllerHealth:
        """Return whether the controller runs, what it last decided and why, what went wrong, and what it costs."""
        return self.controller.health() if self.controller else ControllerHealth(last_reason="policy='manual'")

    @property
    def busy(self) -> bool:
        """Whether actions that were asked for are under way or deferred."""
        return self._executor.busy

    @property
    def closed(self) -> bool:
        """Whether the model was unwrapped, or is gone."""
        return self.state is RuntimeState.CLOSED

    @property
    def in_forked_child(self) -> bool:
        """Whether this process is a fork of the one that wrapped the model: its pages are not ours to touch."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Recount every ledger between two forward passes. Raises `IntegrityError` with both sides of what differs."""
        self._require_running()
        with self._gate.exclusive():
            self.kv.memory.check()
            for pool in self._places:
                with pool.mapping_lock:
                    pool.check()

    # -- actions

    def plan(self, actions: Action | Sequence[Action], *, dry_run: bool = True) -> tuple[PlanStep, ...]:
        """Return what actions would do. With `dry_run=False` they are done too, after all of them were checked.

        Raises `ConfigError` or `CapacityError` if one cannot be done at all.
        """
        self._require_running()
        actions = (actions,) if isinstance(actions, Action) else tuple(actions)
        steps = [self._executor.handler(action).dry_run(action) for action in actions]
        steps = [replace(step, pause_ms=self._log.last_pause_ms(type(step.action))) for step in steps]
        if not dry_run:
            self.apply(actions)
        return tuple(steps)

    def apply(self, actions: Sequence[Action], *, why: str = "by hand", wait: bool = True) -> Any:
        """Do actions, all or none. Returns their results in order, or with `wait=False` a future of them.

        They are prepared together and committed together, so one call moves a layer once: else `ConfigError`. Waiting
        inside a forward pass of the same thread is a `StateError`, as is any call while it captures a CUDA graph.
        """
        self._require_possible(actions)
        if wait and self._gate.inside:
            raise StateError("an action cannot be awaited inside a forward pass; call it with wait=False")
        results = self._executor.submit(actions, why)
        if not wait:
            return results
        try:
            return results.result()
        finally:
            del results  # an error knows this frame: it must not know the error, or both live until collected

    def request(self, actions: Sequence[Action], why: str) -> Any:
        """Have actions done that nobody waits for, on all ranks of the model. Returns a future, or None."""
        self._require_possible(actions)
        return self._executor.request(actions, why)

    def _change(self, actions: Sequence[Action], wait: bool) -> Done:
        results = self.apply(actions, wait=wait)
        return results if isinstance(results, Future) else merge_changes(results)

    @overload
    def release(self, layers: Layers, *, wait: Literal[True] = True) -> Change: ...
    @overload
    def release(self, layers: Layers, *, wait: Literal[False]) -> Future[tuple[Change, ...]]: ...

    def release(self, layers: Layers, *, wait: bool = True) -> Done:
        """Have the weights of decoder layers leave their place, for host memory; their pages are KV capacity then.

        `layers` are indices or module names, one or several. A released layer that is called is streamed back for the
        time of the call, so the model goes on working, slower. Raises `ConfigError` for what is no layer, and
        `CapacityError` if host memory is short or there is no room for a stage. With `wait=False`, a future.
        """
        return self._change((Release(self._weights.layer_indices(layers)),), wait)

    @overload
    def restore(self, layers: Layers | None = None, *, wait: Literal[True] = True) -> Change: ...
    @overload
    def restore(self, layers: Layers | None = None, *, wait: Literal[False]) -> Future[tuple[Change, ...]]: ...

    def restore(self, layers: Layers | None = None, *, wait: bool = True) -> Done:
        """Have the full weights of decoder layers at their place again, bit for bit. None: all that `wrap` left there.

        `layers` are indices or module names; also of modules inside a layer, where parts of it were swapped.
        The KV cache gives up free pages, idle caches, and caches at rest (to the host), never what a running one holds:
        then the answer is `deferred`, new caches do not get these pages, and the layers return as pages come free.
        Raises `ConfigError` for what is no layer, and `CapacityError` for more layers than the place has room for.
        """
        by_parts = self._weights.find_parts(self._weights.initially_resident if layers is None else layers)
        return self._change([Restore(indices, parts) for parts, indices in by_parts.items()], wait)

    @overload
    def swap(self, layers: Layers, variant: str, *, wait: Literal[True] = True) -> Change: ...
    @overload
    def swap(self, layers: Layers, variant: str, *, wait: Literal[False]) -> Future[tuple[Change, ...]]: ...

    def swap(self, layers: Layers, variant: str, *, wait: bool = True) -> Done:
        """Have decoder layers at their place in a variant that `wrap` was asked for, such as `"int4"`.

        `layers` are indices or module names, also of modules inside a layer (`"model.layers.3.mlp"`). It goes from any
        variant to any other, and from host memory; the KV cache and all generations go on, and what the layers no
        longer need is KV capacity. Where pages are short, layers go one after another through a reserve; those that
        find none are `deferred`, as by `restore`. The full weights stay in host memory. Raises `ConfigError` for what
        is no layer or no variant. With `wait=False`, a future. (MorphServe, section 3.3.)
        """
        by_parts = self._weights.find_parts(layers)
        return self._change([Swap(indices, variant, parts) for parts, indices in by_parts.items()], wait)

    @overload
    def migrate(self, target: Layers, place: str, *, kv: bool = True, wait: Literal[True] = True) -> Change: ...
    @overload
    def migrate(
        self, target: Layers, place: str, *, kv: bool = True, wait: Literal[False]
    ) -> Future[tuple[Change, ...]]: ...

    def migrate(self, target: Layers, place: str, *, kv: bool = True, wait: bool = True) -> Done:
        """Have decoder layers, or modules of them, at another place that `wrap` opened.

        `target` are indices or module names, down to a projection (`"model.layers.5.self_attn.q_proj"`). They move in
        the variant that they are in while the model goes on generating; the pages that they leave are KV capacity. A
        module that comes to its layer's own place is part of the layer again. On another device, what they are given
        travels to them, and results back when they are needed; a layer of which only norms and biases would stay goes
        as a whole. The KV cache of whole layers goes with them, unless `kv=False`; that of modules stays. Raises
        `ConfigError` for what is no layer or no place, and for a layer with shared parameters or adapters that is to go
        to another device; `CapacityError` where the place has no room; `StateError` for a layer whose swap is deferred,
        or whose cache a continuous batching engine uses. With `wait=False`, a future. (CoCoServe, section 3.3)
        """
        by_parts = self._weights.find_parts(target)
        actions: list[Action] = [Migrate(indices, place, parts) for parts, indices in by_parts.items()]
        if kv and () in by_parts:
            actions.append(MigrateKV(by_parts[()], place))
        return self._change(actions, wait)

    @overload
    def migrate_kv(self, layers: Layers, place: str, *, wait: Literal[True] = True) -> Change: ...
    @overload
    def migrate_kv(self, layers: Layers, place: str, *, wait: Literal[False]) -> Future[tuple[Change, ...]]: ...

    def migrate_kv(self, layers: Layers, place: str, *, wait: bool = True) -> Done:
        """Have the KV cache of decoder layers at another place, that of running generations too; weights stay.

        On another device, attention goes there or fetches what it needs, whichever moves fewer bytes. Errors are those
        of `migrate`. With `wait=False`, a future. (CoCoServe, section 3.3)
        """
        return self._change((MigrateKV(self._weights.layer_indices(layers), place),), wait)

    @overload
    def replicate(self, layers: Layers, place: str, *, wait: Literal[True] = True) -> Change: ...
    @overload
    def replicate(self, layers: Layers, place: str, *, wait: Literal[False]) -> Future[tuple[Change, ...]]: ...

    def replicate(self, layers: Layers, place: str, *, wait: bool = True) -> Done:
        """Have decoder layers at one more place, which computes a part of the rows of each batch from then on.

        Rows are scattered where consecutive layers with the same replicas begin and gathered where they end; each place
        gets as many as it has been fast, and keeps the KV cache of those. Running generations go on, their rows' KV
        moving with them. Under an engine requests are shared out instead, and their KV stays where it is. A layer with
        replicas is not swapped, released or migrated before they are evicted. Raises `ConfigError` for what is no layer
        or no place, `CapacityError` where the place has no room, `StateError` for a layer that is there itself, or is
        released. With `wait=False`, a future. (CoCoServe, section 3.2)
        """
        return self._change((Replicate(self._weights.layer_indices(layers), place),), wait)

    @overload
    def evict(self, layers: Layers, place: str, *, wait: Literal[True] = True) -> Change: ...
    @overload
    def evict(self, layers: Layers, place: str, *, wait: Literal[False]) -> Future[tuple[Change, ...]]: ...

    def evict(self, layers: Layers, place: str, *, wait: bool = True) -> Done:
        """Undo `replicate`: the replicas of decoder layers leave a place, and their pages are KV capacity there.

        KV rows that were there return with the next token of their generation; where they find no room they stay, and
        the generation goes on, slower. Raises `ConfigError` for what is no layer or no place, `StateError` for a layer
        without a replica there. With `wait=False`, a future.
        """
        return self._change((Evict(self._weights.layer_indices(layers), place),), wait)

    # -- for engines, and for what the model is connected to

    def observe(self, generations: bool) -> None:
        """Set whether the hooks count generations into `counters`. An engine that counts its requests says False."""
        self.generations.observer = self.counters if generations else None

    def occupy(self, by: str) -> Callable[[], None]:
        """Refuse to be unwrapped, with these words, until the returned function is called."""
        self._occupied.append(by)
        return partial(self._occupied.remove, by)

    def pages_came_free(self) -> None:
        """Try deferred actions again. Called under the mapping lock of a place, so it only queues a job."""
        if self.state is RuntimeState.RUNNING:
            self._executor.retry()

    def resize_settled(self, place: str, result: Resize) -> None:
        """Record a deferred resize that is over. Called under the lock of the KV pool, so it takes none."""
        action = ResizeKV(place, result.limit_bytes, result.revision)
        self._log.record(ActionOutcome(action, "caches ended", ActionTiming(), result), "applied after being deferred")

    # -- from beginning to end

    def start(self, *, controlled: bool = True) -> None:
        """Start the worker, and with `controlled` the controller, if there is one."""
        self.state = RuntimeState.RUNNING
        lifecycle.running.add(self)
        self._executor.start()
        if self.controller and controlled:
            self.controller.start()

    def close(self, timeout_s: float | None = None) -> None:
        """Finish the actions that were asked for and take no more. Can be called twice."""
        if self.closed:
            return
        if self.controller:
            self.controller.stop(timeout_s)
        self.state = RuntimeState.CLOSED
        if not self.in_forked_child:
            self._executor.close(timeout_s)

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

    def refuse(self, reason: str) -> None:
        """Let no forward pass begin any more."""
        self._gate.refusal = reason

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return nothing: a copy of a wrapped model is not wrapped."""

    def __reduce__(self) -> tuple[Any, ...]:
        return lifecycle.nothing, ()

    def _require_possible(self, actions: Sequence[Action]) -> None:
        self._require_running()
        require_no_capture("weights and caches cannot be moved or resized")
        for kind in (ON_LAYERS, MigrateKV):
            layers = [layer for action in actions if isinstance(action, kind) for layer in action.layers]
            if twice := sorted({layer for layer in layers if layers.count(layer) > 1}):
                raise ConfigError(f"one call would move layers {twice} twice; make two calls of it")

    def _require_running(self) -> None:
        if self.in_forked_child:
            raise StateError("this model was wrapped before the process forked; wrap it again in the child")
        if self.state is not RuntimeState.RUNNING:
            raise StateError("the model was unwrapped; wrap it again")


def runtime(model: Any) -> Runtime:
    """Return the runtime of a wrapped model, also `model.elastic`. Raises `StateError` for one that is not wrapped."""
    attached = getattr(model, "elastic", None)
    if not isinstance(attached, Runtime):
        raise StateError(f"{type(model).__name__} is not wrapped; call elastic.wrap(model) first")
    return attached
