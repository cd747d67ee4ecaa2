"""Having a group become another shape, some layers at a time, while it serves."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial

from elastic import clock
from elastic.cluster.control.messages import Apply, Question
from elastic.cluster.control.stage_questions import (
    AttachStage,
    CloseStage,
    DetachStage,
    KeepFull,
    OpenStage,
    PauseSteps,
    ResumeSteps,
    Room,
    SetCopies,
    WeightsOf,
)
from elastic.cluster.fleet.groups.caps.change import CapChange
from elastic.cluster.fleet.groups.caps.needs import is_short
from elastic.cluster.fleet.groups.flip import ExchangeForm, FlipDone, flip_layers
from elastic.cluster.fleet.groups.group import Deadline, Group, LayerFlip, Shape
from elastic.cluster.fleet.groups.price import restored_first
from elastic.cluster.fleet.groups.ranks import Ranks
from elastic.cluster.fleet.groups.results import Exchanged, Status
from elastic.cluster.fleet.groups.transition import (
    Books,
    FlipRound,
    Transition,
    most_coming,
    plan_transition,
    plans_of,
)
from elastic.cluster.fleet.groups.weights.checks import compare_weights, require_droppable
from elastic.errors import CapacityError, ElasticError, RankLost, StateError
from elastic.planning.arrangement.caps import GAIN
from elastic.types import Action, Change, Drop, Fetch, Restore, WeightsSource

logger = logging.getLogger(__name__)
LIVE = ExchangeForm()
_Told = dict[WeightsSource, set[int]]


@dataclass
class _Counts:
    flips: int = 0
    moved_bytes: int = 0
    copy_s: float = 0.0
    fetched_bytes: int = 0
    fetch_s: float = 0.0
    freed_bytes: int = 0
    stalled_ms: float = 0.0


class Exchange:
    """One transition of a group, on the calling thread; see `run`."""

    def __init__(self, ranks: Ranks, group: Group, target: Shape, timeout_s: float, form: ExchangeForm) -> None:
        self._ranks, self.group, self.target, self.form = ranks, group, target, form
        self._deadline = Deadline(timeout_s)
        self._caps = CapChange(ranks, group, self._deadline)
        self.counts = _Counts()
        self._timeline: list[tuple[str, float]] = []
        self._restored: Mapping[str, tuple[int, ...]] = {}

    def run(self) -> Exchanged:
        """Change the group; it serves on. It stops where a flip fails: all is in order then, with a part of it done.

        First of all layers that are in a variant return to their full weights, unless all instances are to part. Before
        anything changes ranks are asked whether they can drop what is to leave them, and caps are lowered, in which
        what lives must fit: else it is `deferred`. Raises `CapacityError` for a shape that the ranks have no memory
        for, `RankLost` if one is lost: the group is repaired by who is told of it.
        """
        for home, path in self.target.paths.items():  # requests go by as many copies as there are to be: all alike yet
            if path.copies > self.group.shape.paths[home].copies:
                self._share_out(home, path.copies)
        try:
            return self._run()
        finally:
            self._join_copies()
            with suppress(ElasticError):  # it is lost, and `Recover` ends it
                self._keep_full(self.group.shape)

    def _run(self) -> Exchanged:
        group = self.group
        try:
            self._keep_full(group.shape, self.target)
            rooms = self._ranks.measure(group.members)
            group.shape = group.shape.altered(weights={rank: room.resident for rank, room in rooms.items()})  # by hand
            require_droppable(self._ranks, group.shape.leaving(self.target))
            rooms = self._restore_variants(rooms)
        except RankLost:
            raise
        except StateError as error:
            return self._result("deferred", str(error))
        books, most = self._books(rooms), self.form.layers_per_step
        plans = plans_of(group.shape, self.target, books, group.caps_in_force(), most)
        try:
            transition = self._lower_caps(plans)
            if transition is None:
                return self._result("deferred", "live requests need more of the caches than would be left in between")
            self._did("caps lowered")
            self._connect(transition, rooms)
            compare_weights(self._ranks, group)
            self._did("connected")
            with self._stalled(transition) if self.form.exchange == "stall" else nullcontext():
                self._change(transition)
        except RankLost:
            raise
        except ElasticError as error:
            self._raise_caps()
            return self._result("partial" if self.counts.flips or self.counts.freed_bytes else "deferred", str(error))
        self._raise_caps()
        self._did("caps raised")
        return self._result("applied")

    def _join_copies(self) -> None:
        """Have copies that are all at the same ranks be one."""
        for home, path in self.group.shape.paths.items():
            if path.copies > 1 and path.alike:
                with suppress(ElasticError):  # it is lost, or recovers
                    self._share_out(home, 1)

    def _share_out(self, home: str, copies: int) -> None:
        """Have requests of an instance go by so many copies of its layers, at the ranks where these are."""
        with self._ranks.flipping((home, *self.group.shape.paths[home].helpers)):
            path = self._ranks.ask(home, SetCopies(copies))
            self.group.shape = self.group.shape.altered({home: path})

    def _result(self, status: Status, why: str = "") -> Exchanged:
        counts = self.counts
        return Exchanged(
            status,
            counts.flips,
            counts.moved_bytes,
            counts.fetched_bytes,
            counts.stalled_ms,
            self._deadline.seconds,
            why,
            tuple(self._timeline),
            self._restored,
        )

    def _did(self, what: str) -> None:
        self._timeline.append((what, round(self._deadline.seconds, 4)))

    def _books(self, rooms: Mapping[str, Room]) -> Books:
        return Books(rooms, self._ranks.instance(self.group.members[0]).kv_format, self.group.shape)

    # -- caps

    def _lower_caps(self, plans: Sequence[Transition]) -> Transition | None:
        """Lower caps to those of the first plan in which all that lives fits now, or else in time in the last's."""
        quick = (plan for plan in plans[:-1] if self._caps.lower(plan.caps, at_once=True))
        return next(quick, None) or (plans[-1] if self._caps.lower(plans[-1].caps) else None)

    def _raise_caps(self) -> None:
        """Let the instances have what there is now, as far as stages find room for it."""
        group = self.group
        every = range(group.shape.layers * group.shape.shards)
        if group.shape.apart and all(have.issuperset(every) for have in group.shape.weights.values()):
            close_stages(self._ranks, group.stages)  # which keep no room for what instances may have by themselves
            group.stages.clear()
            group.caps = {home: group.staged.get(home) for home in group.members}
            self._ranks.set_caps(group.caps)
            return
        books, staging = self._books(self._ranks.measure(group.members)), keeps_staging(self._ranks, group)
        if not self._caps.raise_to(books.caps(group.shape, staging=staging)):
            logger.warning("the caps of %s stay as they were: their stages found no room", ", ".join(group.members))

    # -- layers

    def _restore_variants(self, rooms: dict[str, Room]) -> dict[str, Room]:
        """Have layers that are in a variant in their full weights again; return the rooms then.

        Raises `StateError` where live requests keep the pages for longer than they may.
        """
        first = {} if self.target.apart else restored_first(rooms)
        if not first:
            return rooms
        for rank, change in self._apply({rank: (Restore(layers),) for rank, layers in first.items()}):
            if change.deferred and not self._caps.until(partial(self._has_full, rank)):
                raise StateError(f"layers {first[rank]} of rank {rank!r} wait for pages to leave their variant")
            self._restored = {**self._restored, rank: first[rank]}
        self._did("layers restored from variants")
        return self._ranks.measure(rooms)

    def _keep_full(self, *shapes: Shape) -> None:
        """Have ranks keep the full weights of layers that they compute parts of in one of these shapes."""
        if self.group.shape.shards > 1:
            parts = {rank: frozenset().union(*(each.in_parts(rank) for each in shapes)) for rank in shapes[0].members}
            self._ranks.ask_all({rank: KeepFull(layers) for rank, layers in parts.items()})

    def _has_full(self, rank: str) -> bool:
        return not self._ranks.measure([rank])[rank].in_variant

    def _connect(self, transition: Transition, rooms: Mapping[str, Room]) -> None:
        """Open what flips need, all of it at the same time."""
        needed = {(flip.home, flip.target) for flip in transition.flips if flip.target != flip.home} - self.group.stages
        if needed:
            self._ranks.introduce(self.group.members)
        asked: list[tuple[str, Question]] = []
        for home, rank in sorted(needed):
            path = self.group.shape.paths[home]
            opened = OpenStage(home, path, transition.caps[home], rooms[home].most_sectors)
            asked += [(rank, opened), (home, AttachStage(rank))]
        try:
            self._ranks.ask_each(asked)
        except ElasticError:
            with suppress(ElasticError):  # one was lost: the others are told of it
                close_stages(self._ranks, needed)
            raise
        self.group.stages |= needed

    @contextmanager
    def _stalled(self, transition: Transition) -> Iterator[None]:
        """Have instances whose layers flip wait until all have."""
        homes, began_s = {flip.home for flip in transition.flips}, self._deadline.seconds
        try:
            self._ranks.ask_all(dict.fromkeys(homes, PauseSteps()))
            yield
        finally:
            for home in homes:
                with suppress(ElasticError):  # it is lost, or recovers
                    self._ranks.ask(home, ResumeSteps())
            self.counts.stalled_ms = max(self.counts.stalled_ms, (self._deadline.seconds - began_s) * 1e3)

    def _change(self, transition: Transition) -> None:
        self.counts.freed_bytes += self._drop_unneeded(self.group.members, self.target.weights)
        while transition.rounds:
            self._take_round(transition.rounds[0])
            transition = self._rest(transition.rounds[0], replace(transition, rounds=transition.rounds[1:]))
        self._fetch(self.target.weights)

    def _take_round(self, flips: FlipRound) -> None:
        wanted, before = dict[str, set[int]](), self.group.shape.weights
        for flip in flips:
            wanted.setdefault(flip.target, set()).update(self.group.shape.weights_of(flip))
        self._fetch(wanted)
        failed = self._flip(flips)
        self._did(f"{self.counts.flips} layers flipped")
        if lost := next((error for error in failed if isinstance(error, RankLost)), None):
            raise lost
        sources = dict.fromkeys(flip.source for flip in flips)
        self.counts.freed_bytes += self._drop_unneeded(sources, self.target.weights)
        if failed:
            self._drop_unneeded(wanted, before)  # what has come for them
            raise failed[0]

    def _rest(self, done: FlipRound, rest: Transition) -> Transition:
        """Let requests that wait have some of what has come free, if the rest finds an order then, too; return it.

        Twice the layers of the round that is done keep their room: so the rest takes few rounds, for each of which
        steps are waited for.
        """
        group, now = self.group, self.group.caps_in_force()
        if not rest.rounds or not is_short(self._ranks.dispatcher, group.members):
            return rest
        books, shards = self._books(self._ranks.measure(group.members)), group.shape.shards
        staging = min(2 * most_coming(done, shards), most_coming(rest.flips, shards))
        caps = books.caps(group.shape, staging=staging)
        try:
            planned = plan_transition(group.shape, self.target, books, caps, self.form.layers_per_step)
        except CapacityError:  # the rest has an order with the caps of now
            return rest
        gains = any(cap > (1 + GAIN) * now[home] for home, cap in planned.caps.items())
        if not gains or any(cap < now[home] for home, cap in planned.caps.items()):
            return rest
        if not self._caps.raise_to(planned.caps):
            return rest
        self._did("caps raised")
        return planned

    def _flip(self, flips: FlipRound) -> list[ElasticError]:
        """Flip layers of several instances side by side; return the errors of those that failed."""
        shape, hurried = self.group.shape, is_short(self._ranks.dispatcher, self.group.members)
        flip_each = partial(flip_layers, coordinated=self.form.coordinated, hurried=hurried)
        pauses = {home: [flip for flip in flips if flip.home == home] for home in dict.fromkeys(f.home for f in flips)}
        calls = [partial(flip_each, self._ranks, shape.paths[home], each) for home, each in pauses.items()]
        begun = clock.current().run_together(calls, "elastic-flip")
        failed = []
        for each, answer in zip(pauses.values(), begun, strict=True):
            try:
                self._note(each, answer.result())
            except ElasticError as error:
                failed.append(error)
        return failed

    def _note(self, flips: Sequence[LayerFlip], done: FlipDone) -> None:
        """Note what has flipped at one pause of an instance."""
        counts = self.counts
        self.group.shape = self.group.shape.altered({done.path.home: done.path})
        counts.flips += sum(len({shard // self.group.shape.shards for shard in flip.shards}) for flip in flips)
        counts.moved_bytes += done.moved_bytes
        counts.copy_s += done.copy_s
        counts.stalled_ms = max(counts.stalled_ms, done.stalled_ms)

    def _drop_unneeded(self, ranks: Iterable[str], staying: Mapping[str, frozenset[int]]) -> int:
        """Drop the weights at ranks that no instance needs there, and that are not to stay; return how many bytes."""
        shape = self.group.shape
        kept = {rank: shape.kept(rank, staying) for rank in ranks}
        gone = {rank: sorted(shape.weights[rank] - kept[rank]) for rank in kept if shape.weights[rank] - kept[rank]}
        asked = {rank: (Drop(shards=tuple(shards)),) for rank, shards in gone.items()}
        freed_bytes = 0
        for rank, change in self._apply(asked):
            self.group.shape = self.group.shape.altered(weights={rank: kept[rank]})
            freed_bytes += change.released_bytes
        return freed_bytes

    def _fetch(self, wanted: Mapping[str, Iterable[int]]) -> None:
        """Have the weights of shards at ranks, side by side, from the other ranks that have them, or the checkpoint.

        Each reads the memory of all that have some of what it lacks at once.
        """
        while missing := {
            rank: lacks for rank, shards in wanted.items() if (lacks := set(shards) - self.group.shape.weights[rank])
        }:
            self._fetch_some(missing)

    def _fetch_some(self, missing: Mapping[str, set[int]]) -> None:
        """Have those of the missing shards at each rank that others tell of; nobody: all, from the checkpoint."""
        have, (told, kept) = self.group.shape.weights, self._told(missing)
        chosen = {rank: tuple(sorted(set().union(*told[rank].values()) or missing[rank])) for rank in missing}
        actions: dict[str, tuple[Action, ...]] = {}
        began_s = self._deadline.seconds
        for rank, shards in chosen.items():
            fetch = Fetch((), tuple(told[rank]), self.form.coordinated, shards)
            actions[rank] = (fetch if fetch.sources else Restore(shards=shards),)
        for rank, change in self._apply(actions, {rank: kept[rank] for rank in kept if not told[rank]}):
            if change.deferred:
                self._await(rank, chosen[rank])
            self.counts.fetched_bytes += int(change.moved_bytes)
            self.group.shape = self.group.shape.altered(weights={rank: have[rank].union(chosen[rank])})
        self.counts.fetch_s += self._deadline.seconds - began_s

    def _told(self, missing: Mapping[str, set[int]]) -> tuple[dict[str, _Told], dict[str, str]]:
        """Return for each rank where others have shards that it lacks, and why one gives none; raises `RankLost`."""
        have = self.group.shape.weights
        asked = [(rank, other, shards & have[other]) for rank, shards in missing.items() for other in have]
        asked = [each for each in asked if each[2]]
        answers = self._ranks.answers([(other, WeightsOf(tuple(sorted(theirs)))) for _, other, theirs in asked])
        told: dict[str, _Told] = {rank: {} for rank in missing}
        kept: dict[str, str] = {}
        for (rank, other, theirs), answer in zip(asked, answers, strict=True):
            if isinstance(answer, RankLost):
                raise answer
            if isinstance(answer, ElasticError):  # it has them in a variant, or released
                kept[rank] = f"at rank {other!r}, whose weights {rank!r} needs: {answer}"
            else:
                told[rank][answer] = theirs
        return told, kept

    def _apply(
        self, actions: Mapping[str, tuple[Action, ...]], remedies: Mapping[str, str] | None = None
    ) -> Iterator[tuple[str, Change]]:
        """Have ranks do an action each, side by side; yield what each did. Raises the first error, or its remedy."""
        errors: list[ElasticError] = []
        answers = self._ranks.answers([(rank, Apply(each, "by the fleet")) for rank, each in actions.items()])
        for rank, answer in zip(actions, answers, strict=True):
            if isinstance(answer, ElasticError):
                remedy = (remedies or {}).get(rank) if type(answer) is StateError else None
                errors.append(answer if remedy is None else StateError(remedy))
            else:
                yield rank, answer[0]
        for error in sorted(errors, key=lambda error: not isinstance(error, RankLost)):
            raise error

    def _await(self, rank: str, shards: Sequence[int]) -> None:
        """Wait for weights that come when requests have given up pages.

        Raises `StateError` where it takes too long: then the rank waits for them no more, and has none of them.
        """
        if not self._caps.until(lambda: self._ranks.measure([rank])[rank].resident.issuperset(shards)):
            self._ranks.ask(rank, Apply((Drop(shards=tuple(shards)),), "by the fleet"))
            layer = shards[0] // self.group.shape.shards
            raise StateError(f"the weights of layer {layer} wait at rank {rank!r} for pages that live requests need")


def keeps_staging(ranks: Ranks, group: Group) -> bool:
    """Return whether a group keeps room for a layer more at each rank, since a policy may have it drop more."""
    weights = group.shape.weights.values()
    has_twice = sum(map(len, weights)) > len(frozenset().union(*weights))
    return bool(group.staged) and (has_twice or len(ranks.serving()) > len(group.members))


def close_stages(ranks: Ranks, stages: Iterable[tuple[str, str]]) -> None:
    """Have homes let go of ranks that compute no layers of them, (home, rank)."""
    for home, rank in sorted(stages):
        if ranks.there(home):
            ranks.ask(home, DetachStage(rank))
        if ranks.there(rank):
            ranks.ask(rank, CloseStage(home))
