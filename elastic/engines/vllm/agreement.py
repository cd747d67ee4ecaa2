"""Two-phase commit over the ranks of a model: all switch the same layers before the same step, or none does.

Every rank runs the same jobs in the same order on its own executor. In each round it votes for the layers that it has
prepared; the scheduler's side, which all ranks talk to once a step, sends one verdict; and a rank that is told to
commit does so before the step whose orders said so. What carries votes and orders is not looked at here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from elastic.actions.base import Layers
from elastic.actions.transactions.transaction import Agreement
from elastic.errors import IntegrityError, StateError
from elastic.types import Action, ResizeKV

COMMIT_S = 60.0
"""Seconds after which a commit that was agreed on is given up for lost."""


@dataclass(frozen=True)
class Job:
    """Actions that every rank is to begin."""

    actions: tuple[Action, ...]
    why: str


@dataclass(frozen=True)
class Vote:
    """The answer of one rank in one round."""

    round: int
    layers: tuple[Layers, ...] = ()
    """Those that it has prepared, of each action in turn."""
    error: str = ""
    """Why it refuses; empty: it is ready."""


@dataclass(frozen=True)
class Verdict:
    """What all ranks do with one round."""

    round: int
    layers: tuple[Layers, ...] = ()
    error: str = ""
    """Why it is rolled back; empty: commit `layers`."""


@dataclass(frozen=True)
class RankReport:
    """What one rank tells the scheduler's side."""

    proposals: tuple[Job, ...] = ()
    votes: tuple[Vote, ...] = ()


class ActionOrders(NamedTuple):
    """What every rank does before a step: verdicts first, then jobs, in order."""

    jobs: tuple[Job, ...] = ()
    verdicts: tuple[Verdict, ...] = ()


class Coordinator:
    """The scheduler's side: gathers votes, and sends verdicts and jobs to all ranks alike."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._votes: dict[int, dict[int, Vote]] = {}  # round -> rank -> vote
        self._jobs: list[Job] = []
        self._verdicts: list[Verdict] = []

    @property
    def pending(self) -> bool:
        """Whether orders wait to be sent, or votes for those of other ranks."""
        return bool(self._jobs or self._verdicts or self._votes)

    def receive(self, rank: int, report: RankReport) -> None:
        """Note what a rank told. The same proposal of several ranks is one job."""
        for job in report.proposals:
            if job not in self._jobs:
                self._jobs.append(job)
        for vote in report.votes:
            votes = self._votes.setdefault(vote.round, {})
            votes[rank] = vote
            if len(votes) == self._ranks:
                self._verdicts.append(_verdict(vote.round, self._votes.pop(vote.round)))

    def orders(self) -> ActionOrders:
        """Return what is to be sent with the next step, once."""
        orders = ActionOrders(tuple(self._jobs), tuple(self._verdicts))
        self._jobs, self._verdicts = [], []
        return orders


def at_place(value: Any, place: str) -> Any:
    """Return an action, or whatever has some, at the place of this rank, whichever rank's it names.

    The places of an engine's ranks differ in their device, and in the rank behind their name.
    """
    if isinstance(value, tuple):
        return tuple(at_place(each, place) for each in value)
    if isinstance(value, ResizeKV):
        engines = {name.partition("#")[2].rpartition("-")[0] for name in (value.place, place)}
        return replace(value, place=place) if len(engines) == 1 else value
    return value


def _verdict(number: int, votes: dict[int, Vote]) -> Verdict:
    """Agree on what every rank has prepared."""
    for rank, vote in sorted(votes.items()):
        if vote.error:
            return Verdict(number, error=f"rank {rank}: {vote.error}")
    first, *others = (vote.layers for _, vote in sorted(votes.items()))
    common = (
        tuple(layer for layer in layers if all(layer in other[i] for other in others)) for i, layers in enumerate(first)
    )
    return Verdict(number, tuple(common))


class RankAgreement(Agreement):
    """The side of one rank. Its executor's thread votes and waits; the thread of the steps reports and executes."""

    several = True

    def __init__(self) -> None:
        self.begin: Callable[[Sequence[Action], str], Any] = lambda actions, why: None
        """Runs a job on this rank without waiting for it; set when there is a runtime."""
        self._changed = threading.Condition()
        self._round = 0
        self._committed = 0
        self._votes: list[Vote] = []
        self._proposals: list[Job] = []
        self._proposed: list[Job] = []  # those that have not begun, also where they were reported
        self._awaited = 0  # the round whose verdict the executor waits for
        self._verdict = Verdict(0)  # the last one that was awaited
        self._closed = False
        self.pending = False
        """Whether there is something to report."""

    # -- on the executor's thread, and that of the controller

    def propose(self, actions: Sequence[Action], why: str) -> bool:
        """Have all ranks begin this job with one of the next steps."""
        job = Job(tuple(actions), why)
        with self._changed:
            self._proposals.append(job)
            self._proposed.append(job)
            self.pending = True
        return True

    @property
    def proposed(self) -> bool:
        """Whether a job that was proposed has not begun."""
        return bool(self._proposed)

    def vote(self, layers: Sequence[Layers]) -> Sequence[Layers]:
        """Return the layers that all ranks have prepared. Raises `StateError` if one refused, or when closed."""
        with self._changed:
            self._round += 1
            self._awaited = self._round
            self._votes.append(Vote(self._round, tuple(layers)))
            self.pending = True
            self._changed.wait_for(lambda: self._closed or self._verdict.round == self._round)
            verdict, self._awaited = self._verdict, 0
        if verdict.round != self._round:
            raise StateError("the engine stops; nothing was changed")
        if verdict.error:
            raise StateError(f"no rank has changed anything, since one could not: {verdict.error}")
        return verdict.layers

    def refuse(self, error: BaseException) -> None:
        """Vote against the round."""
        with self._changed:
            self._round += 1
            self._votes.append(Vote(self._round, error=f"{type(error).__name__}: {error}"))
            self.pending = True

    def committed(self) -> None:
        """Let the step begin that waits for this commit."""
        with self._changed:
            self._committed = self._round
            self._changed.notify_all()

    # -- on the thread of the steps

    def report(self) -> RankReport | None:
        """Return what is new, once; None if nothing is."""
        with self._changed:
            if not self.pending:
                return None
            report = RankReport(tuple(self._proposals), tuple(self._votes))
            self._votes, self._proposals, self.pending = [], [], False
            return report

    def execute(self, orders: ActionOrders) -> None:
        """Carry out verdicts, and begin jobs. Returns when what was to be committed is.

        Raises `IntegrityError` where a commit that all ranks agreed on does not come: their weights may differ then.
        """
        for verdict in orders.verdicts:
            self._carry_out(verdict)
        for job in orders.jobs:
            self.begin(job.actions, job.why)
            with self._changed:
                self._proposed = [each for each in self._proposed if each != job]

    def _carry_out(self, verdict: Verdict) -> None:
        with self._changed:
            if verdict.round == self._awaited:
                self._verdict = verdict
                self._changed.notify_all()
                if verdict.error or self._changed.wait_for(
                    lambda: self._closed or self._committed >= verdict.round, COMMIT_S
                ):
                    return
                raise IntegrityError(f"round {verdict.round} was agreed on by all ranks, and not committed by this")
            if not verdict.error:  # with one, this rank has refused it itself
                raise IntegrityError(f"all ranks are to commit round {verdict.round}; this one waits for none")

    def close(self) -> None:
        """Wait for no other rank any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
