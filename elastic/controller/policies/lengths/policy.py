"""Requests go to instances that can hold them; where none can, some become one of more ranks. (AMOEBA, section 3.3)

Up: a request that no instance could ever hold has the least loaded instances of equal degree become one, of as many
ranks as it takes, at once. Further long requests go to instances that are large already, or are becoming so.
Down: an instance whose requests would fit smaller ones takes no new ones for a while, and parts when enough is free.

The least loaded is the one with the least work in seconds. If it is full now, a request waits for it rather than going
where there is room and more work: a large instance has the most room, and is the slowest for its ranks. A request that
waits is promised its place: those behind it may pass only where it does not go. So none starves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastic.config import Lengths
from elastic.controller.backoff import regretted
from elastic.controller.policies.lengths.candidates import (
    InstanceDraft,
    best_merger,
    complete,
    holds_together,
    lower_degree,
    room_together,
)
from elastic.controller.policies.lengths.snapshot import (
    InstanceReading,
    LengthSnapshot,
    WaitingRequest,
    largest_together,
    tokens_to_end,
)

MOST_PASSED = 64
"""A request is sent past so many that wait for room at the most; so what a tick takes does not grow with the queue."""
TRIES = 3
"""So often ranks are asked to become one instance before they serve as they are for a while, and others are asked."""
AT_REST = "all is well"

Ranks = frozenset[str]


@dataclass(frozen=True)
class ScaleUp:
    """Instances that are to become one."""

    instances: tuple[str, ...]
    degree: int
    request: str
    """The request for which they are."""


@dataclass(frozen=True)
class ScaleDown:
    """An instance that is to part into ones of a lower degree."""

    instance: str
    degree: int


@dataclass(frozen=True)
class LargeState:
    """What is remembered of an instance of several ranks."""

    ranks: Ranks
    needed_s: float
    """The last time that a request needed its degree."""
    closed_s: float | None = None
    """Since when it takes no requests that others could take; None: it takes all."""
    closed_waiting: int = 0
    """Requests that waited then."""
    opened_s: float = -math.inf
    """When it was last opened although it had not parted."""


@dataclass(frozen=True)
class LengthState:
    """The memory of the policy from tick to tick."""

    large: tuple[LargeState, ...] = ()
    targets: Mapping[str, Ranks] = field(default_factory=dict)
    """Waiting request -> the ranks of the instance that it waits for; it may not be one yet."""
    asked_s: Mapping[Ranks, float] = field(default_factory=dict)
    """When instances with these ranks were last asked to become one, or to part."""
    tries: Mapping[Ranks, int] = field(default_factory=dict)
    """How often ranks that a request waits for were asked to become one."""
    failed_s: Mapping[Ranks, float] = field(default_factory=dict)
    """When ranks had been asked to become one too often."""
    parted_s: float = -math.inf
    """When an instance last parted; -inf again after the next that is made."""
    regrets: int = 0
    """Times in a row that one was made soon after one parted."""


@dataclass(frozen=True)
class LengthPlan:
    """What is to be done now, and why."""

    routes: tuple[tuple[str, str], ...]
    """Requests, and the instance that each goes to."""
    ups: tuple[ScaleUp, ...]
    downs: tuple[ScaleDown, ...]
    closed: tuple[str, ...]
    """Instances that take no requests that others could take, because they are to part."""
    refused: tuple[str, ...]
    """Requests that no instance could hold at any degree."""
    reason: str
    """Why, in words that stay the same while the reason does."""
    state: LengthState


@dataclass(frozen=True)
class LengthPolicy:
    """Says where requests go and which instances change. Pure: all that it remembers is in its state."""

    settings: Lengths = field(default_factory=Lengths)

    def decide(self, snapshot: LengthSnapshot, state: LengthState | None = None) -> LengthPlan:
        """Return the plan for now; its `state` is to be given at the next tick."""
        return _Decision(self.settings, snapshot, state or LengthState()).plan()

    def at_rest(self, state: LengthState) -> LengthPlan | None:
        """Return the plan for a fleet in which nobody waits and all ranks are by themselves, whatever they compute.

        None: they were not just now, so `decide` has to see it.
        """
        if state.large or state.targets:
            return None
        return LengthPlan((), (), (), (), (), AT_REST, state)


class _Decision:
    """One tick."""

    def __init__(self, settings: Lengths, snapshot: LengthSnapshot, state: LengthState) -> None:
        self.settings, self.snapshot, self.state = settings, snapshot, state
        self.now = snapshot.at_s
        self.candidates = [InstanceDraft(reading) for reading in snapshot.instances]
        self.large = {large.ranks: large for each in snapshot.instances if (large := self._carried(each))}
        self.targets: dict[str, Ranks] = {}
        self.planned: dict[Ranks, Sequence[InstanceDraft]] = {}
        self.asked, self.tries = dict(state.asked_s), dict(state.tries)
        self.failed = {ranks: s for ranks, s in state.failed_s.items() if self.now - s < settings.patience_s}
        self.routes: list[tuple[str, str]] = []
        self.ups: list[ScaleUp] = []
        self.refused: list[str] = []
        self.left: list[WaitingRequest] = []
        self.short_waiting = 0
        self.short_tokens = _short_tokens(self.candidates)
        for candidate in self.candidates:
            large = self.large.get(frozenset(candidate.reading.ranks))
            candidate.open = large is None or large.closed_s is None

    def plan(self) -> LengthPlan:
        self._keep_targets()
        for request in self.snapshot.waiting:
            self._place(request)
        downs = self._downs()
        ranks = {frozenset(candidate.reading.ranks): candidate for candidate in self.candidates}
        closed = tuple(ranks[key].reading.name for key, large in self.large.items() if large.closed_s is not None)
        parted_s, regrets = self.state.parted_s, self.state.regrets
        if self.ups:
            parted_s, regrets = -math.inf, regretted(regrets, parted_s, self.now, self.settings.dwell_s)
        if downs:
            parted_s = self.now
        asked = {key: at for key, at in self.asked.items() if self.now - at < self.settings.cooldown_s}
        tries = {ranks: times for ranks, times in self.tries.items() if ranks in self.targets.values()}
        after = LengthState(tuple(self.large.values()), self.targets, asked, tries, self.failed, parted_s, regrets)
        return LengthPlan(
            tuple(self.routes), tuple(self.ups), downs, closed, tuple(self.refused), self._reason(downs, closed), after
        )

    def _carried(self, reading: InstanceReading) -> LargeState | None:
        """Return what is remembered of an instance, with what is seen now."""
        if reading.degree == 1:
            return None
        ranks = frozenset(reading.ranks)
        carried = next((carried for carried in self.state.large if carried.ranks == ranks), LargeState(ranks, self.now))
        needed = any(reading.needs_degree(request.alone) for request in reading.live)
        return replace(carried, needed_s=self.now, closed_s=None) if needed else carried

    # -- requests

    def _keep_targets(self) -> None:
        """Carry on what waiting requests were promised, as far as these instances are still there."""
        waiting = {request.name: request.kv.alone for request in self.snapshot.waiting}
        for name, ranks in self.state.targets.items():
            members = [candidate for candidate in self.candidates if ranks.issuperset(candidate.reading.ranks)]
            if name not in waiting or sum(member.reading.degree for member in members) != len(ranks):
                continue
            if any(ranks & other and ranks != other for other in self.planned):
                continue
            if len(members) > 1 and (room_together(members) < waiting[name] or not complete(members)):
                continue  # layers have changed their rank since: they will not be one as they are
            changes = len(members) > 1 or members[0].room < waiting[name] <= members[0].reading.capacity_at(len(ranks))
            if changes and self._came_to_nothing(ranks, members):
                continue
            self.targets[name] = ranks
            if changes:
                self.planned[ranks] = members
                self._take(members)

    def _came_to_nothing(self, ranks: Ranks, members: Sequence[InstanceDraft]) -> bool:
        """Tell whether instances did not become one, however often they were asked: others may, or they later."""
        if self.tries.get(ranks, 0) >= TRIES and self._may_ask(ranks, members):
            self.failed[ranks] = self.now
            del self.tries[ranks]
        return ranks in self.failed

    def _may_ask(self, ranks: Ranks, members: Sequence[InstanceDraft]) -> bool:
        busy = any(member.reading.busy for member in members)
        return not busy and self.now - self.asked.get(ranks, -math.inf) >= self.settings.cooldown_s

    def _place(self, request: WaitingRequest) -> None:
        """Send a request to an instance, or promise it one."""
        target, tokens = self.targets.pop(request.name, None), request.kv.alone
        if target in self.planned:
            self._await(request, target)
            return
        if self.short_waiting >= MOST_PASSED and tokens <= self.short_tokens:
            self.left.append(request)
            return
        able = [candidate for candidate in self.candidates if not candidate.taken and candidate.room >= tokens]
        takes = [
            candidate
            for candidate in able
            if not candidate.reading.busy and (candidate.open or candidate.reading.needs_degree(tokens))
        ]
        kept = [candidate for candidate in takes if frozenset(candidate.reading.ranks) == target]
        if all(candidate.reading.needs_degree(tokens) for candidate in able):
            self._place_long(request, takes, kept, able=bool(able))
        elif takes:
            best = min(takes, key=_by_load)
            now = next((candidate for candidate in (best, *kept) if candidate.holds(request.kv)), None)
            if now is not None:
                self._send(request, now)
            else:
                self.short_waiting += 1
                self._promise(request, (kept or [best])[0])
        else:
            self.short_waiting += 1
            self.left.append(request)

    def _take(self, members: Sequence[InstanceDraft]) -> None:
        """Note that instances become one: they take nothing by themselves."""
        for member in members:
            member.taken = True
        self.short_tokens = _short_tokens(self.candidates)

    def _place_long(
        self, request: WaitingRequest, takes: Sequence[InstanceDraft], kept: Sequence[InstanceDraft], *, able: bool
    ) -> None:
        """Send a request that only large instances can hold to one that has such a request, so that others part."""
        now = [candidate for candidate in takes if candidate.holds(request.kv)]
        if now:
            large = [each for each in now if any(each.reading.needs_degree(kv.alone) for kv in each.live)]
            self._send(request, min(large or now, key=_by_load))
            return
        for ranks, members in self.planned.items():
            if holds_together(members, request.kv):
                self._await(request, ranks)
                return
        some = able or any(room_together(members) >= request.kv.alone for members in self.planned.values())
        late = self.now - request.since_s >= self.settings.wait_s
        if not some and not self._ever_holds(request):
            self.refused.append(request.name)
        elif (late or not some) and self._scale_up(request):
            return
        elif takes:
            self._promise(request, min(kept or takes, key=_by_load))
        else:
            self.left.append(request)

    def _promise(self, request: WaitingRequest, candidate: InstanceDraft) -> None:
        """Have a request wait for room at an instance; the first that does so keeps its place there."""
        self.left.append(request)
        if not candidate.promised:
            self.targets[request.name] = frozenset(candidate.reading.ranks)
        candidate.add(request.kv, begins=not candidate.promised)
        candidate.promised = True

    def _send(self, request: WaitingRequest, candidate: InstanceDraft) -> None:
        self.routes.append((request.name, candidate.reading.name))
        candidate.add(request.kv)
        ranks = frozenset(candidate.reading.ranks)
        if candidate.reading.needs_degree(request.kv.alone):
            candidate.open = True
            self.large[ranks] = replace(self.large[ranks], needed_s=self.now, closed_s=None)

    def _await(self, request: WaitingRequest, ranks: Ranks) -> None:
        """Have a request wait for instances that become one, and ask for that as soon as they would hold it."""
        self.left.append(request)
        self.targets[request.name] = ranks
        members = self.planned[ranks]
        ready = holds_together(members, request.kv)
        members[0].add(request.kv)
        if ready and self._may_ask(ranks, members):
            self.asked[ranks] = self.now
            self.tries[ranks] = self.tries.get(ranks, 0) + 1
            names = tuple(member.reading.name for member in members)
            self.ups.append(ScaleUp(names, len(ranks), request.name))

    def _scale_up(self, request: WaitingRequest) -> bool:
        """Have instances become one for a request; False: none can now."""
        settings = self.settings
        members = best_merger(self.candidates, request.kv, settings.step, settings.most_ranks, self.failed)
        if members is None:
            return False
        ranks = frozenset(rank for member in members for rank in member.reading.ranks)
        self.planned[ranks] = members
        self._take(members)
        self._await(request, ranks)
        return True

    def _ever_holds(self, request: WaitingRequest) -> bool:
        """Tell whether the ranks of some host could hold a request, were they one instance."""
        largest = largest_together(
            (reading.host, {degree: reading.capacity_at(degree) for degree in reading.capacity})
            for reading in self.snapshot.instances
            for _ in reading.ranks
        )
        degrees = range(self.settings.step, self.settings.most_ranks + 1)
        return any(request.kv.alone <= kv and degree in degrees for (_, degree), kv in largest.items())

    # -- back

    def _downs(self) -> tuple[ScaleDown, ...]:
        """Close, open and part large instances that no request needs."""
        downs, dwell_s = [], self.settings.dwell_s * 2**self.state.regrets
        for candidate in self.candidates:
            ranks = frozenset(candidate.reading.ranks)
            state = self.large.get(ranks)
            if state is None or candidate.reading.busy or candidate.taken or candidate.reading.partners:
                continue
            if any(ranks == target for target in self.targets.values()) or self.now - state.needed_s < dwell_s:
                self.large[ranks] = replace(state, closed_s=None)
                continue
            degree = self._may_part(candidate)
            if degree is not None and self.now - self.asked.get(ranks, -math.inf) >= self.settings.cooldown_s:
                self.asked[ranks] = self.now
                downs.append(ScaleDown(candidate.reading.name, degree))
            self.large[ranks] = self._closed(state)
        return tuple(downs)

    def _may_part(self, candidate: InstanceDraft) -> int | None:
        """Return the degree to which an instance can part now, if it can."""
        reading = candidate.reading
        live = tuple(candidate.live)
        if tokens_to_end(live) > (1 - self.settings.free_to_shrink) * reading.room:
            return None
        return lower_degree(replace(reading, live=live))

    def _closed(self, state: LargeState) -> LargeState:
        """Return the state of an instance that should part: closed for a while, then open for a while."""
        settings, waiting = self.settings, len(self.left)
        if state.closed_s is None:
            if self.now - state.opened_s < settings.patience_s:
                return state
            return replace(state, closed_s=self.now, closed_waiting=waiting)
        oldest_s = max((self.now - request.since_s for request in self.left), default=0.0)
        grows = waiting > state.closed_waiting and oldest_s >= settings.queue_high_s
        if grows or self.now - state.closed_s >= settings.patience_s:
            return replace(state, closed_s=None, opened_s=self.now)
        return state

    def _reason(self, downs: Sequence[ScaleDown], closed: Sequence[str]) -> str:
        """Say why, in words."""
        if self.ups:
            return "a request is too long for every instance that has room"
        if downs:
            return "no request needs an instance's ranks together"
        if self.planned:
            return "a request waits for instances to become one"
        if closed:
            return "instances take no new requests, so that they can part"
        if self.left:
            return "requests wait for room"
        return AT_REST


def _by_load(candidate: InstanceDraft) -> tuple[float, int, str]:
    return candidate.load_s, candidate.reading.degree, candidate.reading.name


def _short_tokens(candidates: Sequence[InstanceDraft]) -> int:
    """Return the largest request that needs the degree of no instance by which it could be held."""
    return max((candidate.short_tokens for candidate in candidates if not candidate.taken), default=0)
