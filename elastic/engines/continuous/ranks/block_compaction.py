"""Blocks of requests move together where a cap asks for fewer sectors than they lie in, but holds what they have.

So ranks that share layers can part although what has ended left its blocks free all over the sectors. (AMOEBA, section
3.1, defragments each time; here nothing moves while sectors suffice.)
"""

from __future__ import annotations

import logging

from elastic.engines.continuous.ranks.home_kv import HomeKV
from elastic.engines.continuous.step_loop import StepLoop
from elastic.engines.core.block_pool import BlockMoves
from elastic.engines.pipeline.home import HomeExecutor
from elastic.engines.pipeline.items import CopyBlocksItem, MoveBlocksItem
from elastic.engines.pipeline.stage_link import CopyAnswers, StageLink
from elastic.errors import ElasticError, RankLost

logger = logging.getLogger(__name__)
ANSWER_S = 30.0


def compact(loop: StepLoop, home: HomeExecutor, kv: HomeKV) -> bool:
    """Have blocks lie in as few sectors as hold them, if the cap is enough for these alone; return whether they do.

    On the loop's thread, between two steps. Not while layers change their rank, have several copies, or requests move.
    Nothing is told to be elsewhere before it is at all ranks, and nothing comes free before that was told: whoever goes
    on when one of them is killed finds what it knows of.
    """
    scheduler, cap = loop.scheduler, kv.memory.cap.sectors
    if cap is None or not home.links or home.path.copies > 1 or kv.memory.keep_sectors or scheduler.held:
        return False
    if not scheduler.blocks.fit_compacted(cap):
        return False
    loop.settle_all()
    if loop.lost is not None:
        return False
    with scheduler.blocks.compaction() as compaction:
        moves = compaction.moves
        try:
            _copy(home, kv, moves)
        except (ElasticError, RuntimeError) as error:  # a rank has gone, or no memory to copy by way of
            logger.info("blocks of rank %s stay where they are: %s", home.rank, error)
            return False
        with kv.memory.lock:
            compaction.move()
        kv.cache.renumber(moves)
        for link in _links(home):
            try:
                link.send(MoveBlocksItem(moves))
            except RankLost as error:  # the next step says so, too
                logger.info("%s", error)
        if scheduler.journal is not None:
            scheduler.journal.note_moved(scheduler.begun)
            scheduler.journal.tell(always=True)
    return True


def _copy(home: HomeExecutor, kv: HomeKV, moves: BlockMoves) -> None:
    """Copy blocks at all ranks of the path. Raises `RankLost`, `StateError` for a rank that could not, and as torch."""
    home.confirm()
    home.flush()
    asked: list[StageLink] = []
    try:
        for link in _links(home):
            link.send(CopyBlocksItem(moves))
            asked.append(link)
        kv.cache.copy(moves)
    finally:
        CopyAnswers(asked, ANSWER_S).wait()


def _links(home: HomeExecutor) -> list[StageLink]:
    """Return those to the ranks that compute layers, and know sequences."""
    return [home.links[rank] for rank in home.path.helpers]
