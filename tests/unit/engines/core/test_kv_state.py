"""The mirror of where an engine's KV lies, and the journal that tells it: what was told is there, in that order."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from elastic.engines.base import Request
from elastic.engines.core.block_manager import BlockManager
from elastic.engines.core.block_pool import BlockTable
from elastic.engines.core.kv_journal import KVJournal
from elastic.engines.core.kv_state import KVDirectory, KVFormat, KVReport, KVSource, SectorPages, SequenceKV
from elastic.engines.core.scheduler import Scheduler
from elastic.engines.core.step import SequenceState, Step
from elastic.errors import CapacityError, Overloaded
from elastic.memory.backends.shared_file import SharedFile
from support.serving.simulated_executor import SimulatedExecutor, SimulatedMemory

FILE = SharedFile("here", 1, 3, 4)


def source_of(*windows: int | None) -> KVSource:
    """Blocks of 4 tokens, 256 bytes each; two layers in each group, pages of 512 bytes."""
    groups = tuple(((2 * i, 2 * i + 1), window) for i, window in enumerate(windows))
    return KVSource(FILE, 512, KVFormat(4, "head_centric", "float32", 2, 4, groups))


def test_a_directory_has_the_blocks_of_sequences_and_the_pages_of_their_sectors() -> None:
    source = source_of(None)
    directory = KVDirectory(source)
    assert source.format.block_bytes == 256
    sectors = (SectorPages(0, 0, (8, 9)), SectorPages(0, 3, (4, 2)))
    directory.apply(KVReport(sectors, (SequenceKV("a", 6, ((0, 6),)), SequenceKV("b", 3, ((1,),), True))))
    directory.apply(KVReport((), (SequenceKV("a", 9, ((7,),), True),)))
    found = directory.of("a", 12)
    assert found == SequenceKV("a", 11, ((0, 6, 7),), True), "while it decodes all tokens but the last are computed"
    assert directory.sectors_of([found]) == sectors
    assert directory.sectors_of([SequenceKV("b", 3, ((1,),))]) == sectors[:1]
    assert directory.of("unknown", 5) is None
    assert directory.sectors_of([SequenceKV("c", 1, ((99,),))]) == ()


def test_a_sector_that_was_mapped_anew_has_its_new_pages_and_a_name_its_new_blocks() -> None:
    directory = KVDirectory(source_of(None))
    directory.apply(KVReport((SectorPages(0, 0, (8, 9)),), (SequenceKV("a", 4, ((0,),)),)))
    directory.apply(KVReport((SectorPages(0, 0, (5, 6)),), (SequenceKV("a", 2, ((1,),)),), ("a",)))
    found = directory.of("a", 9)
    assert found == SequenceKV("a", 2, ((1,),))
    assert directory.sectors_of([found]) == (SectorPages(0, 0, (5, 6)),)
    directory.apply(KVReport(ended=("a", "unknown")))
    assert directory.of("a", 9) is None


def test_what_was_told_by_another_path_means_nothing_and_sectors_may_be_in_some_layers_alone() -> None:
    directory = KVDirectory(source_of(None))
    directory.apply(KVReport((SectorPages(0, 0, (8, 9)),), (SequenceKV("a", 4, ((0,),)),), epoch=1))
    assert directory.epoch == 1
    sector = SectorPages(0, 1, (5,), (1,))
    directory.apply(KVReport((sector,), (SequenceKV("b", 4, ((3,),)),), epoch=2))
    assert directory.of("a", 9) is None
    found = directory.of("b", 9)
    assert found is not None
    assert directory.sectors_of([found, SequenceKV("a", 4, ((0,),))]) == (sector,)
    source = replace(source_of(None), sectors=(sector,))
    (own,) = source.by_layers()
    assert own.pages == {1: {1: (5,)}}
    directory.apply(KVReport((SectorPages(0, 2, (), ()),), epoch=3))
    assert directory.sectors_of([SequenceKV("c", 4, ((5,),))]) == (), "all of its layers are elsewhere"


@pytest.mark.parametrize(("tokens", "known"), [(8, True), (9, False)])
def test_of_a_prompt_longer_than_a_window_nothing_is_sure(tokens: int, known: bool) -> None:
    """A chunk that was in flight may have written over what is needed to compute it again."""
    directory = KVDirectory(source_of(None, 8))
    directory.apply(KVReport((), (SequenceKV("a", 4, ((0,), (0,))),)))
    assert (directory.of("a", tokens) is not None) is known
    directory.apply(KVReport((), (SequenceKV("a", tokens, ((1,), (1,)), True),)))
    assert directory.of("a", 30) == SequenceKV("a", 29, ((0, 1), (0, 1)), True)


# -- the journal


class Told:
    """A scheduler over a simulated executor that tells what changes."""

    def __init__(self, **options: Any) -> None:
        self.blocks = BlockManager(functools.partial(SimulatedMemory, 50, (2,)), (None,), 4)
        self.scheduler = Scheduler(self.blocks, max_requests=8, max_batch_tokens=16, **options)
        self.executor = SimulatedExecutor((None,), 4)
        self.directory = KVDirectory(source_of(None))
        self.reports: list[KVReport] = []
        self.freed: list[BlockTable] = []
        self.scheduler.journal = KVJournal(self.hear, lambda: (), self.free)

    def hear(self, report: KVReport) -> None:
        self.reports.append(report)
        self.directory.apply(report)

    def free(self, table: BlockTable) -> None:
        self.freed.append(table)
        self.blocks.release(table)

    def add(self, name: str, prompt: int, most: int) -> None:
        request = Request(tuple(range(prompt)), most, id=name)
        self.scheduler.add([SequenceState(name, request, 0, 0)])

    def begin(self) -> Step:
        step = self.scheduler.schedule()
        assert step is not None
        self.executor.execute(step)
        return step

    def step(self) -> None:
        self.begin()
        self.end()

    def end(self, *, fail: bool = False) -> None:
        step, result = self.executor.compute(fail=fail)
        if result is None:
            self.scheduler.fail(step)
        else:
            self.scheduler.update(step, result)
        assert self.scheduler.journal is not None
        self.scheduler.journal.tell(always=True)
        for name, sequence in self.scheduler.sequences.items():
            if sequence.table.blocks[0]:
                assert self.directory.of(name, len(sequence.tokens)) == sequence.kv()


@pytest.mark.parametrize("how", ["length", "cancelled", "cancelled in flight", "failed"])
def test_blocks_of_what_ended_are_in_use_until_that_is_told(how: str) -> None:
    told = Told()
    told.add("a", 6, 1 if how == "length" else 9)
    in_use: list[int] = []
    told.reports.clear()
    hear = told.hear
    journal = told.scheduler.journal
    assert journal is not None
    journal._listener = lambda report: (in_use.append(told.blocks.pools[0].in_use), hear(report))
    if how == "cancelled":
        told.step()
        told.scheduler.cancel("a")
        assert len(told.blocks.live) == 1
        journal.tell(always=False)
    else:
        told.begin()
        if how == "cancelled in flight":
            told.scheduler.cancel("a")
        told.end(fail=how == "failed")
    assert told.reports[-1].ended == ("a",)
    assert in_use[-1] == 2
    assert len(told.blocks.live) == 0
    told.blocks.check()


def test_a_report_has_what_changed_alone() -> None:
    told = Told()
    told.add("a", 20, 9)
    for _ in range(8):
        told.step()
    assert [kv.computed for report in told.reports for kv in report.sequences] == [16, 20, 21, 25]
    assert [sum(len(kv.blocks[0]) for kv in report.sequences) for report in told.reports] == [4, 1, 1, 0, 0, 0, 1, 0]


def test_of_a_prompt_whose_last_token_is_left_it_is_told_that_it_decodes_from_then_on() -> None:
    """The last one is computed alone then, in a block that is there, and nothing more is told of it."""
    told = Told()
    told.add("a", 14, 9)
    told.add("b", 3, 9)  # the first two of its tokens fill the step
    for _ in range(4):
        told.step()
    reports = [(kv.computed, kv.decoding) for report in told.reports for kv in report.sequences if kv.sequence == "b"]
    assert reports == [(2, True), (5, True)]


def test_a_sequence_that_comes_with_blocks_is_told_at_once_and_once() -> None:
    told = Told()
    request = Request(tuple(range(9)), 6, id="a")
    table, shared = told.blocks.reserve(15, request.prompt, 8)
    assert (shared, len(table.blocks[0])) == (0, 2)
    for i in range(8):
        told.executor._content[0, table.blocks[0][i // 4], i % 4] = i, hash(request.prompt[: i + 1])
    told.blocks.attach("a", table)
    told.scheduler.add([SequenceState("a", request, 0, 0)], {"a": 8})
    assert told.scheduler.journal is not None
    told.scheduler.journal.tell(always=False)
    assert told.reports[-1].sequences == (SequenceKV("a", 8, (tuple(table.blocks[0]),), True),)
    told.step()
    assert told.executor.computed == {"a": 1}
    assert [len(kv.blocks[0]) for kv in told.reports[-1].sequences] == [1]


def test_what_a_step_in_flight_computes_is_not_there_yet() -> None:
    told = Told()
    told.add("a", 20, 9)
    for computed, decoding in [(0, False), (16, False), (20, True), (21, True)]:
        told.begin()
        kv = told.scheduler.sequences["a"].kv()
        assert (kv.computed, kv.decoding) == (computed, decoding)
        told.end()
        assert told.scheduler.sequences["a"].kv().computed > computed


# -- blocks for what may come


def test_sequences_that_may_come_share_blocks_among_them_and_nobody_else_does() -> None:
    manager = BlockManager(functools.partial(SimulatedMemory, 12, (1,)), (None,), 4)
    tokens = tuple(range(10))
    a, _ = manager.reserve(20, tokens, 9)
    b, shared = manager.reserve(20, tokens, 9, a, 2)
    manager.check()
    assert (shared, a.blocks[0][:2] == b.blocks[0][:2], a.blocks[0][2] == b.blocks[0][2]) == (8, True, False)
    assert manager.reserve(20, tokens, 9)[1] == 0, "what is in them may not be there yet"
    manager.share_computed(a, tokens, 9)
    manager.share_computed(b, tokens, 9)
    manager.check()
    _, shared = manager.reserve(20, tokens, 9)
    assert shared == 8
    manager.check()
    manager.release(a)
    manager.check()
    manager.release(b)
    manager.check()


def test_blocks_that_are_reserved_are_promised_all_they_may_need() -> None:
    manager = BlockManager(functools.partial(SimulatedMemory, 8, (1,)), (None,), 4)
    table, _ = manager.reserve(24, (), 4)
    assert (len(manager.live), manager.promised_sectors(), manager.free_blocks()) == (1, 5, 2)
    with pytest.raises(Overloaded, match="no blocks for 12 tokens of a request of 32 tokens now"):
        manager.reserve(32, (), 12)
    with pytest.raises(CapacityError, match="never fits"):
        manager.reserve(40, (), 4)
    manager.check()
    assert (len(manager.live), manager.promised_sectors()) == (1, 5), "nothing has changed"
    assert manager.grow(table, 24) is not None
    manager.release(table)
    manager.release(table)
    assert (len(manager.live), manager.free_blocks()) == (0, 8)
    manager.check()


def test_a_sequence_whose_blocks_are_all_shared_comes_only_where_there_is_room_for_it() -> None:
    manager = BlockManager(functools.partial(SimulatedMemory, 12, (1,)), (None,), 4)
    tokens = tuple(range(10))
    first, _ = manager.reserve(32, tokens, 9)
    manager.share_computed(first, tokens, 9)
    manager.memory.limit = 5  # less than the first one may still need, as it came before
    with pytest.raises(Overloaded):
        manager.reserve(20, tokens[:9], 8)
    manager.check()
    assert manager.grow(first, 32) is not None
