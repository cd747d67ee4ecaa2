"""Steps of one model: which numbers of tokens have graphs, and when these are good.

A graph is captured after a few passes of so many tokens, and checked against the pass that follows. An action may
change any weight, so all graphs end before it commits; while layers do more than compute with weights of their own
place, passes are run as ever. Attention is called by replays as by the model: its shapes change from step to step, and
whose tokens they are, of prompts or of sequences with one new token each, is its matter alone. Steps with prompts have
many lengths: their graphs are of a few more tokens, and what is computed of those behind the last is not looked at.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.functional import pad
from torch.nn.modules import module as nn_module

from elastic.engines.executor.graphs.graph_memory import GraphMemory
from elastic.engines.executor.graphs.operator_graph import CaptureRefused, OperatorGraph
from elastic.engines.executor.graphs.piecewise_cuda_graph import PiecewiseCudaGraph
from elastic.hooks.base import Hook
from elastic.hooks.forward_gate import ForwardGate
from elastic.hooks.forward_override import dispatches, install_root_override, remove_override
from elastic.kvcache.score_terms import ScoreTerms
from elastic.weights import batch_context
from elastic.weights.decoder import PAGED_CACHE
from elastic.weights.proxy.tensor import WeightProxy

logger = logging.getLogger(__name__)
CAPTURE_AFTER = 16
"""Passes of a size before it is captured. A capture and its check take as long as some 20 replays save (2.6M, a Xeon):
a size that has come as often as that will come again, and one that does not has cost nothing."""
PROMPT_STEP = 4
"""Tokens of steps with prompts are rounded up to a multiple of it. More would be fewer graphs, and more to compute: on
a CPU products take as long for each row (100M Llama: .8 ms, where calling the model takes 5 of 42)."""
MOST_GRAPHS = 64
"""Of different sizes; the one that was not used for the longest time goes first."""
MOST_SIZES = 1024
"""Whose passes are counted."""
_PADDED = ("input_ids", "position_ids", "logits_to_keep")


class PassGraph(Protocol):
    """A computation that was captured once: `OperatorGraph` on a CPU, `PiecewiseCudaGraph` on a GPU."""

    def capture(self, run: Callable[[], Any], memory: GraphMemory) -> Any:
        """Run a computation and record it; return what it returned. Raises `CaptureRefused`."""

    def call(self, function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        """In a capture: call a function that replays call as it is; see `OperatorGraph.call`."""

    def replay(self) -> Any:
        """Compute again, with what is in the captured inputs now."""


class _StepCache:
    """The cache of the step that is computed. It knows no graph: else graphs would wait for the garbage collector."""

    def __init__(self) -> None:
        self._cache: Any = None

    @contextmanager
    def of(self, cache: Any) -> Iterator[None]:
        """Attend over the cache of a step."""
        self._cache = cache
        try:
            yield
        finally:
            self._cache = None

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
        attended: torch.Tensor = self._cache.attend(layer, query, key, value, scaling, terms=terms)
        return attended


class _CapturedAttention:
    """Stands for the cache while a pass is captured."""

    def __init__(self, graph: PassGraph, step: _StepCache) -> None:
        self._graph, self._step = graph, step

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
        return self._graph.call(self._step.attend, layer, query, key, value, scaling, terms is not None, softcap, sinks)


class CapturedPass:
    """The forward pass of a model, captured for keyword arguments of the same names, and shapes but for the padding."""

    def __init__(self, inputs: dict[str, Any], size: PassSize) -> None:
        device = inputs["input_ids"].device
        self._graph: PassGraph = OperatorGraph() if device.type == "cpu" else PiecewiseCudaGraph(device)
        self._step = _StepCache()
        self._attention = _CapturedAttention(self._graph, self._step)
        self._inputs = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        self._inputs[PAGED_CACHE] = self._attention
        for name, length in zip(_PADDED, (size.tokens, size.tokens, size.kept), strict=True):
            given = inputs.get(name)
            if given is not None and length is not None:
                self._inputs[name] = pad(given, (0, length - given.shape[-1]))
        self.checked = False
        """Whether a replay gave what the model gave."""

    def capture(self, forward: Callable[..., Any], inputs: dict[str, Any], memory: GraphMemory) -> Any:
        """Return what the model returns for the inputs. Raises `CaptureRefused`, and what `forward` raises."""
        with self._step.of(inputs[PAGED_CACHE]):
            return self._graph.capture(lambda: forward(**self._inputs), memory)

    def fits(self, inputs: dict[str, Any]) -> bool:
        """Return whether these differ from those of the capture in the contents of tensors and the padding alone."""
        if inputs.keys() != self._inputs.keys():
            return False
        return all(
            inputs[name].shape[:-1] == own.shape[:-1] and (name in _PADDED or inputs[name].shape == own.shape)
            if isinstance(own, torch.Tensor)
            else own in (inputs[name], self._attention)
            for name, own in self._inputs.items()
        )

    def call(self, forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """Return what the model returns for `inputs`, padded as in replays."""
        self._fill(inputs)
        return forward(**{**self._inputs, PAGED_CACHE: inputs[PAGED_CACHE]})

    def replay(self, inputs: dict[str, Any]) -> Any:
        """Return the same, in tensors that the next replay of any graph overwrites."""
        self._fill(inputs)
        with self._step.of(inputs[PAGED_CACHE]):
            return self._graph.replay()

    def _fill(self, inputs: dict[str, Any]) -> None:
        """Take over the contents; behind them stays what was there, as good as any."""
        for name, own in self._inputs.items():
            if isinstance(own, torch.Tensor):
                given = inputs[name]
                own[..., : given.shape[-1]].copy_(given)


class PassSize(NamedTuple):
    """Of a pass."""

    tokens: int
    kept: int | None
    """Tokens whose logits are wanted; None: all, or the model cannot be told."""


@dataclass
class _SizeEntry:
    """What there is for a size."""

    passes: int = 0
    captured: CapturedPass | None = None


class StepGraphs:
    """The forward passes of steps. For one thread, which alone runs them.

    The model is called as ever, so that its hooks run; it is its forward that is captured.
    """

    def __init__(self, model: nn.Module, gate: ForwardGate) -> None:
        self.refusal = _refusal(model)
        """Why no pass is captured, if so: until the next action, or for good."""
        self._for_good = bool(self.refusal)
        self.capture_after = CAPTURE_AFTER
        self._model, self._gate = model, gate
        self._sizes: OrderedDict[PassSize, _SizeEntry] = OrderedDict()
        self._memory = GraphMemory()
        self._ended = False  # all that are in `_sizes`
        hooks = [(m._forward_pre_hooks, m._forward_hooks) for m in model.modules() if m is not model]
        hooks.append((nn_module._global_forward_pre_hooks, nn_module._global_forward_hooks))  # of all modules there are
        self._hooks = [model._forward_hooks, *chain.from_iterable(hooks)]  # the model's: they may keep what it returns
        self._own_hooks = sum(isinstance(hook, Hook) for hooks in self._hooks for hook in hooks.values())
        if not self._for_good:
            install_root_override(model)
            gate.before_commits.append(self._end)

    def close(self) -> None:
        """Let go of all graphs, and of the model's forward."""
        if self._end in self._gate.before_commits:
            self._gate.before_commits.remove(self._end)
            remove_override(self._model)
        self.refusal, self._for_good = "it was closed", True
        self._drop()

    def run(self, inputs: dict[str, Any]) -> Any:
        """Call the model; see `CapturedPass.replay` for what it returns."""
        if self._for_good:
            return self._model(**inputs)
        batch_context.thread.graphs = self
        try:
            return self._model(**inputs)
        finally:
            batch_context.thread.graphs = None

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the model's own forward would; see `ModelForward`."""
        forward = partial(type(module).forward, module)
        if self._ended:
            self._sizes.clear()
            self.refusal, self._ended = "", False
        # hooks of others: a replay would not call them, or with tensors that change later
        hooked = sum(map(len, self._hooks)) != self._own_hooks
        if args or self.refusal or hooked or module.training or not self._gate.thread.plain:
            return forward(*args, **kwargs)
        try:
            return self._run(forward, kwargs)
        except CaptureRefused as error:
            self._refuse(str(error), for_good=False)
            return forward(**kwargs)

    def _run(self, forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        own, size = _sizes(inputs)
        entry = self._entry(size)
        entry.passes += 1
        if entry.captured is None:
            if entry.passes <= self.capture_after:
                return forward(**inputs)
            captured = CapturedPass(inputs, size)
            output = captured.capture(forward, inputs, self._memory)
            earlier = [key for key, other in self._sizes.items() if other.captured is not None]
            if len(earlier) >= MOST_GRAPHS:
                del self._sizes[earlier[0]]
            entry.captured = captured
        elif not entry.captured.fits(inputs):
            return forward(**inputs)
        elif not entry.captured.checked:
            output = self._check(entry.captured, forward, inputs)
        else:
            output = entry.captured.replay(inputs)
        if own == size:
            return output
        return replace(output, logits=output.logits[:, : own.tokens if own.kept is None else own.kept])

    def _check(self, captured: CapturedPass, forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """Run a pass as ever and as a replay, which writes the same keys and values once more; compare."""
        expected = captured.call(forward, inputs)
        replayed = captured.replay(inputs)
        captured.checked = torch.allclose(replayed.logits, expected.logits, rtol=0, atol=0, equal_nan=True)
        if not captured.checked:
            self._refuse("a replay gave other logits", for_good=True)
        return expected

    def _entry(self, size: PassSize) -> _SizeEntry:
        entry = self._sizes.setdefault(size, _SizeEntry())
        self._sizes.move_to_end(size)
        if len(self._sizes) > MOST_SIZES:
            self._sizes.popitem(last=False)
        return entry

    def _refuse(self, reason: str, *, for_good: bool) -> None:
        logger.info("steps of %s are run without graphs: %s", type(self._model).__name__, reason)
        self.refusal, self._for_good = reason, for_good
        self._drop()

    def _drop(self) -> None:
        self._sizes.clear()
        self._memory.forget_views()

    def _end(self) -> None:
        """End all graphs: weights may be elsewhere, and other ones, from now on. No pass is running."""
        self._ended = True
        self._memory.forget_views()


def _sizes(inputs: dict[str, Any]) -> tuple[PassSize, PassSize]:
    """Return the size of a pass, and that of the graph for it."""
    kept = inputs.get("logits_to_keep")
    own = PassSize(inputs["input_ids"].shape[1], None if kept is None else len(kept))
    if inputs[PAGED_CACHE].only_single:
        return own, own
    tokens = -(-own.tokens // PROMPT_STEP) * PROMPT_STEP
    return own, PassSize(tokens, None if own.kept is None else 1 << (own.kept - 1).bit_length())


def _refusal(model: nn.Module) -> str:
    """Say why passes of a model cannot be captured, as far as its modules show it; empty if they can."""
    inner = [module for module in model.modules() if module is not model]
    if "forward" in vars(model) or any("forward" in vars(module) and not dispatches(module) for module in inner):
        return "modules of it have forward methods of their own"
    if any(hasattr(module, "base_layer") for module in inner):
        return "its adapters may be switched at any time"
    others = {type(parameter) for parameter in model.parameters()} - {nn.Parameter, torch.Tensor, WeightProxy}
    return f"its weights are of {', '.join(sorted(kind.__name__ for kind in others))}" if others else ""
