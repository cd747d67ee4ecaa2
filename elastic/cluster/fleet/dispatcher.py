"""The requests of a fleet: they wait here, go to an instance that can hold them, and are told from here."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from elastic.clock import current as current_clock
from elastic.clock import now
from elastic.cluster.control.connection import encode
from elastic.cluster.control.messages import Beat, Cancel, News, Refused, Submit
from elastic.cluster.fleet.instance import Instance
from elastic.cluster.fleet.planning.choice import choose
from elastic.cluster.fleet.planning.prefix_index import PrefixIndex, block_hashes
from elastic.cluster.fleet.planning.request_statistics import AnswerLengths, DrainRate
from elastic.cluster.fleet.planning.router import Routing
from elastic.cluster.fleet.records.audit import check_records
from elastic.cluster.fleet.records.delivery import Delivery
from elastic.cluster.fleet.records.event_log import EventLog
from elastic.cluster.fleet.records.held_requests import HeldRequests
from elastic.cluster.fleet.records.requests import RequestRecord, new_record
from elastic.cluster.fleet.refusals import no_room, require_place, require_possible
from elastic.controller.sensors.request_metrics import Outcome, RequestMetrics
from elastic.engines.base import FinishReason, Listener, Output, Request
from elastic.engines.continuous.active_requests import OUTCOMES
from elastic.errors import CapacityError, ConfigError, IntegrityError, Overloaded, StateError

RETRY_S = 0.1
"""How long an instance that had no room is not asked again for the same request."""
UNREACHABLE_S = 30.0
"""How long a request waits that no instance could hold any more: a rank that was lost may be replaced."""
_NOBODY: frozenset[str] = frozenset()


class Dispatcher:
    """Thread-safe. Ranks' reader threads bring news, users' threads requests; it has no thread of its own.

    `lock` guards all records, the queue, the instances and what is known of them. Under it messages are only put into
    clients' outboxes, which never waits; listeners are called without it.
    """

    def __init__(
        self,
        routing: Routing,
        max_queue: int | None,
        counters: RequestMetrics,
        log: EventLog,
        clock: Callable[[], float] = now,
    ) -> None:
        """Have no instances. `clock` says seconds: those of records, instances and outputs too."""
        self.lock = current_clock().lock()
        self.changed = current_clock().condition(self.lock)
        """Told when a request has ended or goes on elsewhere, and when instances come and go."""
        self.instances: dict[str, Instance] = {}
        self.gone: set[str] = set()
        """The names of instances that were forgotten."""
        self.records: dict[str, RequestRecord] = {}
        self.queue: deque[RequestRecord] = deque()
        self.held = HeldRequests()
        self.closed = ""
        """Why no more requests are taken."""
        self.forms: list[tuple[str, ...]] = []
        self.log = log
        self.clock = clock
        self.on_waiting: Callable[[], None] | None = None
        """Told when a request waits or room may have come free, if a policy says who goes where (`place`)."""
        self.promised: Mapping[str, frozenset[str]] = {}
        """By that policy: request -> the instances of which it waits for one."""
        self._names: set[str] = set()  # of all sequences
        self._routing, self._max_queue = routing, max_queue
        self._counters = counters
        self._prefixes = PrefixIndex()
        self.answer_lengths = AnswerLengths(maxlen=256)
        self._drain_rate = DrainRate(maxlen=64)

    # -- what users ask

    def submit(self, request: Request, listener: Listener) -> None:
        """Take a request. Raises `ConfigError` for an id in use, `CapacityError` for what never fits anywhere,
        `Overloaded` when too many wait, `StateError` when it is closed; then nothing is queued."""
        record = new_record(request, listener, self.clock())
        if self._routing == "prefix":
            sharing = [instance for instance in [*self.instances.values()] if instance.hello.shares_prefixes]
            sizes = {instance.kv_format.block_tokens for instance in sharing}
            record.hashes = {size: block_hashes(request.prompt, size) for size in sizes}
        with self.lock:
            if self.closed:
                raise StateError(self.closed)
            names = {answer.state.id for answer in record.answers}
            if request.id in self.records or not self._names.isdisjoint(names):
                raise ConfigError(f"request id {request.id!r} is in use; choose another")
            try:
                require_possible(self.serving(), request, self.retry_after_s)
                if self.queue or self.on_waiting is not None or not self._offer(record):
                    require_place(self.queue, request, self._max_queue, self.retry_after_s)
                    encode(record.states())  # what cannot be sent is refused now
                    self.queue.append(record)
            except (CapacityError, ConfigError, Overloaded):
                self._counters.refused(record.arrived_s)
                raise
            self._counters.arrived(request.id, len(request.prompt), record.arrived_s, sequences=len(record.answers))
            self.records[request.id] = record
            self._names |= names
            if self.queue and self.on_waiting is not None:
                self.on_waiting()

    def cancel(self, request: str, index: int | None) -> None:
        """End a request, or one of its answers; unknown: nothing happens."""
        with Delivery(self.lock) as delivery:
            record = self.records.get(request)
            if record is None:
                return
            record.cancelled.update(answer.state.index for answer in record.live if index in (None, answer.state.index))
            if record.moving:
                return  # who moves it says so, where it is then
            if record.instance is not None:
                self.instances[record.instance].client.send(Cancel(request, index))
            else:
                self.end_answers(record, record.cancelled, "cancelled", delivery)

    def check(self) -> None:
        """Recount. Raises `IntegrityError`."""
        with self.lock:
            check_records(self.records, self.queue, self.instances, self._names)

    # -- what ranks tell

    def heard(self, instance: Instance, message: News | Refused | Beat) -> None:
        """Note what a rank tells, on its client's thread. A rank that cannot be right is fenced."""
        if isinstance(message, News):
            fault = self._news(instance, message)
        elif isinstance(message, Refused):
            fault = self._refused(instance, message)
        else:
            fault, now = None, self.clock()
            with Delivery(self.lock) as delivery:
                instance.hear(message.load, now)
                if self.queue:
                    self.give_up(self.queue[0], now, delivery)
                self.dispatch()
        if fault is not None:
            instance.client.kill(fault)

    def _news(self, instance: Instance, news: News) -> str | None:
        """Deliver the tokens of a step; return why the rank cannot be right, if it cannot."""
        now = self.clock()
        counts: dict[str, int] = {}
        ended: list[tuple[RequestRecord, FinishReason]] = []
        fault: str | None = None
        with Delivery(self.lock) as delivery:
            if self.instances.get(instance.name) is not instance:
                return None  # it was given up: others go on with what it had
            instance.hear(news.load, now)
            instance.changes += 1  # of what it has
            if news.kv is not None and instance.directory is not None:
                instance.directory.apply(news.kv)
            instance.forms.extend(map(self.form, news.forms))
            for output, start in zip(news.outputs, news.starts, strict=True):
                record = self.records.get(output.request)
                if record is None or record.instance != instance.name:
                    continue
                fault = self._take(instance, record, output, start, now, delivery, counts)
                if fault is not None:
                    break
                if output.finish is not None and not record.left:
                    ended.append((record, output.finish))
            self._counters.produced_together(counts, news.outputs[-1].at_s if instance.same_host and counts else now)
            for record, finish in ended:
                self._end(record, OUTCOMES[finish])
            instance.served = instance.served or bool(counts)
            if self.queue:
                self.dispatch()
        if self._routing == "prefix" and instance.hello.shares_prefixes:
            self._remember(instance, [record for record, _ in ended])
        return fault

    def _take(
        self,
        instance: Instance,
        record: RequestRecord,
        output: Output,
        start: int,
        now: float,
        delivery: Delivery,
        counts: dict[str, int],
    ) -> str | None:
        """Note one output of a request that is there; return why it cannot be right, if it cannot."""
        if output.finish == "cancelled" and output.index not in record.cancelled:
            return f"it ended request {output.request!r}, which nobody cancelled"
        try:
            new = record.take(output, start)
        except IntegrityError as error:
            return str(error)
        if new is None:
            return None
        if not record.begun:
            record.begun = True
            instance.unheard.pop(output.request, None)
            if not record.scheduled and new.tokens:
                record.scheduled = True
                self._counters.scheduled(output.request, new.scheduled_s if instance.same_host else now)
        if record.resumption is not None:
            self._resumed(record, output, now)
        if not instance.same_host:
            new = replace(new, at_s=now, scheduled_s=None)
        weights = instance.forms[new.weights] if new.weights < len(instance.forms) else new.weights
        if weights != new.weights:
            new = replace(new, weights=weights)
        if new.tokens:
            counts[output.request] = counts.get(output.request, 0) + len(new.tokens)
            record.last_s = now
        delivery.add(record, new)
        return None

    def _resumed(self, record: RequestRecord, output: Output, now: float) -> None:
        """Note the first output of an answer that goes on elsewhere: what it cost."""
        had, resumption = record.had.pop(output.index, 0), record.resumption
        assert resumption is not None
        if output.tokens:
            recomputed = max(0, had - (output.cached_tokens or 0))
            resumption.recomputed_tokens += recomputed
            self.log.count(recomputed_tokens=recomputed)
            if record.last_s:
                resumption.stalled_s = max(resumption.stalled_s, now - record.last_s)
        if not record.had:
            record.resumption = None
            record.forget_kv()
            resumption.heard(output.request)
            self.changed.notify_all()

    def _refused(self, instance: Instance, message: Refused) -> str | None:
        """Have a request go elsewhere, or end it; return why the rank cannot serve, if it cannot."""
        error = message.error
        with Delivery(self.lock) as delivery:
            record = self.records.get(message.request)
            if record is None or record.instance != instance.name:
                return None
            instance.take(record)
            record.refused[instance.name] = math.inf if isinstance(error, CapacityError) else self.clock() + RETRY_S
            if not record.moving and isinstance(error, CapacityError | Overloaded | StateError):
                self.requeue([record], delivery)
                if all(record.refused.get(name) == math.inf for name in self.instances):
                    self.fail(record, str(error), delivery)
                self.dispatch()
            elif not record.moving:
                self.fail(record, str(error), delivery)
            self.changed.notify_all()
        return f"its engine does not serve: {error}" if isinstance(error, StateError) else None

    # -- under the lock, for others of the fleet too

    def form(self, form: tuple[str, ...]) -> int:
        """Return the fleet's index of a form that a rank's weights had."""
        if form not in self.forms:
            self.forms.append(form)
        return self.forms.index(form)

    def dispatch(self) -> None:
        """Give requests that wait to instances that can hold them, in order, or tell the policy that places them."""
        if self.on_waiting is not None:
            if self.queue:
                self.on_waiting()
            return
        while self.queue and self.place(self.queue[0]):
            pass

    def place(self, record: RequestRecord, among: Collection[str] | None = None) -> bool:
        """Give a request that waits to an instance, one of some; return False if none of them can hold it now."""
        given = self._offer(record, among)
        if given:
            self.queue.remove(record)
        return given

    def serving(self) -> list[Instance]:
        """List the instances that take requests."""
        return [instance for instance in self.instances.values() if instance.state == "serving"]

    def present(self, names: Iterable[str]) -> dict[str, Instance]:
        """Return those of some instances that are there, by name."""
        return {name: self.instances[name] for name in names if name in self.instances}

    def next_for(self, members: Collection[str]) -> RequestRecord | None:
        """Return who is next of the requests that wait and may go to these instances; None: nobody."""
        if self.on_waiting is None:
            return self.queue[0] if self.queue else None
        return next((r for r in self.queue if not self.promised.get(r.request.id, _NOBODY).isdisjoint(members)), None)

    def give_up(self, record: RequestRecord, now: float, delivery: Delivery) -> None:
        """End a request that waits, if for `UNREACHABLE_S` no instance there is could ever have held it."""
        serving = self.serving()
        able = [each for each in serving if record.refused.get(each.name) != math.inf]
        if not serving or any(each.request_blocks(record.request) <= each.most_blocks for each in able):
            record.unreachable_s = None
        elif record.unreachable_s is None:
            record.unreachable_s = now
        elif now - record.unreachable_s >= UNREACHABLE_S:
            self.fail(record, str(no_room(serving, record.request)), delivery)

    def requeue(self, records: Iterable[RequestRecord], delivery: Delivery) -> None:
        """Put requests that no instance has any more before those that wait; cancelled answers end."""
        back = []
        for record in records:
            self.end_answers(record, record.cancelled, "cancelled", delivery)
            if record.live:
                back.append(record)
        self.queue.extendleft(sorted(back, key=lambda record: record.arrived_s, reverse=True))

    def end_answers(
        self,
        record: RequestRecord,
        indices: Iterable[int],
        finish: FinishReason,
        delivery: Delivery,
        error: str | None = None,
    ) -> None:
        """End answers of a request that no instance has; those that have ended are passed over."""
        ended = record.end(indices, finish, self.clock(), error)
        for output in ended:
            record.had.pop(output.index, None)
            delivery.add(record, output)
        if ended and not record.left:
            if record in self.queue:
                self.queue.remove(record)
            self._end(record, OUTCOMES[finish])

    def fail(self, record: RequestRecord, why: str, delivery: Delivery) -> None:
        """End all answers of a request that no instance has: it failed."""
        self.end_answers(record, range(record.request.n), "failed", delivery, why)

    def forget(self, instance: Instance) -> None:
        """Have an instance get nothing any more, and nothing that it tells count."""
        self.instances.pop(instance.name, None)
        self.gone.add(instance.name)
        self._prefixes.forget(instance.name)
        self.changed.notify_all()

    # -- inside, under the lock

    def _offer(self, record: RequestRecord, among: Collection[str] | None = None) -> bool:
        """Give a request to an instance, one of some; return False if none of them can hold it now."""
        chosen = choose(self.instances, record, self._prefixes, self._routing, self.clock(), among)
        if chosen is not None:
            self._give(record, *chosen)
        return chosen is not None

    def _give(self, record: RequestRecord, instance: Instance, cached: int) -> None:
        """Send a request to an instance, with its KV where that can be read there."""
        kv, source = record.kv, record.source
        if source is None or not instance.same_host or source.format != instance.kv_format:
            kv, source = (), None
        now = self.clock()
        instance.client.send(Submit(record.states(), now - record.arrived_s, kv, source))
        if not record.routed:
            self.log.count(routed=1, prefix_hits=int(cached > 0))
        instance.give(record, cached, now)
        hashes = record.hashes.get(instance.kv_format.block_tokens)
        if hashes and instance.hello.shares_prefixes:
            self._prefixes.note(instance.name, hashes, instance.most_blocks)

    def _end(self, record: RequestRecord, outcome: Outcome) -> None:
        """Forget a request that has ended."""
        request = record.request.id
        if record.instance is not None:
            self.instances[record.instance].take(record)
        del self.records[request]
        self._names.difference_update(answer.state.id for answer in record.answers)
        now = self.clock()
        self._counters.ended(request, outcome, now)
        self._drain_rate.append(now)
        if outcome == "completed":
            self.answer_lengths.extend(len(answer.tokens) for answer in record.answers)
        record.forget_kv()
        if record.resumption is not None:
            record.resumption.heard(request)
            record.resumption = None
        self.changed.notify_all()

    @property
    def retry_after_s(self) -> float:
        """When it makes sense to come back, at the rate at which requests end."""
        return self._drain_rate.wait_s(len(self.queue), self.clock())

    # -- inside, without the lock

    def _remember(self, instance: Instance, ended: list[RequestRecord]) -> None:
        """Note the blocks of answers that have ended: the next turn of a conversation begins with them."""
        for record in ended:
            size, prompt = instance.kv_format.block_tokens, record.request.prompt
            first = record.hashes.get(size)
            if not first:
                continue
            by_answer = [block_hashes([*prompt, *answer.tokens[:-1]], size, first) for answer in record.answers]
            with self.lock:
                if instance.name in self.instances:
                    for hashes in by_answer:
                        self._prefixes.note(instance.name, hashes, instance.most_blocks)
