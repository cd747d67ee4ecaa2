"""The threads of replicas: one for each place, and on CUDA a stream, beside the forward pass of the model."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from elastic.clock import submit
from elastic.hooks.replicas.split_rows import BatchSlice, LayerInputs, hidden_of
from elastic.memory.backends.streams import new_stream, on_stream
from elastic.weights import batch_context

Mark = float | torch.cuda.Event
"""A moment: seconds of `time.perf_counter`, or an event of a device."""


class TorchThreadState:
    """Captured grad, inference and autocast state of a thread, re-entered on a worker thread."""

    def __init__(self, device: torch.device) -> None:
        kind = device.type
        self._context = contextvars.copy_context()
        self._inference = torch.is_inference_mode_enabled()
        self._grad = torch.is_grad_enabled()
        self._autocast: Callable[[], Any] = nullcontext
        if torch.is_autocast_enabled(kind):
            dtype, cached = torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
            self._autocast = lambda: torch.autocast(kind, dtype, cache_enabled=cached)

    def run(self, work: Callable[[], None]) -> None:
        """Do work as the captured thread would."""
        with torch.inference_mode(self._inference), torch.set_grad_enabled(self._grad), self._autocast():
            self._context.run(work)


class ReplicaWorker:
    """The thread of one place. Work that is put in is done in its order."""

    def __init__(self, place: str, device: torch.device) -> None:
        self.place = place
        self.device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"elastic-replicas-{place}")
        on_cuda = device.type == "cuda"
        self._stream = new_stream(device) if on_cuda else None

    def put(self, work: Callable[[], None]) -> Future[None]:
        """Have work done on the thread, on its stream."""
        return submit(self._thread, on_stream(self._stream)(work))

    def finish_queued_work(self) -> None:
        """Wait until what the thread has queued on its stream is over; on a CPU nothing is queued."""
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """Finish, and take no more. Can be called twice."""
        self._thread.shutdown()


class ReplicaShard:
    """Some rows of a batch, computed by the replicas of one place, a layer after another.

    A layer that fails ends it: `finish` raises what it raised. What it is given is kept as long as the shard is: on
    CUDA until what comes next is ordered after it.
    """

    def __init__(self, worker: ReplicaWorker, rows: BatchSlice, hidden: torch.Tensor, cache: Any, threads: int) -> None:
        """`hidden` are those of the whole batch, [batch, tokens, hidden]; `cache` is the KV cache of these rows."""
        self.worker = worker
        self.rows = rows
        self.cache = cache
        self._home = hidden.device
        self._hidden = rows.take(hidden)
        self.marks: list[tuple[Mark, Mark]] = []
        """When a layer began and ended; on CUDA the first began and the last ended."""
        self.output: Any = None
        self._thread_state = TorchThreadState(worker.device)
        self._threads = threads
        self._error: BaseException | None = None
        self._last: Future[None] | None = None

    def step(self, layer: nn.Module, inputs: LayerInputs) -> None:
        """Have the next layer computed with these inputs, of its rows."""
        after: list[torch.cuda.Event] = []
        if self.rows.fresh:  # what was taken is still being copied
            cuda = {device for device in (self._home, self.worker.device) if device.type == "cuda"}
            after = [torch.cuda.current_stream(device).record_event() for device in cuda]
            self.rows.fresh = False
        self._last = self.worker.put(lambda: self._compute(layer, inputs, after))

    def abort(self) -> None:
        """Return when nothing is computed any more, on the thread or its stream, so that what was given can go."""
        self._join()
        self.worker.finish_queued_work()

    def finish(self, device: torch.device) -> Any:
        """Return the output of the last layer, for what comes next on `device`. Raises what a layer raised."""
        error, self._error = self._join(), None
        try:
            if error is not None:
                raise error
        finally:
            del error  # it knows this frame
        if self.worker.device.type == "cuda":
            stop = self.marks[-1][1]
            assert isinstance(stop, torch.cuda.Event)
            _order_after(stop, device)
            for tensor in self.output if isinstance(self.output, tuple | list) else (self.output,):
                if isinstance(tensor, torch.Tensor):
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return self.output

    def _join(self) -> BaseException | None:
        """Wait until the thread computes nothing; return the error of a layer, if one failed."""
        if self._last is not None:
            self._last.result()
        return self._error

    def _compute(self, layer: nn.Module, inputs: LayerInputs, after: Sequence[torch.cuda.Event]) -> None:
        if self._error is not None:
            return
        try:
            use_threads(self.worker.device, self._threads)
            for event in after:
                _order_after(event, self.worker.device)
            self._thread_state.run(lambda: self._forward(layer, inputs))
        except BaseException as error:  # for `finish`, in the thread of the forward pass
            self._error = error

    def _forward(self, layer: nn.Module, inputs: LayerInputs) -> None:
        device = self.worker.device
        start = mark(device)
        args, kwargs = inputs.call(self._hidden)
        batch_context.thread.share = self.rows
        try:
            self.output = layer(*args, **kwargs)
        finally:
            batch_context.thread.share = None
        self._hidden = hidden_of(self.output)
        add_marks(self.marks, start, mark(device))


def _order_after(event: torch.cuda.Event, device: torch.device) -> None:
    """Have what this thread begins on a device from now on come after an event."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_event(event)
    else:
        event.synchronize()


def mark(device: torch.device) -> Mark:
    """Return the moment now, or when the device gets there."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def add_marks(marks: list[tuple[Mark, Mark]], start: Mark, stop: Mark) -> None:
    """Add a layer that was computed: on a CPU a pair of its own, on CUDA as part of all that came before."""
    marks.append((start, stop) if isinstance(start, float) or not marks else (marks.pop()[0], stop))


def use_threads(device: torch.device, count: int) -> None:
    """Have operations of this thread on a CPU use so many threads."""
    if device.type == "cpu" and torch.get_num_threads() != count:
        torch.set_num_threads(count)
