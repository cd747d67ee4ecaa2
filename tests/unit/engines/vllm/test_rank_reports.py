"""Reports of a rank: little is looked at in a step that changes nothing, and no change goes untold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hypothesis import given
from hypothesis import strategies as st

from elastic.engines.vllm.agreement import Job
from elastic.engines.vllm.kv.orders import RankState, StepOrders
from elastic.engines.vllm.kv.worker_channel import WorkerChannel
from elastic.kvcache.storage.pool import KVPool
from elastic.memory.backends.memfd import MemfdBackend
from elastic.memory.pages.background import janitor
from elastic.memory.pages.page_pool import PagePool
from elastic.types import Release
from support.vllm_engine.rank import StubModel, finish_background, layer_outermost, make_channel

PAGE = 64 << 10
BLOCKS, BLOCK = 40, PAGE // 4
STEPS: dict[str, Callable[[WorkerChannel, StubModel, int], object]] = {
    "limit": lambda channel, model, n: model.kv.resize(n * PAGE),
    "taken": lambda channel, model, n: charge(model.kv.pool, 2 * n),
    "ordered": lambda channel, model, n: channel.before_step(
        StepOrders(channel.handshake().state.sequence + 1, n // 8)
    ),
    "asked": lambda channel, model, n: channel.before_step(StepOrders(wakes=n)),
    "working": lambda channel, model, n: setattr(model, "working", bool(n % 2)),
    "job ended": lambda channel, model, n: (setattr(model, "waiting", bool(n % 2)), channel.changed()),
    "committed": lambda channel, model, n: commit(model, n),
    "proposed": lambda channel, model, n: propose(model, n),
}


@contextmanager
def new_rank() -> Iterator[tuple[WorkerChannel, StubModel]]:
    janitor.start()
    pool = PagePool("cpu", MemfdBackend(PAGE), 64 * PAGE, ready_pages=0)
    kv = KVPool(pool, 60 * PAGE)
    kv.resize(12 * PAGE)
    channel, model = make_channel(kv, layer_outermost("ab", BLOCKS, BLOCK), BLOCKS)
    try:
        yield channel, model
    finally:
        finish_background()
        channel.close()
        pool.close()


def charge(pool: PagePool, pages: int) -> None:
    """Have fewer pages free, though always enough for the sectors that may be ordered."""
    pool.charge("weights", min(pages, 50 - pool.pages_of("weights")) * PAGE)


def commit(model: StubModel, number: int) -> None:
    with model.gate.exclusive():
        model.written = number


def propose(model: StubModel, number: int) -> None:
    """As an executor's thread does within a job."""
    model.working = True
    model.actions.propose((Release((number,)),), "by hand")


@given(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.sampled_from((1, 2, 12, 40))), min_size=8, max_size=16))
def test_what_was_told_last_is_always_how_the_rank_is(steps: list[tuple[str, int]]) -> None:
    with new_rank() as (channel, model):
        told: RankState | None = None
        proposals: list[Job] = []
        for name, number in [("asked", 0), *steps]:
            STEPS[name](channel, model, number)
            finish_background()
            report = channel.report()
            if report is not None:
                told = report.ranks[0]
                proposals += told.actions.proposals if told.actions is not None else ()
            assert told is not None
            assert told._replace(number=0, actions=None) == channel.handshake().state, name
            assert channel.report() is None or told.actions is not None
        assert len(proposals) == sum(name == "proposed" for name, _ in steps)
