"""Two-phase commit over ranks: all commit the same layers before the same step, or none does."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.actions.base import Layers
from elastic.engines.vllm.agreement import ActionOrders, Coordinator, Job, RankAgreement, RankReport, Vote, at_place
from elastic.errors import CapacityError, IntegrityError, StateError
from elastic.types import Release, ResizeKV, Restore, Swap


class Rank:
    """A rank whose executor's thread does one round: votes, and commits what was agreed."""

    def __init__(self, prepared: Sequence[Layers] | None) -> None:
        self.agreement = RankAgreement()
        self.committed: Sequence[Layers] | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(prepared,))
        self._thread.start()

    def _run(self, prepared: Sequence[Layers] | None) -> None:
        if prepared is None:
            self.agreement.refuse(CapacityError("no room", requested_bytes=2, free_bytes=1, total_bytes=1))
            return
        try:
            self.committed = self.agreement.vote(prepared)
            self.agreement.committed()
        except StateError as error:
            self.error = error

    def report(self) -> RankReport:
        while (report := self.agreement.report()) is None:
            pass
        return report

    def join(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()


def step(ranks: Sequence[Rank], coordinator: Coordinator) -> None:
    """Have every rank report after a step, and carry out what is ordered before the next one."""
    for number, rank in enumerate(ranks):
        coordinator.receive(number, rank.report())
    orders = coordinator.orders()
    for rank in ranks:
        rank.agreement.execute(orders)
    for rank in ranks:
        rank.join()


@given(st.lists(st.lists(st.integers(0, 5), unique=True), min_size=2, max_size=4))
def test_every_rank_commits_what_all_have_prepared(prepared: list[list[int]]) -> None:
    ranks = [Rank([tuple(layers), ()]) for layers in prepared]
    step(ranks, Coordinator(len(ranks)))
    for rank in ranks:
        assert rank.committed is not None
        layers, none = rank.committed
        assert set(layers) == set.intersection(*map(set, prepared))
        assert none == ()


def test_the_commit_is_done_before_the_step_begins() -> None:
    rank = Rank([(3,)])
    coordinator = Coordinator(1)
    coordinator.receive(0, rank.report())
    rank.agreement.execute(coordinator.orders())
    assert rank.committed == ((3,),)
    rank.join()


def test_what_was_proposed_is_known_until_it_has_begun() -> None:
    """A controller that saw nothing under way between the two would take its action for one that came to nothing."""
    agreement, coordinator, seen = RankAgreement(), Coordinator(1), list[bool]()
    agreement.begin = lambda actions, why: seen.append(agreement.proposed)
    agreement.propose([Release((1,))], "pressure")
    assert agreement.proposed
    report = agreement.report()
    assert report is not None
    coordinator.receive(0, report)
    assert agreement.proposed
    agreement.execute(ActionOrders((Job((Release((2,)),), "by hand"),)))
    assert agreement.proposed, "it was another one"
    agreement.execute(coordinator.orders())
    assert (seen, agreement.proposed) == ([True, True], False)


def test_a_refusal_of_one_rank_rolls_back_all() -> None:
    ranks = [Rank([(1, 2)]), Rank(None), Rank([(1, 2)])]
    step(ranks, Coordinator(3))
    assert [rank.committed for rank in ranks] == [None, None, None]
    for rank in (ranks[0], ranks[2]):
        assert "rank 1: CapacityError: no room" in str(rank.error)


def test_a_rank_that_refused_is_in_the_next_round_with_the_others() -> None:
    first, second = RankAgreement(), RankAgreement()
    coordinator = Coordinator(2)
    for number in (1, 2):
        for rank, agreement in enumerate((first, second)):
            agreement.refuse(StateError("not now"))
            coordinator.receive(rank, agreement.report() or RankReport())
        verdicts = coordinator.orders().verdicts
        assert [verdict.round for verdict in verdicts] == [number]
        first.execute(ActionOrders(verdicts=verdicts))


def test_nothing_is_sent_until_all_have_voted() -> None:
    coordinator = Coordinator(2)
    coordinator.receive(0, RankReport(votes=(Vote(1, ((4,),)),)))
    assert coordinator.pending
    assert coordinator.orders() == ActionOrders()
    coordinator.receive(1, RankReport(votes=(Vote(1, ((4,),)),)))
    assert [verdict.layers for verdict in coordinator.orders().verdicts] == [((4,),)]
    assert not coordinator.pending


def test_a_proposal_of_several_ranks_is_one_job_for_all() -> None:
    coordinator, job = Coordinator(2), Job((Swap((1,), "int4"),), "pressure")
    for rank in range(2):
        agreement = RankAgreement()
        assert agreement.propose(job.actions, job.why)
        coordinator.receive(rank, agreement.report() or RankReport())
    assert coordinator.orders().jobs == (job,)
    assert coordinator.orders().jobs == ()


def test_jobs_are_begun_in_order() -> None:
    agreement = RankAgreement()
    begun: list[str] = []
    agreement.begin = lambda actions, why: begun.append(why)
    agreement.execute(ActionOrders(jobs=(Job((Restore((1,)),), "first"), Job((), "second"))))
    assert begun == ["first", "second"]


def test_a_commit_that_no_rank_waits_for_is_an_integrity_error() -> None:
    coordinator = Coordinator(1)
    coordinator.receive(0, RankReport(votes=(Vote(7, ((1,),)),)))
    with pytest.raises(IntegrityError, match="round 7"):
        RankAgreement().execute(coordinator.orders())


def test_close_lets_a_waiting_executor_go() -> None:
    rank = Rank([(1,)])
    rank.report()
    rank.agreement.close()
    rank.join()
    assert rank.committed is None
    assert "stops" in str(rank.error)


def test_an_action_at_the_place_of_any_rank_is_at_that_of_each() -> None:
    resize, release = ResizeKV("cuda:0#vllm-17-0", 5), Release((1,))
    own = "cuda:1#vllm-17-1"
    assert at_place(((resize, release), "why"), own) == ((ResizeKV(own, 5), release), "why")
    other = ResizeKV("cuda:0#vllm-18-0", 5)
    assert at_place(other, own) is other, "of another engine"
