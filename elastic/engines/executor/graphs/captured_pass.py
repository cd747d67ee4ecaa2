"""One forward pass as a graph: its inputs are taken over, and attention is called over the cache of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from elastic.engines.executor.graphs.graph_memory import GraphMemory
from elastic.engines.executor.graphs.operator_graph import OperatorGraph
from elastic.engines.executor.graphs.piecewise_cuda_graph import PiecewiseCudaGraph
from elastic.kvcache.score_terms import ScoreTerms
from elastic.weights.decoder import PAGED_CACHE

Inputs = dict[str, Any]
"""Keyword arguments of a forward pass, with the step's cache as `PAGED_CACHE`."""
PassGraph = OperatorGraph | PiecewiseCudaGraph
"""On a CPU, and on a GPU."""


@dataclass(eq=False)
class _StepCache:
    """The cache of the step that is computed. It knows no graph: else graphs would wait for the garbage collector."""

    cache: Any = None

    @contextmanager
    def of(self, cache: Any) -> Iterator[None]:
        """Attend over the cache of a step."""
        self.cache = cache
        try:
            yield
        finally:
            self.cache = None

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        with_terms: bool,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend in one layer, all tensors said one by one; see `RequestSlice.attend`."""
        terms = ScoreTerms(softcap, sinks) if with_terms else None
        attended: torch.Tensor = self.cache.attend(layer, query, key, value, scaling, terms=terms)
        return attended


@dataclass(eq=False)
class _CapturedAttention:
    """Stands for the cache while a pass is captured."""

    graph: PassGraph
    step: _StepCache

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        terms: ScoreTerms | None = None,
    ) -> torch.Tensor:
        """Attend in one layer; see `RequestSlice.attend`."""
        softcap, sinks = (None, None) if terms is None else (terms.softcap, terms.sinks)
        return self.graph.call(self.step.attend, layer, query, key, value, scaling, terms is not None, softcap, sinks)


class NobodysCache:
    """Stands for the cache in passes over tokens that are nobody's: nothing is written, and zeros come out."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        terms: ScoreTerms | None = None,
    ) -> torch.Tensor:
        """Return zeros of the shape that `RequestSlice.attend` has for these."""
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


class CapturedPass:
    """A forward pass, captured for keyword arguments of the same names, and of the same shapes but for the padding."""

    def __init__(self, inputs: Inputs, device: torch.device, lengths: Mapping[str, int]) -> None:
        """`lengths`: those to which the last dimensions of tensors of these names are padded."""
        self._graph: PassGraph = OperatorGraph() if device.type == "cpu" else PiecewiseCudaGraph(device)
        self._step = _StepCache()
        self._attention = _CapturedAttention(self._graph, self._step)
        self._inputs: Inputs = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        self._inputs[PAGED_CACHE] = self._attention
        self._lengths = lengths
        for name, length in lengths.items():
            self._inputs[name] = pad(inputs[name], (0, length - inputs[name].shape[-1]))
        self.checked = False
        """Whether a replay gave what the model gave."""

    def capture(self, forward: Callable[..., Any], inputs: Inputs, memory: GraphMemory) -> Any:
        """Return what `forward` returns for the inputs. Raises `CaptureRefused`, and what `forward` raises."""
        with self._step.of(inputs[PAGED_CACHE]):
            return self._graph.capture(lambda: forward(**self._inputs), memory)

    def fits(self, inputs: Inputs) -> bool:
        """Return whether these differ from those of the capture in the contents of tensors and the padding alone."""
        if inputs.keys() != self._inputs.keys():
            return False
        return all(
            inputs[name].shape[:-1] == own.shape[:-1] and (name in self._lengths or inputs[name].shape == own.shape)
            if isinstance(own, torch.Tensor)
            else own in (inputs[name], self._attention)
            for name, own in self._inputs.items()
        )

    def call(self, forward: Callable[..., Any], inputs: Inputs) -> Any:
        """Return what `forward` returns for `inputs`, padded as in replays."""
        self._fill(inputs)
        return forward(**{**self._inputs, PAGED_CACHE: inputs[PAGED_CACHE]})

    def replay(self, inputs: Inputs) -> Any:
        """Return the same, in tensors that the next replay of any graph overwrites."""
        self._fill(inputs)
        with self._step.of(inputs[PAGED_CACHE]):
            return self._graph.replay()

    def _fill(self, inputs: Inputs) -> None:
        """Take over the contents; behind them stays what was there, as good as any."""
        for name, own in self._inputs.items():
            if isinstance(own, torch.Tensor):
                given = inputs[name]
                own[..., : given.shape[-1]].copy_(given)
