"""The ranks of a fleet: they join, are lost, leave; what a lost one did goes on elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from elastic.cluster.control.messages import Hello, ModelFacts, RankPlace
from elastic.cluster.control.status import RankStatus
from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.instance import Instance
from elastic.cluster.fleet.joining.memory_check import require_memory_together
from elastic.cluster.fleet.joining.model_check import require_same_model
from elastic.cluster.fleet.moves import kv_of
from elastic.cluster.fleet.records.delivery import Delivery
from elastic.cluster.fleet.records.event_log import EventLog
from elastic.cluster.fleet.records.memory_file import HeldMemory, hold_memory
from elastic.cluster.fleet.records.requests import RequestRecord, Resumption
from elastic.cluster.rank.client import RankClient
from elastic.cluster.rank.spec import RankSpec
from elastic.engines.core.kv_state import KVDirectory
from elastic.errors import ConfigError
from elastic.memory.backends.shared_file import host_name

logger = logging.getLogger(__name__)
MOST_LOSSES = 4
"""How many ranks in a row may be lost with a request before its next token: then it is taken for what ends them."""
MOST_GONE = 32
"""How many ranks that have gone are remembered for the status."""


class Membership:
    """Thread-safe: its state is under the lock of the dispatcher."""

    def __init__(self, dispatcher: Dispatcher, log: EventLog) -> None:
        self.on_losing: Callable[[Instance], None] = lambda _: None
        """Called for each rank that is lost before it is forgotten, under the lock; not for one that others do without,
        as it was being removed."""
        self.on_lost: Callable[[Instance], None] = lambda _: None
        """Called for each of these ranks, on its client's thread."""
        self.on_gone: Callable[[Instance], None] = lambda _: None
        """Called for each rank that has ended, lost or not, before that; it does not wait."""
        self.facts: ModelFacts | None = None
        """Of the first rank: others must have the same."""
        self._dispatcher = dispatcher
        self._lock = dispatcher.lock
        self._log = log
        self._past: dict[str, RankStatus] = {}

    def join(self, client: RankClient, spec: RankSpec, launcher: str) -> Instance:
        """Have a rank serve. Raises `ConfigError` if its model is not the fleet's, or its host has less memory than
        ranks there would have together, `StateError` where no thread can be had for it; it is ended then.
        """
        memory = hold_memory(client.hello.name, client.hello.memory)
        try:
            with self._lock:
                self._require_fitting(client.hello)
                instance = self._add(client, spec, launcher, memory)
        except BaseException as error:  # also what ends the calling thread
            if memory is not None:
                memory.close()
            why = str(error) or type(error).__name__
            self._log.add("refused", rank=client.hello.name, why=why)
            client.refuse(why)
            raise
        self._log.add("joined", rank=instance.name, instance=instance.name)
        return instance

    def _require_fitting(self, hello: Hello) -> None:
        """Raise `ConfigError` for a rank that cannot be one of the fleet. Under the lock, as what follows."""
        if hello.name in self._dispatcher.instances:
            raise ConfigError(f"rank {hello.name!r} is there already; choose another name")
        require_same_model(hello.name, hello.model, self.facts or hello.model)
        require_memory_together(f"rank {hello.name!r} is refused", self._claims(hello.host, hello))

    def _add(self, client: RankClient, spec: RankSpec, launcher: str, memory: HeldMemory | None) -> Instance:
        hello, dispatcher = client.hello, self._dispatcher
        forms, same = [dispatcher.form(form) for form in hello.forms], hello.host == host_name()
        directory = KVDirectory(hello.memory) if hello.memory is not None else None
        instance = Instance(hello.name, client, spec, launcher, forms, same, memory, directory)
        instance.state = "serving" if spec.share is None else "starting"
        dispatcher.instances[instance.name] = instance
        try:
            client.listen(partial(dispatcher.heard, instance), partial(self.lost, instance))
        except BaseException:
            del dispatcher.instances[instance.name]
            raise
        self.facts = self.facts or hello.model
        dispatcher.dispatch()
        dispatcher.changed.notify_all()
        return instance

    def has(self, name: str) -> bool:
        """Return whether a rank of that name is there."""
        with self._lock:
            return name in self._dispatcher.instances

    def require_memory(self, coming: Mapping[str, Sequence[RankPlace]]) -> None:
        """Raise `ConfigError` where this host has less memory than its ranks and these, by name, would have."""
        more = {(rank, place.name): place for rank, places in coming.items() for place in places}
        with self._lock:
            claims = {**self._claims(host_name()), **more}
        require_memory_together(f"ranks {', '.join(coming)} cannot start", claims)

    def _claims(self, host: str, *coming: Hello) -> dict[tuple[str, str], RankPlace]:
        """Return the places of the ranks of a host, and of some that come."""
        there = [each.hello for each in self._dispatcher.instances.values() if each.hello.host == host]
        return {(str(hello.pid), place.name): place for hello in (*there, *coming) for place in hello.places}

    def serve_on(self, instance: Instance) -> None:
        """Have a rank whose removal was interrupted take requests again, if nobody else removes it."""
        with self._lock:
            instance.removals -= 1
            if instance.state == "draining" and not instance.removals and not instance.leaving:
                instance.state = "serving"
                self._dispatcher.dispatch()
                self._dispatcher.changed.notify_all()

    def end(self, instance: Instance, timeout_s: float) -> None:
        """End a rank that was removed: in order within so many seconds, or as it is if others have use for that."""
        with self._lock:  # from now on nobody begins to read there
            is_first, instance.leaving = not instance.leaving, True
            is_read = bool(instance.records or instance.moves)
        if is_first:
            self._log.add("removed", rank=instance.name, instance=instance.name, requests=len(instance.records))
        if is_read:  # what is there stays as it is
            instance.client.kill("removed from the fleet")
        instance.client.close(timeout_s=timeout_s)

    def dismiss(self) -> list[Instance]:
        """Note of all ranks that their end is no failure from now on; return them."""
        with self._lock:
            instances = list(self._dispatcher.instances.values())
            for instance in instances:
                instance.leaving = True
            return instances

    def cancel_requests(self) -> None:
        """Cancel all requests, when all ranks have ended."""
        with Delivery(self._lock) as delivery:
            for record in list(self._dispatcher.records.values()):
                self._dispatcher.end_answers(record, range(record.request.n), "cancelled", delivery)
            self._dispatcher.queue.clear()

    def lost(self, instance: Instance, why: str) -> None:
        """Have the requests of a rank that has ended go on elsewhere. On its client's thread, once."""
        delivery = Delivery(self._lock)
        with self._lock:
            asked, removed = instance.leaving, instance.state == "draining"
            instance.state, instance.why = ("ended", "") if asked else ("lost", why)
            resumption = self._resume(instance)
            is_missed = not asked and not (removed and self._dispatcher.serving())
            if is_missed:
                self.on_losing(instance)
            self._dispatcher.forget(instance)
            back = [record for record in instance.records.values() if not record.moving]
            for record in list(instance.records.values()):
                record.losses = 0 if record.begun or asked else record.losses + 1
                instance.take(record)
            for record in [record for record in back if record.losses >= MOST_LOSSES]:
                error = f"{MOST_LOSSES} ranks in a row were lost before its next token; the last one: {why}"
                self._dispatcher.fail(record, error, delivery)
            back = [record for record in back if record.left]
            self._dispatcher.requeue(self._dispatcher.held.hold(instance, back), delivery)
            self._past[instance.name] = rank_status(instance, None)
            while len(self._past) > MOST_GONE:
                del self._past[next(iter(self._past))]
            if not asked:
                self._log.count(ranks_lost=1, requests_resumed=resumption.requests)
                self._log.add(
                    "lost", rank=instance.name, instance=instance.name, requests=resumption.requests, why=why
                )  # fmt: skip
            if instance.memory is not None:  # it is open as long as a request may go on from there
                instance.memory.close()
            self._dispatcher.dispatch()
        self.on_gone(instance)
        delivery.tell()
        if not asked:
            logger.warning("rank %s was lost: %s; its %d requests go on", instance.name, why, resumption.requests)
        if is_missed:
            self.on_lost(instance)

    def _resume(self, instance: Instance) -> Resumption:
        """Note of each request of a lost rank what it had, and where that can still be read."""
        left = [r for r in instance.records.values() if any(a.state.index not in r.cancelled for a in r.live)]
        resumption = Resumption(len(left), partial(self._resumed, instance.name))
        readable = instance.memory if instance.client.heard_all else None
        for record in left:
            kv = kv_of(instance, record)
            if record.begun or kv:
                computed = {sequence.sequence: sequence.computed for sequence in kv}
                record.had = {
                    answer.state.index: max(answer.computed, computed.get(answer.state.id, 0)) for answer in record.live
                }
                self._keep(record, instance, readable)
            if record.resumption is not None:
                record.resumption.heard(record.request.id)
            record.resumption = resumption
            resumption.left.add(record.request.id)
        return resumption

    @staticmethod
    def _keep(record: RequestRecord, instance: Instance, memory: HeldMemory | None) -> None:
        """Note where the KV of a request is left. What logprobs of its prompt need is computed again."""
        record.forget_kv()
        scores = record.request.prompt_logprobs is not None and not record.answers[0].tokens
        if memory is not None and instance.directory is not None and not scores:
            record.kv = kv_of(instance, record)
            record.source = replace(memory.source, sectors=instance.directory.sectors_of(record.kv))
            record.memory = memory.hold()

    def _resumed(self, rank: str, resumption: Resumption) -> None:
        """Tell that all requests of a lost rank have gone on, or ended."""
        self._log.add(
            "requests resumed", rank=rank, requests=resumption.requests,
            recomputed_tokens=resumption.recomputed_tokens, stalled_ms=resumption.stalled_s * 1000,
        )  # fmt: skip

    def statuses(self, now: float) -> tuple[RankStatus, ...]:
        """Return what is known of each rank, also of the last ones that have gone."""
        with self._lock:
            present = self._dispatcher.instances.values()
            return (*self._past.values(), *(rank_status(each, now - each.heard_s) for each in present))


def rank_status(instance: Instance, beat_s: float | None) -> RankStatus:
    """Return what `Fleet.status` says of a rank."""
    hello = instance.hello
    places = instance.spec.places or tuple(place.text for place in hello.places)  # it chose them itself
    state = "flipping" if instance.flips and instance.state == "serving" else instance.state
    return RankStatus(instance.name, state, hello.pid, hello.host, instance.launcher, places, beat_s, instance.why)
