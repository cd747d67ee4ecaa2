"""One pass of a batch through a group of replicated layers: scattered where it begins, gathered where it ends."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from elastic.errors import StateError
from elastic.hooks.interceptor import Args, Kwargs
from elastic.hooks.replicas.replica import ReplicaGroup
from elastic.hooks.replicas.split_rows import BY_ROWS, BatchSlice, LayerInputs, SplitSpec, gather, hidden_of
from elastic.hooks.replicas.timing import PendingTiming
from elastic.hooks.replicas.worker import Mark, ReplicaShard, add_marks, mark, use_threads
from elastic.weights import batch_context


class ScatterGatherPass:
    """One pass of a batch through a replica group.

    The first place that has rows computes them in this thread, the others theirs in their workers.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        inputs: LayerInputs,
        counts: Sequence[int],
        caches: Sequence[Any],
        spec: SplitSpec = BY_ROWS,
    ) -> None:
        """`counts` are the rows of each place (by `BY_REQUESTS`, tokens), `caches` the KV cache that each one sees."""
        self._group = group
        self._step = 0  # layers that are done
        self.ended = False
        """True once all layers of the group are done."""
        self._marks: list[tuple[Mark, Mark]] = []
        batch = sum(counts)
        rows = [
            BatchSlice(stop - count, stop, batch, device, spec)
            for stop, count, device in zip(accumulate(counts), counts, group.devices, strict=True)
        ]
        self._place = place = next(place for place, count in enumerate(counts) if count)
        self._device, self._rows, self._cache = group.devices[place], rows[place], caches[place]
        self._hidden = self._rows.take(inputs.hidden)
        self._row_tokens = inputs.hidden.shape[1] if spec is BY_ROWS else 1
        self._all_threads = torch.get_num_threads()
        on_cpu = sum(device.type == "cpu" for device, count in zip(group.devices, counts, strict=True) if count)
        self._threads = max(1, self._all_threads // max(1, on_cpu))  # together no more than one place had
        self._shards = [
            ReplicaShard(worker, shard_rows, inputs.hidden, cache, self._threads)
            for worker, shard_rows, cache in zip(group.workers, rows[1:], caches[1:], strict=True)
            if shard_rows.count and shard_rows is not self._rows
        ]

    def enter(self, layer: int, inputs: LayerInputs) -> tuple[Args, Kwargs]:
        """Begin the next layer; returns what its own forward is called with.

        Raises `NotSplittable` for unknown inputs, with nothing begun, and `StateError` for another layer than the next.
        """
        group, step = self._group, self._step
        if self.ended or group.layers[step] != layer:
            raise StateError(
                f"layer {layer} was called out of its turn in the replicated run {group.layers}: this model cannot "
                "be computed by rows; evict the replicas"
            )
        if step and inputs.hidden is not self._hidden:
            raise StateError(
                f"hidden states were changed between layers {group.layers[step - 1]} and {layer}, of the rows of one "
                "place alone; evict the replicas"
            )
        local = inputs.take(self._rows, self._cache)
        remote = [inputs.take(shard.rows, shard.cache) for shard in self._shards]
        for shard, shard_inputs in zip(self._shards, remote, strict=True):
            shard.step(group.replicas[step][shard.worker.place].copy.module, shard_inputs)
        use_threads(self._device, self._threads)
        self._rows.replica = group.replicas[step][group.places[self._place]].copy.module if self._place else None
        batch_context.thread.share = self._rows
        self._began = mark(self._device)
        return local.call(inputs.hidden if step and not self._place else self._hidden)

    def leave(self, output: Any) -> Any:
        """End the layer, with the output of its own forward; after the last one, returns the output for all rows."""
        add_marks(self._marks, self._began, mark(self._device))
        batch_context.thread.share = None
        self._hidden = hidden_of(output)
        self._step += 1
        self.ended = self._step == len(self._group.layers)
        if not self.ended:
            return None
        device = self._group.devices[0]
        try:
            outputs = [output, *(shard.finish(device) for shard in self._shards)]
        except BaseException:
            self.abort()
            raise
        self._leave_thread()
        counts = [self._rows.count, *(shard.rows.count for shard in self._shards)]
        return gather(outputs, counts, device, self._rows.spec.axis)

    def abort(self) -> None:
        """Return when nothing is computed for the pass any more, also half way through it."""
        for shard in self._shards:
            shard.abort()
        self._leave_thread()

    def _leave_thread(self) -> None:
        """Leave this thread as it was before the pass."""
        use_threads(self._device, self._all_threads)
        batch_context.thread.share = None

    def timings(self) -> list[PendingTiming]:
        """Return when each place computed its rows."""
        measured = [(self._group.places[self._place], self._device, self._rows.count, self._marks)]
        measured += [(s.worker.place, s.worker.device, s.rows.count, s.marks) for s in self._shards]
        return [
            PendingTiming(place, device, rows, rows * self._row_tokens, marks)
            for place, device, rows, marks in measured
        ]
