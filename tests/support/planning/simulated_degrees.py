"""A small model of a fleet whose instances change their degree, to try schedulers on.

Time goes in ticks. An instance works at a speed by its degree, in equal shares for its requests; a token of a prompt is
`PROMPT_COST` of the work of a token of an answer. A request has KV for all its tokens from when it begins, and stays
where it was sent to. Changes take effect some ticks after they were asked for; meanwhile the
instances work as before, and take no requests.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from elastic.config import Lengths
from elastic.controller.policies.lengths.candidates import lower_degree
from elastic.controller.policies.lengths.policy import LengthPlan, LengthPolicy, LengthState, ScaleDown, ScaleUp
from elastic.controller.policies.lengths.snapshot import (
    InstanceReading,
    LengthSnapshot,
    LiveTokens,
    WaitingRequest,
    tokens_to_end,
)

CAPACITY = {1: 3750, 2: 41250, 4: 120500}
"""KV in tokens by degree (table 1: the longest context)."""
TOKENS_PER_S = {1: 448.0, 2: 670.0, 4: 767.0}
"""Of prompts and answers, by degree, of requests of `USUAL` tokens (table 1)."""
USUAL = (1024, 512)
"""Tokens of a short request's prompt and answer; the paper gives only the first."""
PROMPT_COST = 1 / 6
"""An estimate for Qwen2.5-32B on an H20, with KV for three requests: 1,150 tokens of prompts a second, by its
arithmetic, or 190 of answers, by the bytes of its weights."""


def work(prompt: float, output: float) -> float:
    """The work of tokens, in tokens of answers."""
    return PROMPT_COST * prompt + output


RATE = {degree: tokens * work(*USUAL) / sum(USUAL) for degree, tokens in TOKENS_PER_S.items()}
"""Work per second by degree."""


@dataclass(frozen=True)
class Offered:
    """A request, and when it comes."""

    name: str
    at_s: float
    prompt: int
    output: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.output


@dataclass
class _Running:
    request: Offered
    spent: float = 0.0

    @property
    def left(self) -> float:
        return work(self.request.prompt, self.request.output) - self.spent

    @property
    def done(self) -> float:
        """Tokens that it has computed."""
        prompt = min(self.request.prompt, self.spent / PROMPT_COST)
        return prompt + max(0.0, self.spent - work(self.request.prompt, 0))


@dataclass
class _Instance:
    name: str
    host: str
    ranks: tuple[str, ...]
    running: list[_Running] = field(default_factory=list)
    busy: bool = False


class Scheduler(Protocol):
    """Sends requests, and changes instances."""

    def decide(self, snapshot: LengthSnapshot) -> LengthPlan: ...


class SimulatedDegrees:
    """Hosts of so many ranks each; at first every rank is an instance."""

    def __init__(
        self,
        scheduler: Scheduler,
        hosts: Sequence[int] = (8,),
        *,
        capacity: Mapping[int, int] = CAPACITY,
        rate: Mapping[int, float] = RATE,
        tick_s: float = 0.25,
        change_ticks: Callable[[], int] = lambda: 4,
        noise: random.Random | None = None,
    ) -> None:
        self.scheduler, self.capacity, self.rate, self.tick_s = scheduler, capacity, rate, tick_s
        self.change_ticks, self.noise = change_ticks, noise
        self._numbers = itertools.count()
        self.instances = [
            _Instance(f"i{next(self._numbers)}", f"h{host}", (f"h{host}r{rank}",))
            for host, ranks in enumerate(hosts)
            for rank in range(ranks)
        ]
        self.now_s, self.tick = 0.0, 0
        self.waiting: deque[Offered] = deque()
        self.computed = 0.0
        """Tokens of prompts and answers."""
        self.ended: dict[str, float] = {}
        self.began: dict[str, float] = {}
        self.refused: list[str] = []
        self.changes: list[tuple[float, str, frozenset[str]]] = []
        self._pending: list[tuple[int, list[_Instance], int]] = []

    def run(self, offered: Sequence[Offered], seconds: float, *, until_done: bool = False) -> None:
        """Go on until a time; or until all requests ended, but not longer."""
        coming = deque(sorted(offered, key=lambda one: one.at_s))
        while self.now_s < seconds and not (until_done and not coming and self.idle):
            while coming and coming[0].at_s <= self.now_s:
                self.waiting.append(coming.popleft())
            self.step()

    @property
    def idle(self) -> bool:
        return not self.waiting and not any(one.running for one in self.instances)

    def step(self) -> None:
        """One tick: decide, act, compute."""
        self._finish_changes()
        self._act(self.scheduler.decide(self.snapshot()))
        for one in self.instances:
            self._compute(one)
        self.tick += 1
        self.now_s = self.tick * self.tick_s

    def snapshot(self) -> LengthSnapshot:
        return LengthSnapshot(
            self.now_s,
            tuple(map(self._reading, self.instances)),
            tuple(WaitingRequest(one.name, LiveTokens(one.tokens, 0), one.at_s) for one in self.waiting),
        )

    def _reading(self, one: _Instance) -> InstanceReading:
        """With noise, if there is any, in the speed that was measured."""
        live = tuple(LiveTokens(r.request.tokens, 0) for r in one.running)
        pending = sum(r.left for r in one.running)
        rate = self.rate[len(one.ranks)] * (self.noise.gauss(1, 0.1) if self.noise else 1.0)
        return InstanceReading(one.name, one.host, one.ranks, self.capacity, live, pending, max(rate, 1.0), one.busy)

    def _act(self, plan: LengthPlan) -> None:
        by_name = {one.name: one for one in self.instances}
        waiting = {one.name: one for one in self.waiting}
        for request, name in plan.routes:
            one = by_name[name]
            assert not one.busy, "a request was sent to an instance that changes"
            one.running.append(_Running(waiting.pop(request)))
            self.began[request] = self.now_s
            self._require_room(one)
        for request in plan.refused:
            self.refused.append(waiting.pop(request).name)
        self.waiting = deque(one for one in self.waiting if one.name in waiting)
        for up in plan.ups:
            self._begin("up", [by_name[name] for name in up.instances], up.degree)
        for down in plan.downs:
            self._begin("down", [by_name[down.instance]], down.degree)

    def _begin(self, kind: str, members: list[_Instance], degree: int) -> None:
        assert not any(one.busy for one in members), "an instance changes twice at a time"
        assert len({one.host for one in members}) == 1, "an instance is on one host"
        for one in members:
            one.busy = True
        ranks = frozenset(rank for one in members for rank in one.ranks)
        self.changes.append((self.now_s, kind, ranks))
        self._pending.append((self.tick + self.change_ticks(), members, degree))

    def _finish_changes(self) -> None:
        for due in [change for change in self._pending if change[0] <= self.tick]:
            self._pending.remove(due)
            _, members, degree = due
            ranks = [rank for one in members for rank in one.ranks]
            assert len(ranks) % degree == 0
            parts = [
                _Instance(f"i{next(self._numbers)}", members[0].host, tuple(ranks[first : first + degree]))
                for first in range(0, len(ranks), degree)
            ]
            running = [request for one in members for request in one.running]
            for request in sorted(running, key=lambda one: -one.request.tokens):
                emptiest = min(parts, key=lambda part: sum(one.request.tokens for one in part.running))
                emptiest.running.append(request)
            for one in members:
                self.instances.remove(one)
            self.instances.extend(parts)
            for part in parts:
                self._require_room(part)

    def _require_room(self, one: _Instance) -> None:
        reading = self._reading(one)
        assert tokens_to_end(reading.live) <= reading.room, f"{one.name} cannot hold what it was sent"

    def _compute(self, one: _Instance) -> None:
        left = self.rate[len(one.ranks)] * self.tick_s
        before = sum(request.done for request in one.running)
        working = sorted(one.running, key=lambda request: request.left)
        for number, request in enumerate(working):
            used = min(left / (len(working) - number), request.left)
            request.spent += used
            left -= used
        self.computed += sum(request.done for request in one.running) - before
        for request in [request for request in one.running if request.left < 1e-6]:
            one.running.remove(request)
            self.ended[request.request.name] = self.now_s + self.tick_s


class Baseline:
    """Schedulers that know nothing of degrees: each request has its instance when it comes. (Section 4.2.4)

    An instance that could never hold a request becomes one with the neighbours that it takes; it parts again as
    AMOEBA's do, when no request needs its degree and half of its KV is free, but nothing is kept from it.
    """

    def __init__(self, choose: Callable[[Sequence[InstanceReading], Mapping[str, float]], InstanceReading]) -> None:
        self.choose = choose
        """Of the instances, and the seconds of work of each."""
        self.home: dict[str, str] = {}

    def decide(self, snapshot: LengthSnapshot) -> LengthPlan:
        snapshot = replace(snapshot, instances=tuple(sorted(snapshot.instances, key=lambda one: one.ranks)))
        live = {one.name: list(one.live) for one in snapshot.instances}
        rank_of = {rank: one for one in snapshot.instances for rank in one.ranks}
        load_s = {one.name: one.pending / one.rate for one in snapshot.instances}
        for request in snapshot.waiting:
            if request.name in self.home:
                one = rank_of[self.home[request.name]]
                load_s[one.name] += request.kv.alone / one.rate
        changing = {one.name for one in snapshot.instances if one.busy}
        routes, ups, blocked = [], [], set()
        for request in snapshot.waiting:
            if request.name not in self.home:
                one = self.choose(snapshot.instances, load_s)
                self.home[request.name] = one.ranks[0]
                load_s[one.name] += request.kv.alone / one.rate
            one = rank_of[self.home[request.name]]
            if one.name in changing | blocked:
                blocked.add(one.name)
                continue
            if request.kv.alone > one.room:
                members = self._neighbours(one, request, snapshot, changing | blocked)
                blocked.add(one.name)
                if members:
                    changing |= {member.name for member in members}
                    ups.append(ScaleUp(tuple(m.name for m in members), sum(m.degree for m in members), request.name))
            elif tokens_to_end([*live[one.name], request.kv]) <= one.room:
                live[one.name].append(request.kv)
                routes.append((request.name, one.name))
            else:
                blocked.add(one.name)  # in the order of arrival
        downs = []
        routed = {name for _, name in routes}
        homes = ((rank_of[self.home[request.name]], request.kv.alone) for request in snapshot.waiting)
        wanted = {one.name for one, tokens in homes if one.needs_degree(tokens)}
        for one in snapshot.instances:
            if one.degree == 1 or one.name in changing | routed | wanted:
                continue
            free = tokens_to_end(one.live) <= 0.5 * one.room
            degree = lower_degree(one)
            if free and degree is not None and not any(one.needs_degree(request.most) for request in one.live):
                downs.append(ScaleDown(one.name, degree))
        return LengthPlan(tuple(routes), tuple(ups), tuple(downs), (), (), "", None)  # type: ignore[arg-type]

    def _neighbours(
        self, one: InstanceReading, request: WaitingRequest, snapshot: LengthSnapshot, out: set[str]
    ) -> list[InstanceReading]:
        """The instance and those beside it on its host, of the least degree that holds the request."""
        host = [other for other in snapshot.instances if other.host == one.host and other.name not in out]
        place = host.index(one)
        ring = [*host[place:], *host[:place]]
        for degree, room in sorted(one.capacity.items()):
            members: list[InstanceReading] = []
            for other in ring:
                if sum(member.degree for member in members) + other.degree <= degree:
                    members.append(other)
            live = [request for member in members for request in member.live]
            whole = sum(member.degree for member in members) == degree and len(members) > 1
            if whole and tokens_to_end([*live, request.kv]) <= room:
                return members
        return []


def round_robin() -> Baseline:
    """Each request to the next instance."""
    turn = itertools.count()
    return Baseline(lambda instances, _: instances[next(turn) % len(instances)])


def least_load_first() -> Baseline:
    """Each request to the instance that has least to compute."""
    return Baseline(lambda instances, load_s: min(instances, key=lambda one: load_s[one.name]))


class Lengthwise:
    """The policy, with its memory and its plans."""

    def __init__(self, settings: Lengths | None = None) -> None:
        self.policy = LengthPolicy(settings or Lengths())
        self.state: LengthState | None = None

    def decide(self, snapshot: LengthSnapshot) -> LengthPlan:
        plan = self.policy.decide(snapshot, self.state)
        self.state = plan.state
        return plan
