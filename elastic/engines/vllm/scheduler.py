"""vLLM's scheduler with three things more, all of which it says by its own means.

Blocks in the way of a shrink are moved, with vLLM's own block copies; requests that wait are not asked for again while
nothing has changed; and what waits for the blocks of aborted requests is settled.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import AttentionSpec

from elastic.engines.vllm.connector import ElasticConnector
from elastic.engines.vllm.kv.moves import BlockMoves, move_blocks
from elastic.engines.vllm.scheduler_side import SchedulerSide
from elastic.errors import ConfigError


class ElasticScheduler(Scheduler):  # type: ignore[misc]
    """`scheduler_cls`, for engines that schedule ahead as well.

    Blocks are moved on a CPU, where one step is scheduled at a time, with the first model runner. The workers learn of
    a moved block as of a request that was resumed, with its whole table; one with tokens on their way (asynchronous
    scheduling) cannot be resumed. Layers with states, and a user's own connector that may be reading blocks, are not
    moved either: then a shrink waits until requests end.
    """

    def __new__(cls, *args: Any, vllm_config: Any, **kwargs: Any) -> ElasticScheduler:
        """Make one that schedules ahead where vLLM does; a class derived from this one is as its author made it.

        Raises `ConfigError` for models with another scheduler.
        """
        if getattr(vllm_config, "diffusion_config", None) is not None:
            raise ConfigError(
                f"{vllm_config.model_config.model} generates by diffusion, for which vLLM has a scheduler of its own; "
                "run it in vLLM as it is"
            )
        ahead = vllm_config.scheduler_config.async_scheduling
        made: ElasticScheduler = super().__new__(ElasticAsyncScheduler if ahead and cls is ElasticScheduler else cls)
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        connectors = getattr(self.connector, "sub_connectors", [self.connector])
        sides = (c.scheduler for c in connectors if isinstance(c, ElasticConnector))
        self._side: SchedulerSide | None = next(sides, None)
        self._refused_at = -1  # the decision since which all that wait have been refused
        one_at_a_time = current_platform.is_cpu() and self.vllm_config.max_concurrent_batches == 1
        if self._side is not None and one_at_a_time and not self.use_v2_model_runner:
            specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
            is_attention = all(isinstance(spec, AttentionSpec) for spec in specs)
            self._side.coordinator.moving = self._side.movable and is_attention and len(connectors) == 1

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule as vLLM does; then move what is in the way of a shrink.

        Where all that wait were refused, and nothing has changed since, vLLM looks at none of them.
        """
        side = self._side
        if side is None:
            return super().schedule(*args, **kwargs)
        before, unpaused = side.decisions, self.pause_state is PauseState.UNPAUSED
        if unpaused and side.quiet and before == self._refused_at and side.refused == len(self.waiting):
            self._pause_state = PauseState.PAUSED_NEW
            try:
                output = super().schedule(*args, **kwargs)
            finally:
                self._pause_state = PauseState.UNPAUSED
        else:
            side.refused = 0
            output = super().schedule(*args, **kwargs)
            quiet = side.quiet and side.decisions == before
            self._refused_at = before if quiet and 0 < side.refused == len(self.waiting) else -1
        if not side.quiet and side.coordinator.moving and side.coordinator.capacity.leaving:
            self._move(side, output)
        return output

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """Abort requests; if none is left, what waited for their blocks is settled, since no step may follow."""
        finished = super().finish_requests(*args, **kwargs)
        if self._side is not None:
            self._side.step_ended()
        return finished

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Reset the prefix cache, but not while an idle engine's blocks are withdrawn."""
        if self._side is None:
            return bool(super().reset_prefix_cache(*args, **kwargs))
        with self._side.lock:
            return bool(super().reset_prefix_cache(*args, **kwargs))

    def _move(self, side: SchedulerSide, output: Any) -> None:
        """Move what is in the way of a shrink, with the step that was scheduled."""
        tables = [m.req_to_blocks for m in self.kv_cache_manager.coordinator.single_type_managers]
        fixed = {block for copy in output.kv_cache_block_copies or () for block in copy}
        fixed.update(output.new_block_ids_to_zero or ())
        scheduled = set(output.scheduled_cached_reqs.req_ids)
        with side.lock:
            moves = move_blocks(side.coordinator.capacity, tables, scheduled, fixed)
        side.coordinator.moved_blocks += len(moves.copies)
        if moves.copies:
            self._announce(output, moves)

    def _announce(self, output: Any, moves: BlockMoves) -> None:
        """Have the workers copy the blocks, and take up the requests again with their new tables."""
        copies = [KVCacheBlockCopy(*copy) for copy in moves.copies]
        output.kv_cache_block_copies = [*(output.kv_cache_block_copies or ()), *copies]
        cached = output.scheduled_cached_reqs
        for index, request in enumerate(cached.req_ids):
            if request in moves.requests:
                cached.resumed_req_ids.add(request)
                cached.new_block_ids[index] = self.kv_cache_manager.get_block_ids(request)


class ElasticAsyncScheduler(ElasticScheduler, AsyncScheduler):  # type: ignore[misc]
    """The same where steps are scheduled before those under way have ended."""
