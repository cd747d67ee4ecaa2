"""The thread that watches ranks: it fences those that are silent or hang, and has lost ones replaced."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial

from elastic import clock
from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.instance import Instance
from elastic.cluster.fleet.rank_starter import RankStarter
from elastic.cluster.fleet.records.delivery import Delivery
from elastic.cluster.fleet.records.event_log import EventLog
from elastic.cluster.fleet.ticks import TickThread
from elastic.cluster.rank.spec import RankSpec
from elastic.errors import ElasticError, require_flag, require_period

logger = logging.getLogger(__name__)
TICK_S = 0.1
CUT_OFF_S = 5.0
"""How long a rank may wait for another, with which it computes layers and has no connection, before that is fenced."""
BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 4.0)
"""How long is waited before each try to replace a rank. After so many in a row without one token it is given up."""


@dataclass(eq=False)
class _Seat:
    """What a rank is to be, whoever fills it: its tries are counted."""

    spec: RankSpec
    tries: int = 0


class Supervisor:
    """Runs on a thread of its own from `start` to `stop`, and one more for each rank that is being replaced.

    Where ranks come by themselves none is replaced, and requests wait for them.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        log: EventLog,
        starter: RankStarter,
        *,
        replaces: bool,
        beat_timeout_s: float,
        hang_timeout_s: float,
    ) -> None:
        """Raises `ConfigError` for seconds that are none, and for what does not say whether ranks are replaced."""
        require_flag(replaces, "replace")
        require_period(beat_timeout_s, "beat_timeout_s")
        require_period(hang_timeout_s, "hang_timeout_s")
        self._dispatcher, self._log = dispatcher, log
        self._starter, self._replaces = starter, replaces
        self._beat_timeout_s, self._hang_timeout_s = beat_timeout_s, hang_timeout_s
        self._stopping = clock.current().event()
        self._lock = clock.current().lock()  # of the two below
        self._seats: dict[str, _Seat] = {}
        self._coming = set[str]()  # lost ranks in whose place others begin
        self._threads: list[clock.Thread] = []
        self._looked_s = 0.0
        tick_s = min(TICK_S, beat_timeout_s / 4)
        self._watch = TickThread(self._look, tick_s, "elastic-fleet-supervisor", "ranks could not be watched")

    def start(self) -> None:
        """Begin to watch."""
        self._looked_s = clock.now()
        self._watch.start()

    def stop(self) -> None:
        """Watch no more, and replace none; return when no thread is left. Ranks that are loading are ended."""
        self._stopping.set()
        self._watch.stop()
        self._starter.launcher.close()  # no more are started, and those that are loading end
        for thread in self._threads:
            if thread.ident is not None and thread is not clock.current().current_thread():
                thread.join()

    @property
    def hopeless(self) -> bool:
        """Whether no rank serves and none can come."""
        if self._dispatcher.instances:  # one that is lost behind this look is among those that come
            return False
        with self._lock:
            coming = bool(self._coming)
        return not coming and not self._starter.waits and not self._dispatcher.instances

    def replaces(self, name: str) -> bool:
        """Return whether another rank begins in the place of a lost one."""
        with self._lock:
            return name in self._coming

    def expect(self, instance: Instance) -> None:
        """Note that another rank will begin in the place of one that is lost, before it is forgotten."""
        if self._replaces and not self._starter.waits:
            with self._lock:
                self._coming.add(instance.name)

    def lost(self, instance: Instance) -> None:
        """Have a rank that was lost replaced."""
        with self._lock:
            if self._stopping.is_set():
                self._coming.discard(instance.name)
                return
            seat = self._seats.pop(instance.name, None) or _Seat(instance.spec)
            if instance.served:
                seat.tries = 0
            seat.spec = replace(seat.spec, share=instance.spec.share)
            if self._replaces and not self._starter.waits:
                self._coming.add(instance.name)
                thread = clock.current().thread(
                    partial(self._replace, instance.name, seat), f"elastic-replace-{instance.name}"
                )
                self._threads = [other for other in self._threads if other.is_alive()] + [thread]
                thread.start()
        self.fail_if_hopeless(instance.why)

    def _replace(self, name: str, seat: _Seat) -> None:
        """Start a rank in the place of another, again if that fails."""
        why = ""
        try:
            while seat.tries < len(BACKOFF_S) and not self._stopping.wait(BACKOFF_S[seat.tries]):
                seat.tries += 1
                spec = replace(seat.spec, name=self._starter.next_name())
                try:
                    instance = self._starter.start(spec)
                except ElasticError as error:
                    if self._stopping.is_set():
                        return
                    why = str(error)
                    self._log.add("refused", rank=spec.name, why=f"in the place of {name!r}: {why}")
                    logger.warning("rank %s could not be replaced: %s", name, why)
                    continue
                with self._lock:
                    self._seats[instance.name] = seat
                self._log.add("replaced", rank=name, instance=instance.name)
                return
            if not self._stopping.is_set():
                logger.error("rank %s is given up after %d tries: %s", name, seat.tries, why)
        finally:
            with self._lock:
                self._coming.discard(name)
            self.fail_if_hopeless(why)

    def fail_if_hopeless(self, why: str) -> None:
        """End what waits, if no rank can ever come."""
        if self._stopping.is_set() or not self.hopeless:
            return
        dispatcher = self._dispatcher
        with Delivery(dispatcher.lock) as delivery:
            for record in [*dispatcher.queue, *dispatcher.held.records]:
                dispatcher.fail(record, f"no rank is left, and none comes: {why}", delivery)

    def _look(self) -> None:
        now = clock.now()
        late = now - self._looked_s > self._beat_timeout_s / 2  # this process stood still itself: a new chance for all
        self._looked_s = now
        for instance, why in self._silent(now, late):
            logger.warning("rank %s is fenced: %s", instance.name, why)
            instance.client.kill(why)

    def _silent(self, now: float, late: bool) -> list[tuple[Instance, str]]:
        silent = []
        with self._dispatcher.lock:
            for instance in self._dispatcher.instances.values():
                if instance.client.lost:  # it was fenced, and its end is about to be told
                    continue
                if instance.client.behind:  # it was not silent: who reads it has not come to that yet
                    instance.heard_s = now
                if late:
                    instance.heard_s = instance.progress_s = now
                elif now - instance.heard_s > self._beat_timeout_s:
                    silent.append((instance, f"nothing was heard of it for {self._beat_timeout_s} s"))
                elif instance.should_step and now - instance.progress_s > self._hang_timeout_s:
                    silent.append((instance, f"its engine began no step for {self._hang_timeout_s} s, with work to do"))
                elif instance.cut_off_s is not None and now - instance.cut_off_s > CUT_OFF_S:
                    other = self._dispatcher.instances.get(instance.load.lost_rank)
                    if other is not None:  # it lives, and nobody else will give it up
                        silent.append((other, f"rank {instance.name} computes layers with it, and has no connection"))
            self._dispatcher.dispatch()  # requests that found no room may be offered again
            self._dispatcher.held.give_back(self._dispatcher.clock())
        return silent
