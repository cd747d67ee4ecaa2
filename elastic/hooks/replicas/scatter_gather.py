"""One pass of a batch through a run of replicated layers: scattered where it begins, gathered where it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elastic.errors import StateError
from elastic.hooks.forward_override import call_next_instead
from elastic.hooks.interceptor import Args, Kwargs
from elastic.hooks.replicas.replica import HOME, ReplicaGroup
from elastic.hooks.replicas.split_rows import BY_ROWS, BatchSlice, LayerInputs, SplitSpec, gather, hidden_of
from elastic.hooks.replicas.timing import PendingTiming
from elastic.hooks.replicas.worker import Mark, ReplicaShard, add_marks, mark, use_threads
from elastic.weights.batch_context import clear_batch_share, set_batch_share


class ScatterGatherPass:
    """One pass of a batch through a run.

    `here`, the first place that has rows, computes them in this thread, the others theirs in their lanes.
    """

    def __init__(
        self,
        run: ReplicaGroup,
        inputs: LayerInputs,
        counts: Sequence[int],
        caches: Sequence[Any],
        reading: SplitSpec = BY_ROWS,
    ) -> None:
        self.run = run
        self._at = 0
        self._marks: list[tuple[Mark, Mark]] = []
        self._threads = torch.get_num_threads()
        batch, stops = sum(counts), [sum(counts[: i + 1]) for i in range(len(counts))]
        devices = [run.device, *(lane.device for lane in run.lanes)]
        rows = [BatchSlice(b - n, b, batch, d, reading) for b, n, d in zip(stops, counts, devices, strict=True)]
        here = next(place for place, count in enumerate(counts) if count)
        self._place, self._name, self._device = run.places[here], run.names[here], devices[here]
        self._rows, self._cache, self._hidden = rows[here], caches[here], rows[here].take(inputs.hidden)
        self._row_tokens = inputs.hidden.shape[1] if reading is BY_ROWS else 1
        self._share = self._divide([d for d, count in zip(devices, counts, strict=True) if count])
        self._parts = [
            ReplicaShard(lane, its, inputs.hidden, cache, self._share)
            for lane, its, cache in zip(run.lanes, rows[1:], caches[1:], strict=True)
            if its.count and its is not self._rows
        ]

    def enter(self, layer: int, inputs: LayerInputs) -> tuple[Args, Kwargs]:
        """Begin the next layer: what its own forward is called with. Raises `NotSplittable`, with nothing begun."""
        if self._at == len(self.run.layers) or self.run.layers[self._at] != layer:
            raise StateError(
                f"layer {layer} was called out of its turn in the replicated run {self.run.layers}: this model cannot "
                "be computed by rows; evict the replicas"
            )
        own = inputs.take(self._rows, self._cache)
        theirs = [inputs.take(part.rows, part.cache) for part in self._parts]
        for part, its in zip(self._parts, theirs, strict=True):
            part.step(self.run.replicas[self._at][part.lane.place].skeleton.module, its)
        use_threads(self._device, self._share)
        set_batch_share(self._rows.count, self._rows.batch)
        call_next_instead(self.run.replicas[self._at][self._place].skeleton.module if self._place is not HOME else None)
        self._began = mark(self._device)
        return own.call(inputs.hidden if self._at and self._place is HOME else self._hidden)

    def leave(self, output: Any) -> Any:
        """The own forward of the layer has ended: after the last one, the output for all rows."""
        add_marks(self._marks, self._began, mark(self._device))
        clear_batch_share()
        self._hidden = hidden_of(output)
        self._at += 1
        return None if not self.ended else self._gather(output)

    @property
    def ended(self) -> bool:
        return self._at == len(self.run.layers)

    def abort(self) -> None:
        """The forward pass has ended half way: return when nothing is computed for it any more."""
        for part in self._parts:
            part.join()
        use_threads(self._device, self._threads)
        clear_batch_share()
        call_next_instead(None)

    def timings(self) -> list[PendingTiming]:
        """What each place did, and when."""
        mine = PendingTiming(self._name, self._device, self._rows.count, self._tokens(self._rows), self._marks)
        others = [
            PendingTiming(part.lane.place, part.lane.device, part.rows.count, self._tokens(part.rows), part.marks)
            for part in self._parts
        ]
        return [mine, *others]

    def _tokens(self, rows: BatchSlice) -> int:
        return rows.count * self._row_tokens

    def _gather(self, output: Any) -> Any:
        try:
            outputs = [output, *(part.finish(self.run.device) for part in self._parts)]
        finally:
            self.abort()
        counts = [self._rows.count, *(part.rows.count for part in self._parts)]
        return gather(outputs, counts, self.run.device, self._rows.reading.axis)

    def _divide(self, devices: Sequence[torch.device]) -> int:
        """Threads for each place on a CPU, so that they are no more together than one place had."""
        return max(1, self._threads // max(1, sum(device.type == "cpu" for device in devices)))
