"""How many batches an engine has in flight: for the stages of its path, or the copies of its layers."""

from __future__ import annotations

from elastic.engines.continuous.ranks.hosted_stages import HostedStages
from elastic.engines.continuous.ranks.layer_exchange import LayerExchange
from elastic.engines.continuous.reports import EngineReports
from elastic.engines.continuous.step_loop import StepLoop
from elastic.engines.core.step_budget import CostBudget, PathBudget
from elastic.engines.pipeline.batches import BatchCount
from elastic.engines.pipeline.home import HomeExecutor
from elastic.engines.pipeline.path import LayerPath
from elastic.errors import StateError, require_count, require_whole
from elastic.planning.pipeline.chunk_cost import ChunkCost

LEAST_SHARE = 4
"""Steps of equal cost have this part of `max_batch_tokens` at least: at the end of the longest prompts."""


class Cohorts:
    """Thread-safe; not for listeners."""

    def __init__(
        self,
        loop: StepLoop,
        home: HomeExecutor,
        stages: HostedStages,
        exchange: LayerExchange,
        reports: EngineReports,
        count: int | None,
        max_batch_tokens: int,
    ) -> None:
        """`count`: as `set_cohorts` has it."""
        self._loop, self._home, self._stages, self._exchange, self._reports = loop, home, stages, exchange, reports
        self._count, self._most, self._batches = count, max_batch_tokens, BatchCount()

    def set_cohorts(self, cohorts: int | None) -> None:
        """Have as many batches in flight, None: as many as the stages need; requests that live are shared out anew."""
        require_count(cohorts, "cohorts")

        def share_out() -> None:
            self._loop.settle_intact()
            if (copies := self._home.path.copies) > 1:
                raise StateError(f"cohorts={cohorts}: the layers have {copies} copies; have them be one first")
            self._count = cohorts
            self._use(cohorts or self._home.cohorts)

        self._loop.between_steps(share_out)

    def set_copies(self, copies: int) -> LayerPath:
        """Have requests be shared out among so many copies of the layers, each with a batch in flight; return the path.

        All copies are where the layers are now. Shards of one can then go to another rank: they are a replica there, of
        which the copy's requests have their keys and values. Raises `ConfigError` while copies are at different ranks,
        `RankLost`.
        """
        require_whole(copies, "copies")

        def share_out() -> LayerPath:
            self._loop.settle_intact()
            self._exchange.require_none()
            path = self._home.path.with_copies(copies)
            self._reports.end()
            self._home.share_out(path)
            self.share_out(copies)
            self._reports.begin()
            return path

        return self._loop.between_steps(share_out)

    def use_cost(self, cost: ChunkCost) -> None:
        """Have steps cost the same while other ranks compute layers, so that these do not wait for each other.

        Before the engine is started.
        """
        scheduler, most = self._loop.scheduler, self._most
        equal = CostBudget(cost, max(1, most // LEAST_SHARE), most, usual=most)
        scheduler.budget = PathBudget(scheduler.budget, equal, lambda: bool(self._home.path.helpers))

    # -- inside the engine, on the loop's thread

    def fill_stages(self) -> None:
        """Have as many batches in flight as the stages of the path need, unless somebody has said how many."""
        path = self._home.path
        if self._count is not None or path.copies > 1:
            return
        stages = [(home, stage) for home, stage in list(self._stages.by_home.items()) if not stage.ended]
        others = {home: stage.steps for home, stage in stages if path.home in stage.path.ranks}
        count = self._batches.of(path, self._loop.scheduler.steps, others)
        if count != self._home.cohorts and self._loop.lost is None:
            self._loop.settle_all()
            self._use(count)

    def share_out(self, copies: int) -> None:
        """Have live sequences be shared out among copies of the layers, as many batches each; no step is in flight."""
        cohorts = copies * -(-(self._count or 1) // copies)
        self._loop.scheduler.set_copies(copies, cohorts)
        self._home.set_cohorts(cohorts)

    def _use(self, count: int) -> None:
        """Have so many batches in flight; none is."""
        self._loop.scheduler.set_cohorts(count)
        self._home.set_cohorts(count)
