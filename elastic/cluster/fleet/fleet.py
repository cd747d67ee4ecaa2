"""`Fleet`: several processes that serve one model, as one engine."""

from __future__ import annotations

import atexit
import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self, get_args

from elastic import clock
from elastic.cluster.control.messages import Check, Drain
from elastic.cluster.control.stage_questions import Bulk
from elastic.cluster.control.status import FleetEvent, FleetStatus
from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.groups.groups import Groups
from elastic.cluster.fleet.groups.verbs import TIMEOUT_S
from elastic.cluster.fleet.joining.launchers import launcher_of
from elastic.cluster.fleet.joining.units import Units, end_unit
from elastic.cluster.fleet.membership import Membership
from elastic.cluster.fleet.moves import Moved, Mover
from elastic.cluster.fleet.overload.prices import PricedVerbs
from elastic.cluster.fleet.planning.policies import FleetPolicy, chosen
from elastic.cluster.fleet.planning.router import Routing
from elastic.cluster.fleet.policy_threads import PolicyThreads
from elastic.cluster.fleet.rank_starter import END_S, RankStarter, rank_count
from elastic.cluster.fleet.records.delivery import Delivery
from elastic.cluster.fleet.records.event_log import EventLog
from elastic.cluster.fleet.refusals import longest_request, require_timeout
from elastic.cluster.fleet.supervisor import Supervisor
from elastic.cluster.launch.base import Launcher
from elastic.cluster.rank.spec import RankSpec, options_of
from elastic.controller.sensors.request_metrics import RequestMetrics
from elastic.engines.base import GrammarCompiler, Listener, Request
from elastic.engines.sampling import require_valid
from elastic.engines.stopping import with_ends
from elastic.errors import ConfigError, ElasticError, StateError, is_integer, require, require_count, require_flag
from elastic.planning.sharding.share import shares

_fleets: weakref.WeakSet[Fleet] = weakref.WeakSet()


class Fleet(PricedVerbs):
    """Several ranks that serve one model; an `Engine`. Nothing starts before `start`, or `with`.

    `model` is a directory that ranks load, in `dtype` (one of `DTYPES`). `ranks` is how many there are, each with
    `places` (see `elastic.wrap`), or a list of places for each; `cores` its CPU cores. `shards` is in how many parts
    each layer is cut, for ranks to share (None: 4 with the policy "lengths", else `tp`). With `tp` or `pp` above 1
    ranks have the model together from the beginning: `tp` share each layer, in `pp` stages of as many layers (or of
    those given for each); none ever holds more than its share of the weights; `ranks` (None: as many as that takes) are
    a multiple of it. `launch` starts them: "local" processes, "in-process" threads, "ray" actors, or a `Launcher`, as
    `JoinLauncher` for ranks that come by themselves. `wrap` and `engine` are options of `elastic.wrap` and
    `ContinuousEngine`.

    A request goes to an instance that can hold it, chosen by `routing` (see `router.route`); others wait here, at most
    `max_queue` of them (None: any number). With `policy="balance"` requests move while they generate, so that all
    instances have room; with "drop", or an `Overload`, instances that run out of KV drop layers that they hold twice;
    with "lengths", or a `Lengths`, they share layers for long requests; a list has several. A rank that is silent for
    `beat_timeout_s` seconds, or whose engine has work and begins no step for `hang_timeout_s`, is fenced; with
    `replace` another one takes its place. Its requests go on elsewhere, from the tokens that were told. `grammars`
    checks grammars before a rank sees them. By `bulk` ranks read each other's memory where they find no memory file of
    it: "sockets", or "nixl" (the extra of that name, at all ranks).

    Listeners are called on the thread that reads from the request's rank; when it is cancelled while it waits, on the
    thread that does so; one call at a time for a request, in order. They may submit and cancel.
    """

    def __init__(
        self,
        model: Any,
        *,
        ranks: int | Sequence[Sequence[str]] | None = None,
        places: Sequence[str] = (),
        cores: Sequence[Sequence[int]] = (),
        dtype: str = "auto",
        shards: int | None = None,
        tp: int = 1,
        pp: int | Sequence[int] = 1,
        launch: str | Launcher = "local",
        wrap: Mapping[str, Any] | None = None,
        engine: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        policy: FleetPolicy | Sequence[FleetPolicy] | None = None,
        routing: Routing = "prefix",
        max_queue: int | None = None,
        beat_timeout_s: float = 2.0,
        hang_timeout_s: float = 60.0,
        replace: bool = True,
        grammars: GrammarCompiler | None = None,
        bulk: Bulk = "sockets",
    ) -> None:
        require_count(max_queue, "max_queue")
        require(grammars is None or hasattr(grammars, "matcher"), "grammars", grammars, "a GrammarCompiler, or None")
        require(routing in get_args(Routing), "routing", routing, f"one of {', '.join(get_args(Routing))}")
        require(bulk in ("sockets", "nixl"), "bulk", bulk, "'sockets' or 'nixl'")
        policies, self._shares = chosen(policy), shares(tp, pp)
        self._overload = policies.overload or self._overload
        ranks = len(self._shares) if ranks is None else ranks
        self.counters, self._grammars = RequestMetrics(), grammars
        options: dict[str, Any] = {"dtype": dtype, "lookahead": policies.lookahead}
        options["wrap"] = policies.wrap_options(options_of("wrap", wrap), shards, self._shares)
        options |= {"engine": options_of("engine", engine), "environment": options_of("environment", environment)}
        self._launcher = launcher_of(launch, rank_count(ranks))
        self._log = EventLog()
        self._dispatcher = Dispatcher(routing, max_queue, self.counters, self._log)
        self._members = Membership(self._dispatcher, self._log)
        self._starter = RankStarter(self._launcher, self._members, model, options)
        self._specs = self._starter.specs(ranks, places, cores, self._shares)
        timeouts = {"beat_timeout_s": beat_timeout_s, "hang_timeout_s": hang_timeout_s}
        self._supervisor = Supervisor(self._dispatcher, self._log, self._starter, replaces=replace, **timeouts)
        self._members.on_losing, self._members.on_lost = self._supervisor.expect, self._supervisor.lost
        self._groups = Groups(self._dispatcher, self._log, bulk)
        self._members.on_gone = self._groups.registry.lost
        self._starter.on_joined = Units(self._dispatcher, self._groups.form).joined
        self._mover = Mover(self._dispatcher, self._log, self._groups.ranks.introduce)
        add = None if self._starter.waits else partial(self._scale_out, self._starter.start_some)
        self._policies = PolicyThreads(policies, self._dispatcher, self._log, self._mover, self, self._groups, add)
        self._lock = clock.current().lock()  # of the state
        self._ending = threading.RLock()  # of who ends the ranks; a signal handler may stop what it has interrupted
        self._state, self._process = "new", os.getpid()

    @classmethod
    def of(cls, *models: Any, **options: Any) -> Self:
        """Return a fleet of ranks in this process, one for each model, plain or wrapped. Options: as of `Fleet`."""
        if not models:
            raise ConfigError("Fleet.of: give at least one model")
        fleet = cls(models[0], **{"ranks": len(models), "launch": "in-process", "replace": False, **options})
        specs = zip(fleet._specs, models, strict=True)
        fleet._specs = [dataclasses.replace(spec, model=model) for spec, model in specs]
        return fleet

    # -- an engine

    runtime = None
    """None: the models are in the ranks; see `look`."""

    @property
    def weights(self) -> tuple[tuple[str, ...], ...]:
        """The forms that the layers have had at any rank; `Output.weights` is an index into it."""
        with self._dispatcher.lock:
            return tuple(self._dispatcher.forms)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The model's own end tokens; none before a rank has joined."""
        return self._members.facts.end_tokens if self._members.facts is not None else ()

    @property
    def serving(self) -> bool:
        """True while requests are taken: after `start`, until `stop`, or until no rank is left and none can come."""
        return self._state == "serving" and not self._supervisor.hopeless

    def start(self) -> None:
        """Start the ranks and compare what they serve; return when all do.

        Raises what a rank raised that cannot start, `ConfigError` for one with other weights; then none is left.
        `StateError` if the fleet was started before, or is stopped meanwhile.
        """
        with self._lock:
            if self._state != "new":
                raise StateError(f"the fleet is {self._state}; make a new one")
            self._state = "starting"
        _fleets.add(self)
        try:
            self._starter.start_all(self._specs)
            if self._starter.waits:
                self._launcher.pass_on(self._starter.take)  # type: ignore[attr-defined]
            self._supervisor.start()
            self._policies.start()
            with self._lock:
                is_stopped = self._state != "starting"
                self._state = self._state if is_stopped else "serving"
            if is_stopped:
                raise StateError(f"the fleet is {self._state}")
        except BaseException as error:
            is_stopped = self._state not in ("starting", "serving")
            try:
                self.stop(drain=False)
            except Exception as failed:  # what went wrong first is told
                error.add_note(f"what had been started could not be ended: {failed!r}")
            if is_stopped and isinstance(error, ElasticError):
                raise StateError("the fleet was stopped while it started; make a new one") from error
            raise

    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request; see `Engine`."""
        require(callable(listener), "listener", listener, "a function of an elastic.Output")
        self._require_state("serving")
        facts = self._members.facts
        if facts is None or self._supervisor.hopeless:
            raise StateError("no rank is left, and none comes; add one")
        require_valid(request, facts.vocabulary, facts.longest)
        if request.grammar is not None and self._grammars is not None:
            self._grammars.matcher(request.grammar)
        self._dispatcher.submit(with_ends(request, facts.end_tokens), listener)

    def longest_request(self, most: int, *, ever: bool = False) -> int:
        """Return the most tokens of a request for the KV cache of the instance that can have most; see `Engine`."""
        with self._dispatcher.lock:
            return longest_request(self._dispatcher.serving(), most, ever=ever)

    def cancel(self, request: str, index: int | None = None) -> None:
        """End a request, or one of its answers; its listener gets `cancelled` for each. Unknown: nothing happens."""
        require(isinstance(request, str), "request", request, "the id of a request, a text")
        require(index is None or is_integer(index), "index", index, "the number of an answer, or None for all of them")
        self._dispatcher.cancel(request, index)

    def stop(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Take no more requests; finish those there are (`drain`, for `timeout_s` at the most), or cancel them.

        All ranks have ended then, whoever else stops it meanwhile: with `drain=False` what another call waits for is
        cancelled. An interrupt ends the wait, and cancels what is left; what it leaves undone a later call does. Raises
        `StateError` in a listener.
        """
        Delivery.forbid("the fleet cannot be stopped")
        require_timeout(timeout_s)
        require_flag(drain, "drain")
        with self._lock:
            if self._state == "stopped":
                return
            drain = drain and self._state in ("serving", "draining")
            self._state = "draining" if drain else "stopping"
        with self._dispatcher.lock:  # what it has by now is drained
            self._dispatcher.closed = f"the fleet is {self._state}; make a new one"
        try:
            if drain:
                self._drain(timeout_s)
        finally:
            self._end()

    def _drain(self, timeout_s: float | None) -> None:
        """Wait until no request is left, then have ranks have all of their layers again; nothing if it is ended."""
        dispatcher = self._dispatcher
        with dispatcher.lock:
            dispatcher.changed.wait_for(
                lambda: self._state != "draining" or not dispatcher.records or self._supervisor.hopeless, timeout_s
            )
        self._policies.stop()
        with suppress(ElasticError):  # then ranks end as they are
            if len(self._shares) == 1 and self._state == "draining":
                self.restore(timeout_s=END_S, why="the fleet ends")

    def _end(self) -> None:
        """End all ranks and requests. Each step can be taken twice, so that what was interrupted is done again."""
        with self._ending:
            with self._lock:
                if self._state == "stopped":
                    return
                self._state = "stopping"
            with self._dispatcher.lock:
                self._dispatcher.changed.notify_all()
            self._policies.stop()
            self._groups.registry.close()
            self._starter.end_all()
            self._supervisor.stop()
            self._policies.join()
            self._starter.end_all()  # one may have come in the place of another
            self._members.cancel_requests()
            _fleets.discard(self)
            with self._lock:
                self._state = "stopped"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- ranks

    def add(self, places: Sequence[str] | None = None, *, cores: Sequence[int] = ()) -> str:
        """Start one more rank; return its name when it serves. Raises as `start` does; the others serve on."""
        self._require_state("serving")
        spec = self._starter.spec(self._specs[0].places if places is None else places, cores)
        return self._starter.start(spec).name

    def scale_out(self, ranks: int) -> tuple[str, ...]:
        """Start so many more ranks, like the first; return their names. Raises the first error, if not all came."""
        return self._scale_out(self._starter.start_all, ranks)

    def _scale_out(self, start: Callable[[Sequence[RankSpec]], tuple[str, ...]], ranks: int) -> tuple[str, ...]:
        self._require_state("serving")
        return start(self._starter.like(self._specs[0], ranks, self._shares))

    def remove(self, name: str, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """End a rank. With `drain` its requests move or end before, for `timeout_s` at the most; then, or else they go
        on elsewhere from the tokens that were told. Layers that it computes with others are restored first, for
        `timeout_s` too (None: for 60 s).

        Raises `ConfigError` for one that is not there, `StateError` if requests are left and no other rank is there
        (with `drain`: that wait at the fleet), and with `drain` where it could not be parted from others: it serves on,
        as where an interrupt ends the wait and no other call removes it.
        """
        Delivery.forbid("a rank cannot be removed")
        require_timeout(timeout_s)
        require_flag(drain, "drain")
        instance, status = self._instance(name), ""
        if drain and instance.group:
            restored = self.restore(name, timeout_s=TIMEOUT_S if timeout_s is None else timeout_s)
            status = f" ({restored.status}: {restored.why})" if restored.why else ""
        with self._dispatcher.lock:
            if drain and instance.group:
                raise StateError(
                    f"rank {name!r} is not removed: it computes layers with others of {', '.join(instance.group)}"
                    f"{status}; try again when requests have ended, give it more time by timeout_s=, or remove it with "
                    "drain=False: what it alone has is computed again elsewhere then"
                )
            others = [other for other in self._dispatcher.serving() if other is not instance]
            left = (self._dispatcher.queue and not self._starter.waits) or (instance.records and not drain)
            if left and not others:
                raise StateError(
                    f"rank {name!r} is the last one, and requests are left; add one, or drain it when none waits"
                )
            end_unit(self._dispatcher, instance)
            instance.state, instance.removals = "draining", instance.removals + 1
        if drain:
            try:
                self._mover.drain(instance, timeout_s)
            except BaseException:  # also what ends the calling thread
                self._members.serve_on(instance)
                raise
            instance.client.ask(Drain())
        self._members.end(instance, END_S)
        self._supervisor.fail_if_hopeless(f"rank {name!r} was removed")

    def kill(self, name: str) -> None:
        """Fence a rank at once, as if it had failed; return when its requests wait or go on elsewhere.

        Not for listeners.
        """
        Delivery.forbid("a rank cannot be killed")
        instance = self._instance(name)
        instance.client.kill("killed by hand")
        with self._dispatcher.lock:
            self._dispatcher.changed.wait_for(lambda: name not in self._dispatcher.instances, END_S)

    def replaces(self, name: str) -> bool:
        """Return whether another rank begins in the place of one that was lost."""
        return self._supervisor.replaces(name)

    def move(self, request: str, instance: str) -> Moved:
        """Have a request go on at another instance; see `Mover.move`. Not for listeners."""
        Delivery.forbid("a request cannot be moved")
        self._require_verb(request=request, instance=instance)
        return self._mover.move(request, instance)

    def instance_of(self, request: str) -> str | None:
        """Return the instance that computes a request; None: it waits, or has ended."""
        with self._dispatcher.lock:
            return None if (record := self._dispatcher.records.get(request)) is None else record.instance

    # -- how it is

    def status(self) -> FleetStatus:
        """Return its ranks, instances and counts."""
        held = {rank: about for group in self.groups() for rank, about in group.held().items()}
        told = self._members.statuses(clock.now())
        ranks = tuple(dataclasses.replace(rank, **held.get(rank.name, {})) for rank in told)
        with self._dispatcher.lock:
            instances = tuple(instance.status() for instance in self._dispatcher.instances.values())
            return FleetStatus(ranks, instances, len(self._dispatcher.queue), self._log.totals(), self._policies.reason)

    def events(self) -> tuple[FleetEvent, ...]:
        """Return what has happened to it lately, oldest first."""
        return self._log.events()

    def health(self) -> bool:
        """Return whether requests are computed: it serves, and a rank is there."""
        with self._dispatcher.lock:
            return self.serving and bool(self._dispatcher.serving())

    def check(self) -> None:
        """Recount its books and those of all ranks. Raises `IntegrityError`, `RankLost`."""
        Delivery.forbid("ranks cannot be asked")
        self._dispatcher.check()
        with self._dispatcher.lock:
            ranks = list(self._dispatcher.instances)
        self._groups.ranks.ask_all(dict.fromkeys(ranks, Check()))


def _stop_all() -> None:
    for fleet in list(_fleets):
        if fleet._process == os.getpid():
            fleet.stop(drain=False)


atexit.register(_stop_all)
