"""vLLM's scheduler with one thing more: blocks in the way of a shrink are moved, with vLLM's own block copies."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import AttentionSpec

from elastic.engines.vllm.connector import ElasticConnector
from elastic.engines.vllm.kv.moves import BlockMoves, move_blocks
from elastic.engines.vllm.scheduler_side import SchedulerSide


class ElasticScheduler(Scheduler):  # type: ignore[misc]
    """`scheduler_cls`: for engines that run one step at a time, with the first model runner.

    The workers learn of a moved block as of a request that was resumed, with its whole table; one with tokens on their
    way (asynchronous scheduling) cannot be resumed. Layers with states, and a user's own connector that may be reading
    blocks, are not moved either: then a shrink waits until requests end.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._side: SchedulerSide | None = None
        connectors = getattr(self.connector, "sub_connectors", [self.connector])
        ours = next((c for c in connectors if isinstance(c, ElasticConnector)), None)
        if ours is not None and self.vllm_config.max_concurrent_batches == 1 and not self.use_v2_model_runner:
            specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
            self._side = ours.scheduler
            if self._side is not None:
                is_attention = all(isinstance(spec, AttentionSpec) for spec in specs)
                self._side.coordinator.moving = is_attention and len(connectors) == 1

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule as vLLM does; then move what is in the way of a shrink."""
        output = super().schedule(*args, **kwargs)
        side = self._side
        if side and side.coordinator.moving and side.coordinator.capacity.leaving:
            tables = [m.req_to_blocks for m in self.kv_cache_manager.coordinator.single_type_managers]
            fixed = {block for copy in output.kv_cache_block_copies or () for block in copy}
            fixed.update(output.new_block_ids_to_zero or ())
            scheduled = set(output.scheduled_cached_reqs.req_ids)
            with side.lock:
                moves = move_blocks(side.coordinator.capacity, tables, scheduled, fixed)
            side.coordinator.moved_blocks += len(moves.copies)
            self._announce(output, moves)
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

    def _announce(self, output: Any, moves: BlockMoves) -> None:
        """Have the workers copy the blocks, and take up the requests again with their new tables."""
        if not moves.copies:
            return
        copies = [KVCacheBlockCopy(*copy) for copy in moves.copies]
        output.kv_cache_block_copies = [*(output.kv_cache_block_copies or ()), *copies]
        cached = output.scheduled_cached_reqs
        for index, request in enumerate(cached.req_ids):
            if request in moves.requests:
                cached.resumed_req_ids.add(request)
                cached.new_block_ids[index] = self.kv_cache_manager.get_block_ids(request)
