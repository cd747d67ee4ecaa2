"""The runtime of a wrapped model: plan, check, prepare, commit, record. Reached as `model.elastic`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from elastic.actions.arguments import listed, well_formed
from elastic.actions.deferred import spare_prefetch_buffers
from elastic.actions.transactions.event_log import ActionLog
from elastic.actions.transactions.executor import ActionExecutor
from elastic.actions.transactions.held import LONGEST_S
from elastic.actions.transactions.transaction import ActionOutcome, ActionTiming, Agreement
from elastic.config import SLO
from elastic.controller.loop import Controller, ControllerHealth
from elastic.controller.sensors.monitor import Monitor
from elastic.controller.sensors.request_metrics import RequestMetrics
from elastic.controller.snapshot import Snapshot
from elastic.errors import ConfigError, StateError, is_number, require, require_flag
from elastic.hooks.forward_state import ShardTiming
from elastic.hooks.request_tracking import CacheRequestTracker
from elastic.kvcache.api import KV
from elastic.memory.backends.rank_memory import Peers
from elastic.memory.backends.streams import require_no_capture
from elastic.memory.host_store import host
from elastic.memory.rate_limit import YieldingPace
from elastic.runtime import lifecycle
from elastic.runtime.lifecycle import Occupation
from elastic.runtime.parts import ModelParts
from elastic.runtime.verbs import Layers, LayerVerbs
from elastic.types import (
    Action,
    Drop,
    Event,
    Evict,
    Fetch,
    Migrate,
    MigrateKV,
    PlanStep,
    Prepared,
    Release,
    Replicate,
    Resize,
    ResizeKV,
    Restore,
    Result,
    Status,
    Swap,
    WeightsSource,
)

ON_LAYERS = Release | Drop | Fetch | Swap | Restore | Migrate | Replicate | Evict
T = TypeVar("T")
PREPARED_S = 60.0
"""For how long actions are held that were prepared, unless it is said."""
LONGEST_ID = 200


class RuntimeState(Enum):
    NEW = "new"
    RUNNING = "running"
    CLOSED = "closed"


class Runtime(LayerVerbs):
    """Everything that changes a wrapped model goes through here. Thread-safe.

    Actions run one after another on a worker thread. It prepares them beside running forward passes and commits them
    between two (law 6), all actions of one call together or none (law 5).
    """

    def __init__(self, parts: ModelParts, agreement: Agreement | None = None) -> None:
        self._log, agreement = ActionLog(), agreement or Agreement()
        super().__init__(parts.weights, ActionExecutor(parts.gate, parts.handlers, self._log.record, agreement))
        self.state = RuntimeState.NEW
        self.kv = KV(parts.kv, self.apply)
        self.forward = parts.forward
        """What the layers do beside computing: set by actions, at safe points."""
        self.counters = RequestMetrics()
        """What requests experience: told by the hooks, or by an engine that occupies the model."""
        self._occupied: list[Occupation] = []
        self.generations = CacheRequestTracker(self.counters, self._occupied)
        self.monitor: Monitor
        """What `snapshot` reads; set by `connect`, as are the two below."""
        self.controller: Controller | None = None
        """None with `policy="manual"`."""
        self.slo: SLO | None = None
        self.gate = parts.gate
        """What forward passes go through, and actions commit at."""
        self.pools = parts.pools
        self._agreement = agreement
        self.job_listeners = self._executor.listeners
        self._pid = os.getpid()

    # -- what there is

    def status(self) -> Status:
        """Return places with their ledgers, the KV cache, and where the layers are, as they are now."""
        return Status(
            layers=len(self.weights.layers),
            places=tuple(pool.status() for pool in self.pools),
            kv=self.kv.memory.status(),
            residencies=self.weights.residencies(),
            host=host.status(),
            events=len(self._log.events),
        )

    def events(self) -> tuple[Event, ...]:
        """Return the last actions, oldest first; a bounded ring."""
        return tuple(self._log.events)

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
    def working(self) -> bool:
        """Whether actions that were asked for are under way."""
        return self._executor.unfinished > 0

    @property
    def busy(self) -> bool:
        """Whether actions that were asked for are under way, or will be, or are deferred."""
        if self._agreement.proposed:  # looked at first: what has begun is unfinished
            return True
        return self._executor.unfinished > 0 or bool(self._executor.runner.deferred())

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
        with self.gate.exclusive():
            self.kv.memory.check()
            for pool in self.pools:
                pool.check()

    # -- actions

    def plan(self, actions: Action | Sequence[Action], *, dry_run: bool = True) -> tuple[PlanStep, ...]:
        """Return what actions would do. With `dry_run=False` they are done too, after all of them were checked.

        Raises `ConfigError`, `StateError` or `CapacityError` if one cannot be done at all. A drop is told of also while
        the digests of its layers are not known, which `apply` needs.
        """
        require_flag(dry_run, "dry_run")
        actions = self._normalized(actions)
        steps = [self._executor.runner.handler(action).dry_run(action) for action in actions]
        steps = [replace(step, pause_ms=self._log.last_pause_ms(type(step.action))) for step in steps]
        if not dry_run:
            self.apply(actions)
        return tuple(steps)

    def apply(self, actions: Action | Sequence[Action], *, why: str = "by hand", wait: bool = True) -> Any:
        """Do actions, all or none. Returns their results in order, or with `wait=False` a future of them.

        They are prepared together and committed together, so one call moves a layer once: else `ConfigError`. Waiting
        inside a forward pass of the same thread is a `StateError`, as is any call while it captures a CUDA graph.
        """
        require_flag(wait, "wait")
        actions = self._possible(actions)
        if not wait:
            return self._executor.submit(actions, why)
        self._require_outside()
        return _awaited(self._executor.submit(actions, why))

    def request(self, actions: Sequence[Action], why: str) -> Any:
        """Have actions done that nobody waits for, on all ranks of the model. Returns a future, or None."""
        return self._executor.request(self._possible(actions), why)

    def prepare(
        self, actions: Action | Sequence[Action], *, id: str | None = None, timeout_s: float = PREPARED_S
    ) -> Prepared:
        """Check actions, take their pages and make their copies; `commit` switches to them, `rollback` gives all back.

        For orchestrators that act on several models, all or none. Until then the model serves as before. What is
        neither committed nor rolled back within `timeout_s` seconds is rolled back. Other actions may be done
        meanwhile, but on the same layers, or the same place's KV limit: these are a `StateError`. `id` names the
        transaction, so that a call whose answer was lost can be made again; None: a new one.

        Raises what `apply` would, and `CapacityError` where `apply` would defer layers: what is prepared can be
        committed as a whole. (A KV limit below what live caches hold is in force from the commit on; its result is
        `deferred` until they end.) Then nothing is held.
        """
        actions = self._possible(actions)
        if self._agreement.several:
            raise ConfigError("this model is one of several ranks, which agree among themselves; use apply")
        if not actions:
            raise ConfigError("actions=() has nothing to prepare")
        if not is_number(timeout_s) or not 0 < timeout_s <= LONGEST_S:
            raise ConfigError(f"timeout_s={timeout_s!r} must be above 0 and at most {LONGEST_S:g}")
        if id is not None and not (isinstance(id, str) and 0 < len(id) <= LONGEST_ID and id.isprintable()):
            raise ConfigError(f"id={str(id)[:LONGEST_ID]!r} must have 1 to {LONGEST_ID} printable characters")
        self._require_outside()
        prepare = partial(self._executor.held.prepare, id or uuid4().hex, actions, timeout_s)
        return _awaited(self._executor.call(prepare))

    def commit(self, id: str) -> tuple[Result, ...]:
        """Commit what was prepared, between two forward passes; return the results of the actions in order.

        Committing it again returns the same. Raises `StateError` if it was rolled back, by hand or since its time was
        over, or cannot be committed; then nothing has changed. `ConfigError` for an id that is not known. What fails
        behind the switch, as pages are given back, is raised too; a second call says that it was committed.
        """
        self._require_outside()
        require(isinstance(id, str), "id", id, "the text that prepare returned")
        return _awaited(self._executor.end_held(partial(self._executor.held.commit, id)))

    def rollback(self, id: str) -> None:
        """Give back what was prepared. Doing it again, or after its time was over, changes nothing.

        Raises `StateError` if it was committed, `ConfigError` for an id that is not known.
        """
        self._require_outside()
        require(isinstance(id, str), "id", id, "the text that prepare returned")
        _awaited(self._executor.end_held(partial(self._executor.held.roll_back, id)))

    @property
    def held(self) -> tuple[Prepared, ...]:
        """What is prepared and waits to be committed, oldest first."""
        return self._executor.held.told()

    # -- for other processes

    def digests(self, layers: Layers = (), *, shards: Sequence[int] = ()) -> dict[int, int]:
        """Return a checksum of the full weights of decoder layers, by index; layers with equal ones have equal weights.

        Or of `shards`, by their numbers: that of each with what it has in common with the others of its layer. It is
        computed once, beside forward passes, unless the weights are written; before layers are dropped it has to be.
        Raises `ConfigError` for what is no layer, and no shard.
        """
        self._require_outside()
        indices = self.weights.layer_indices(layers)
        if shards := listed(shards, "shards"):
            require(not indices, "layers", indices, "left out where shards are named")
            return _awaited(self._executor.call(partial(self.weights.shard_digests, shards)))
        return _awaited(self._executor.call(partial(self.weights.digests, indices)))

    def weights_source(self, layers: Layers = (), *, shards: Sequence[int] = ()) -> WeightsSource:
        """Say where other processes can read the full weights of decoder layers: for their `rt.fetch`.

        Or of the layers of `shards`, which must be here. It holds until they are released, dropped, swapped or
        migrated; who reads later notices. Raises `ConfigError` for what is no layer, `StateError` for layers without
        full weights at one place, and for the memory of a GPU in a process that serves it to no others.
        """
        self._require_outside()
        of_shards = self.weights.parts_by_layer(listed(shards, "shards"))
        parts = dict.fromkeys(self.weights.layer_indices(layers)) | of_shards
        return _awaited(self._executor.call(partial(self.weights.source, parts)))

    def exchange_with(self, peers: Peers | None, pace: YieldingPace | None) -> None:
        """Have weights be fetched from other ranks, and read by them; `pace` is that of fetches that let steps pass.

        None: from processes of this host alone, as at first.
        """
        self.weights.peers, self.weights.pace = peers, pace

    def keep_no_prefetch_buffers(self) -> None:
        """Keep no memory to stream released layers with: a release takes it from the KV cache, if it can."""
        self._require_outside()
        _awaited(self._executor.call(partial(spare_prefetch_buffers, self.weights)))

    # -- for engines, and for what the model is connected to

    def occupy(self, by: str) -> Occupation:
        """Refuse to be unwrapped, with these words, until that is ended.

        Meanwhile the hooks count no generations into `counters`: who occupies the model counts its requests itself.
        """
        return Occupation(by, self._occupied)

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
        self._executor.thread.start()
        if self.controller and controlled:
            self.controller.start()

    def close(self, timeout_s: float | None = None) -> None:
        """Finish the actions that were asked for and take no more. Can be called twice.

        A controller that hangs in its tick is left behind, and does nothing more.
        """
        if self.closed:
            return
        if self.controller:
            self.controller.stop()
        if not self.in_forked_child:
            self._executor.close(timeout_s)
        self.state = RuntimeState.CLOSED  # at last: what is interrupted before is done again

    @contextmanager
    def last_safe_point(self) -> Iterator[None]:
        """Finish the actions that were asked for; then hold forward passes while the model is unwrapped."""
        if self.gate.inside:
            raise StateError("a model cannot be unwrapped inside one of its forward passes")
        for by in (each.by for each in tuple(self._occupied) if not each.end_dropped()):
            raise StateError(f"the model is in use by {by}")
        self._executor.drain()  # it may drop more layers, or have them back
        if self.dropped:
            raise StateError(f"layers {self.dropped} are dropped; have them back first: rt.fetch, or rt.restore")
        self.close()
        with self.gate.exclusive():
            try:
                yield
            finally:
                self.gate.closed = True

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return nothing: a copy of a wrapped model is not wrapped."""

    def __reduce__(self) -> tuple[Any, ...]:
        return lifecycle.nothing, ()

    def _require_outside(self) -> None:
        """Raise `StateError` where an action cannot be awaited."""
        self._require_running()
        if self.gate.inside:
            raise StateError("an action cannot be awaited inside a forward pass; call it with wait=False")

    def _possible(self, actions: Action | Sequence[Action]) -> tuple[Action, ...]:
        """Return normalized actions. Raises for what cannot be done in one call, or now."""
        normalized = self._normalized(actions)
        require_no_capture("weights and caches cannot be moved or resized")
        return normalized

    def _normalized(self, actions: Action | Sequence[Action]) -> tuple[Action, ...]:
        """Return one action or several with layers by index. Raises for what cannot be done in one call."""
        self._require_running()
        if isinstance(actions, Action) or not isinstance(actions, Iterable):
            actions = (actions,)
        actions = tuple(self.weights.normalized(well_formed(action)) for action in actions)
        for kind in (ON_LAYERS, MigrateKV):
            layers = [layer for action in actions if isinstance(action, kind) for layer in action.layers]
            if twice := sorted({layer for layer in layers if layers.count(layer) > 1}):
                raise ConfigError(f"one call would move layers {twice} twice; make two calls of it")
        return actions

    def _require_running(self) -> None:
        if self.in_forked_child:
            raise StateError(lifecycle.FORKED)
        if self.state is not RuntimeState.RUNNING:
            raise StateError("the model was unwrapped; wrap it again")


def _awaited(future: Future[T]) -> T:
    try:
        return future.result()
    finally:
        del future  # an error knows this frame: it must not know the error, or both live until collected


def runtime(model: Any) -> Runtime:
    """Return the runtime of a wrapped model, also `model.elastic`. Raises `StateError` for one that is not wrapped."""
    attached = getattr(model, "elastic", None)
    if not isinstance(attached, Runtime):
        raise StateError(f"{type(model).__name__} is not wrapped; call elastic.wrap(model) first")
    return attached
