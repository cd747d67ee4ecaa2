"""A computation on a GPU as CUDA graphs: one for each piece between calls that are not looked into.

These change from step to step, as attention does, so they are called in between (vLLM's piecewise graphs are cut so by
its compiler; here the pieces end where the calls are made). Kernels of a capture do not run: each piece is replayed as
soon as it is captured, so that what is called next has its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from elastic.engines.executor.graphs.graph_memory import GraphMemory
from elastic.engines.executor.graphs.operator_graph import CaptureRefused
from elastic.memory.backends.streams import capture_lock


class _Call(NamedTuple):
    """A call between two pieces."""

    function: Callable[..., torch.Tensor]
    args: tuple[Any, ...]
    result: torch.Tensor
    """What it returns is copied to, where the next piece reads it."""


class PiecewiseCudaGraph:
    """A computation, captured once: what `OperatorGraph` is on a CPU. Weights are known by their addresses alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._calls: list[_Call] = []
        self._output: Any = None

    def capture(self, run: Callable[[], Any], memory: GraphMemory) -> Any:
        """Run a computation piece by piece and record it; return what it returned, which replays overwrite.

        Raises `CaptureRefused` where a capture fails: it waits for the device, for one, to look in a tensor.
        """
        self._pool, self._side = memory.cuda_pool(self._device)
        self._stream = torch.cuda.current_stream(self._device)
        try:
            with capture_lock:
                self._begin_piece()
                self._output = run()
                self._end_piece()
        except Exception as error:
            with suppress(RuntimeError):  # the driver says once more that the capture failed
                self._graphs[-1].capture_end()
            raise CaptureRefused(str(error)) from error
        finally:
            torch.cuda.set_stream(self._stream)
        return self._output

    def call(self, function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        """In a capture: call a function that replays call as it is; see `OperatorGraph.call`."""
        self._end_piece()
        result = function(*args).contiguous()
        self._calls.append(_Call(function, args, result))
        self._begin_piece()
        return result

    def replay(self) -> Any:
        """Compute again, with what is in the captured inputs now; return what `run` did, in the same tensors."""
        first, *others = self._graphs
        first.replay()
        for graph, (function, args, result) in zip(others, self._calls, strict=True):
            result.copy_(function(*args))
            graph.replay()
        return self._output

    def _begin_piece(self) -> None:
        torch.cuda.set_stream(self._side)  # the default stream cannot be captured
        self._graphs.append(torch.cuda.CUDAGraph())
        self._graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")  # others may map pages

    def _end_piece(self) -> None:
        self._graphs[-1].capture_end()
        torch.cuda.set_stream(self._stream)
        self._graphs[-1].replay()
