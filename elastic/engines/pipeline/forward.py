"""One forward pass of a wrapped model of whose layers other ranks compute some, or parts.

Every rank runs the model on the ids of the whole step: embedding, masks and rotary embeddings are computed everywhere,
and only hidden states go from rank to rank. A layer that is not the rank's own is passed over: it returns what it was
given, or, in front of one that is, what a rank before has sent. (KunServe, section 4; the way of `LayerPath`.) Of a
layer that several ranks compute, each has its heads and its part of the feed-forward networks; what these give is
exchanged, so that all of them return the same. (AMOEBA, section 3)
"""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from elastic.engines.pipeline.path import LayerPart, StagePlan
from elastic.engines.pipeline.tensor_parallel.cut_modules import CutModules
from elastic.engines.pipeline.tensor_parallel.exchange import Awaited, ShardedCache, StepExchange
from elastic.engines.pipeline.transport import StepFailure, Transport
from elastic.engines.pipeline.turn import Turn
from elastic.errors import ConfigError, StateError
from elastic.hooks.forward_override import dispatches, install_override, own_forward, remove_override
from elastic.hooks.replicas.split_rows import hidden_of
from elastic.runtime.runtime import runtime
from elastic.weights import batch_context
from elastic.weights.decoder import PAGED_CACHE, find_decoder


@dataclass
class StageTiming:
    """What a step took at one rank."""

    computed_s: float = 0.0
    waited_s: float = 0.0
    """For what other ranks compute, and until the rank itself could go on."""


class StageForward:
    """The forward passes of a model for all instances that its rank computes layers of. Thread-safe.

    The turn is taken for each pass and given up while it waits for hidden states; the forward gate is left meanwhile.
    From its making to `close` the model's layers can be passed over. Raises `ConfigError` for a model that cannot be
    computed by several ranks.
    """

    def __init__(self, model: Any, turn: Turn) -> None:
        self._model, self._turn, self._runtime = model, turn, runtime(model)
        decoder = find_decoder(model)
        layers, sharing = decoder.layers, getattr(decoder.config, "num_kv_shared_layers", 0)
        if len(layers) < 2:
            raise ConfigError("a model of one layer cannot be computed by several ranks")
        if sharing:
            raise ConfigError(
                f"num_kv_shared_layers={sharing}: these layers attend to keys and values that others hand them inside "
                "a forward pass; no layer of this model can be computed at another rank, whole or in part"
            )
        self._indices = {layer: index for index, layer in enumerate(layers)}
        weights = self._runtime.weights
        self._cuts = CutModules(layers, weights) if weights.shards > 1 else None
        self._installed = [layer for layer in layers if install_override(layer)]
        try:
            if not all(map(dispatches, layers)):
                raise ConfigError(
                    "another library has replaced the forward method of decoder layers; they cannot be passed over"
                )
            self._as_tuples = self._layers_return_tuples()
        except BaseException:
            self.close()
            raise

    @torch.no_grad()
    def run(
        self,
        plan: StagePlan,
        transport: Transport,
        step: int,
        inputs: dict[str, Any],
        timing: StageTiming | None = None,
    ) -> Any:
        """Compute this rank's part of a step; return the model's output at home, elsewhere None.

        `inputs` are what the model is called with, of the tokens of the whole step. `timing` is told what it took,
        from the first turn on. Raises what the model raises, and
        `RankLost` or `StateError` where another rank fails; the ranks behind this one are told, and fail too.
        """
        timing = timing or StageTiming()
        exchange = StepExchange(plan, transport, step, partial(self._receive, transport, timing))
        stage = _StagePass(plan, exchange, self._indices, self._cuts, self._as_tuples)
        if not all(part.whole for part in plan.layers.values()) and PAGED_CACHE in inputs:
            inputs = {**inputs, PAGED_CACHE: ShardedCache(inputs[PAGED_CACHE], exchange)}
        try:
            with self._turn:
                began_s = time.perf_counter()
                output = self._call(stage, inputs)
                timing.computed_s = time.perf_counter() - began_s - timing.waited_s
                return output
        except BaseException as error:
            exchange.fail(StepFailure.of(error))
            transport.forget(step)
            raise

    @torch.no_grad()
    def run_to_attention(self, layers: Container[int], inputs: dict[str, Any]) -> None:
        """Compute these layers as far as to their attention, which raises `Attended`, and none of the others."""
        self._call(_AttentionPass(layers, self._indices, self._as_tuples), inputs)

    def close(self) -> None:
        """Leave the layers as they were. Can be called twice."""
        if self._cuts is not None:
            self._cuts.close()
        while self._installed:
            remove_override(self._installed.pop())

    def _call(self, plan: batch_context.ForwardPlan, inputs: dict[str, Any]) -> Any:
        """Call the model by a plan; return None if it ended early."""
        batch_context.thread.plan = plan
        try:
            return self._model(**inputs)
        except _StageDone:
            return None
        finally:
            batch_context.thread.plan = None

    def _receive(self, transport: Transport, timing: StageTiming, awaited: Sequence[Awaited]) -> list[torch.Tensor]:
        began_s = time.perf_counter()
        # the turn comes back first: who waits for it inside the gate would keep a commit, and so its holder, waiting
        with self._runtime.gate.suspended(), self._turn.given_up():
            received = [transport.receive(*each) for each in awaited]
        timing.waited_s += time.perf_counter() - began_s
        return received

    @torch.no_grad()
    def _layers_return_tuples(self) -> bool:
        """Look at what the model does with what its first layer returns. No layer is computed."""
        probe = _LayerOutputProbe()
        token = torch.zeros(1, 1, dtype=torch.long, device=self._model.device)
        self._call(probe, {"input_ids": token, "use_cache": False})
        return probe.indexed


class _StageDone(Exception):
    """The forward pass came to the end of what the rank computes. Hooks are called for it as for any exception."""


class _StagePass:
    """The plan of one forward pass."""

    def __init__(
        self,
        plan: StagePlan,
        exchange: StepExchange,
        indices: dict[nn.Module, int],
        cuts: CutModules | None,
        as_tuples: bool,
    ) -> None:
        self.layers: Container[int] = plan.layers
        self._last, self._exchange = plan.last, exchange
        self._indices, self._cuts = indices, cuts
        self._as_tuples = as_tuples

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a layer and send what it returns, or pass over it; call a module inside of one, or compute its part."""
        index = self._indices.get(module)
        if index is None:
            if self._cuts is None:
                return own_forward(module, *args, **kwargs)
            return self._cuts.call(module, self._exchange, args, kwargs)
        if index not in self.layers:
            hidden = self._exchange.hidden_for(index + 1, _given(args, kwargs))
            return (hidden,) if self._as_tuples else hidden
        self._require(index, self._exchange.begin(index))
        output = type(module).forward(module, *args, **kwargs)
        self._exchange.end(hidden_of(output))
        if index == self._last:
            raise _StageDone
        return output

    def _require(self, index: int, part: LayerPart) -> None:
        """Raise `StateError` for a layer of several ranks that they cannot compute: before any of them waits in it."""
        if part.whole:
            return
        if self._cuts is None:
            raise StateError(
                f"layer {index} is computed by several ranks; wrap the model with shards={len(part.ranks)}"
            )
        self._cuts.weights.part_tensors(index, part.own)


class Attended(Exception):
    """A layer came to its attention, and no further. Hooks are called for it as for any exception."""


@dataclass
class _AttentionPass:
    """The plan of a forward pass that needs no weights of feed-forward networks: layers return what they were given."""

    layers: Container[int]
    indices: dict[nn.Module, int]
    as_tuples: bool

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a layer until it attends, or pass over it."""
        index = self.indices.get(module)
        if index is None:
            return own_forward(module, *args, **kwargs)
        hidden = _given(args, kwargs)
        if index in self.layers:
            with suppress(Attended):
                type(module).forward(module, *args, **kwargs)
        return (hidden,) if self.as_tuples else hidden


class _LayerOutputProbe:
    """A plan by which no layer is computed, and the second one ends the pass."""

    def __init__(self) -> None:
        self.layers: Container[int] = ()
        self._first: torch.Tensor | None = None
        self.indexed = False
        """Whether the model took the first item of what the first layer returned."""

    def call(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the layer was given, as it is."""
        given = _given(args, kwargs)
        if self._first is not None:
            self.indexed = given.ndim < self._first.ndim
            raise _StageDone
        self._first = given
        return given


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the hidden states that a layer is called with."""
    hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden
