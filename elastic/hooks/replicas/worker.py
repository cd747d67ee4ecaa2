"""Where replicas compute: for each place a thread, and on CUDA a stream, beside the forward pass of the model."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from elastic.hooks.replicas.split_rows import BatchSlice, LayerInputs, hidden_of
from elastic.weights.batch_context import set_batch_share

Mark = float | torch.cuda.Event
"""A moment: seconds of `time.perf_counter`, or an event of a device."""


class TorchThreadState:
    """What torch knows by thread, as the calling thread has it; to be entered in another one."""

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
        self._context.run(self._run, work)

    def _run(self, work: Callable[[], None]) -> None:
        with torch.inference_mode(self._inference), torch.set_grad_enabled(self._grad), self._autocast():
            work()


class ReplicaWorker:
    """The thread of one place. Work that is put in is done in its order."""

    def __init__(self, place: str, device: torch.device) -> None:
        self.place = place
        self.device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"elastic-replicas-{place}")
        on_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_cuda else None  # type: ignore[no-untyped-call]

    def put(self, work: Callable[[], None]) -> Future[None]:
        return self._thread.submit(self._do, work)

    def close(self) -> None:
        """Finish, and take no more. Can be called twice."""
        self._thread.shutdown()

    def _do(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            work()


class ReplicaShard:
    """Some rows of a batch on their way through the replicas of one place, a layer after another.

    A layer that fails ends it: `finish` raises what it raised. What it is given is kept as long as the part is: on
    CUDA until what comes next is ordered after it.
    """

    def __init__(self, lane: ReplicaWorker, rows: BatchSlice, hidden: torch.Tensor, cache: Any, threads: int) -> None:
        self.lane = lane
        self.rows = rows
        self.cache = cache
        self._home = hidden.device
        self._hidden = rows.take(hidden)
        self.marks: list[tuple[Mark, Mark]] = []
        """When a layer began and ended; on CUDA the first began and the last ended."""
        self.output: Any = None
        self._mode = TorchThreadState(lane.device)
        self._threads = threads
        self._error: BaseException | None = None
        self._last: Future[None] | None = None

    def step(self, layer: nn.Module, inputs: LayerInputs) -> None:
        """Have the next layer computed with these inputs, of its rows."""
        devices = {self._home, self.lane.device} if self.rows.fresh else set()
        after, self.rows.fresh = [event for event in map(record, devices) if event is not None], False
        self._last = self.lane.put(lambda: self._compute(layer, inputs, after))

    def join(self) -> BaseException | None:
        """Return when it computes no more; what went wrong, if anything."""
        if self._last is not None:
            self._last.result()
        return self._error

    def finish(self, device: torch.device) -> Any:
        """The output of the last layer, for what comes next on `device`. Raises what a layer raised."""
        error, self._error = self.join(), None
        try:
            if error is not None:
                raise error
        finally:
            del error  # it knows this frame
        self._order_before(device)
        return self.output

    def _compute(self, layer: nn.Module, inputs: LayerInputs, after: Sequence[torch.cuda.Event]) -> None:
        if self._error is not None:
            return
        try:
            use_threads(self.lane.device, self._threads)
            for event in after:
                go_on_after(event, self.lane.device)
            self._mode.run(lambda: self._forward(layer, inputs))
        except BaseException as error:  # for `finish`, in the thread of the forward pass
            self._error = error

    def _forward(self, layer: nn.Module, inputs: LayerInputs) -> None:
        device = self.lane.device
        set_batch_share(self.rows.count, self.rows.batch)
        start = mark(device)
        args, kwargs = inputs.call(self._hidden)
        self.output = layer(*args, **kwargs)
        self._hidden = hidden_of(self.output)
        add_marks(self.marks, start, mark(device))

    def _order_before(self, device: torch.device) -> None:
        if self.lane.device.type != "cuda":
            return
        stop = self.marks[-1][1]
        assert isinstance(stop, torch.cuda.Event)
        go_on_after(stop, device)
        for tensor in self.output if isinstance(self.output, tuple | list) else (self.output,):
            if isinstance(tensor, torch.Tensor):
                tensor.record_stream(torch.cuda.current_stream(tensor.device))


def record(device: torch.device) -> torch.cuda.Event | None:
    """An event after all that this thread has begun on a device."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def go_on_after(event: torch.cuda.Event, device: torch.device) -> None:
    """Have what this thread begins on a device from now on come after an event."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_event(event)
    else:
        event.synchronize()


def mark(device: torch.device) -> Mark:
    """Now, or when the device gets there."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def add_marks(marks: list[tuple[Mark, Mark]], start: Mark, stop: Mark) -> None:
    """A layer was computed: on a CPU a pair of its own, on CUDA as part of all that came before."""
    marks.append((start, stop) if isinstance(start, float) or not marks else (marks.pop()[0], stop))


def use_threads(device: torch.device, count: int) -> None:
    """Have what this thread computes on a CPU use so many."""
    if device.type == "cpu" and torch.get_num_threads() != count:
        torch.set_num_threads(count)
