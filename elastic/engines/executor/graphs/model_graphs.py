"""Graphs of one model's forward passes, or of parts of them: which there are, and when they are good.

A graph is captured after a few passes of its kind, and checked against the pass that follows. An action may change any
weight, so all graphs end before it commits; and while others have hooks inside of what was captured, it is called.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from elastic.engines.executor.graphs.captured_pass import CapturedPass, Inputs
from elastic.engines.executor.graphs.graph_memory import GraphMemory
from elastic.engines.executor.graphs.operator_graph import CaptureRefused
from elastic.hooks.base import Hook
from elastic.hooks.forward_gate import ForwardGate
from elastic.hooks.forward_override import dispatches
from elastic.weights.proxy.tensor import WeightProxy

logger = logging.getLogger(__name__)
Key = TypeVar("Key", bound=Hashable)
"""What passes of one kind have in common."""
CAPTURE_AFTER = 16
"""Passes of a kind before it is captured. A capture and its check take as long as some 20 replays save (2.6M, a Xeon):
what has come as often as that will come again, and what does not has cost nothing."""
MOST_GRAPHS = 64
"""Of whole passes; the one that was not used for the longest time goes first."""
MOST_KINDS = 1024
"""Whose passes are counted."""


Lengths = Callable[[], Mapping[str, int]]
"""Called when a pass is captured; see `CapturedPass`."""
Hooks = Mapping[int, Callable[..., Any]]
"""A module's, before or behind its forward."""


@dataclass
class Kind:
    """What there is for passes of one kind."""

    passes: int = 0
    seconds: float = 0.0
    """Of the last that was called."""
    captured: CapturedPass | None = None

    @property
    def checked(self) -> bool:
        """Whether it is replayed from now on."""
        return self.captured is not None and self.captured.checked


class ModelGraphs(Generic[Key]):
    """The graphs of a model. For threads of which one computes at a time."""

    def __init__(
        self, model: nn.Module, gate: ForwardGate, inside: Sequence[nn.Module], hooks: Sequence[Hooks] = ()
    ) -> None:
        """`inside`: modules that replays do not call; `hooks`: others that they do not call either."""
        self.refusal = _refusal(model, inside)
        """Why no pass is captured, if so: until the next action, or for good."""
        self._for_good = bool(self.refusal)
        self.capture_after, self.most_graphs, self.most_kinds = CAPTURE_AFTER, MOST_GRAPHS, MOST_KINDS
        self._model, self._gate = model, gate
        self._device = next(model.parameters()).device
        self._kinds: OrderedDict[Key, Kind] = OrderedDict()
        self._memory = GraphMemory()
        self._ended = False  # all that are in `_kinds`
        self._hooks = [*hooks, nn_module._global_forward_pre_hooks, nn_module._global_forward_hooks]
        self._hooks.extend(chain.from_iterable((each._forward_pre_hooks, each._forward_hooks) for each in inside))
        self._own_hooks = sum(isinstance(hook, Hook) for hooks in self._hooks for hook in hooks.values())
        if not self._for_good:
            gate.before_commits.append(self._end)

    def close(self) -> None:
        """Let go of all graphs."""
        if self._end in self._gate.before_commits:
            self._gate.before_commits.remove(self._end)
        self.refusal, self._for_good = "it was closed", True
        self._drop()

    def run(
        self,
        kind: Key,
        forward: Callable[..., Any],
        inputs: Inputs,
        lengths: Callable[[], Mapping[str, int]] = dict,
    ) -> Any:
        """Return what `forward` returns for the inputs, called or replayed, then padded to `lengths`.

        What is replayed lies in tensors that the next replay of any graph overwrites.
        """
        if self._ended:
            self._kinds.clear()
            self.refusal, self._ended = "", False
        if self.refusal or self._hooked:
            return forward(**inputs)
        entry = self._entry(kind)
        entry.passes += 1
        try:
            if entry.captured is None:
                if entry.passes <= self.capture_after:
                    began_s = time.perf_counter()
                    output = forward(**inputs)
                    entry.seconds = time.perf_counter() - began_s
                    return output
                return self._capture(entry, forward, inputs, lengths())
            if not entry.captured.fits(inputs):
                return forward(**inputs)
            if not entry.captured.checked:
                return self._check(entry.captured, forward, inputs)
            return entry.captured.replay(inputs)
        except CaptureRefused as error:
            self._refuse(str(error), for_good=False)
            return forward(**inputs)

    @property
    def _hooked(self) -> bool:
        """Whether others have hooks: a replay would not call them, or with tensors that change later."""
        return sum(map(len, self._hooks)) != self._own_hooks

    def _capture(self, entry: Kind, forward: Callable[..., Any], inputs: Inputs, lengths: Mapping[str, int]) -> Any:
        captured = CapturedPass(inputs, self._device, lengths)
        output = captured.capture(forward, inputs, self._memory)
        earlier = [kind for kind, other in self._kinds.items() if other.captured is not None]
        if len(earlier) >= self.most_graphs:
            del self._kinds[earlier[0]]
        entry.captured = captured
        return output

    def _check(self, captured: CapturedPass, forward: Callable[..., Any], inputs: Inputs) -> Any:
        """Run a pass as ever and as a replay, which writes the same keys and values once more; compare."""
        expected = captured.call(forward, inputs)
        replayed = captured.replay(inputs)
        captured.checked = torch.allclose(self._told(replayed), self._told(expected), rtol=0, atol=0, equal_nan=True)
        if not captured.checked:
            self._refuse("a replay gave other results", for_good=True)
        return expected

    def _told(self, output: Any) -> torch.Tensor:
        """Return the tensor of what a pass returns that is looked at."""
        raise NotImplementedError

    def _entry(self, kind: Key) -> Kind:
        entry = self._kinds.setdefault(kind, Kind())
        self._kinds.move_to_end(kind)
        if len(self._kinds) > self.most_kinds:
            self._kinds.popitem(last=False)
        return entry

    def _refuse(self, reason: str, *, for_good: bool) -> None:
        logger.info("steps of %s are run without graphs: %s", type(self._model).__name__, reason)
        self.refusal, self._for_good = reason, for_good
        self._drop()

    def _drop(self) -> None:
        self._kinds.clear()
        self._memory.forget_views()

    def _end(self) -> None:
        """End all graphs: weights may be elsewhere, and other ones, from now on. No pass is running."""
        self._ended = not self._for_good
        self._memory.forget_views()


def modules_within(module: nn.Module) -> list[nn.Module]:
    """List the modules inside of one."""
    return [each for each in module.modules() if each is not module]


def _refusal(model: nn.Module, inside: Sequence[nn.Module]) -> str:
    """Say why passes of a model cannot be captured, as far as its modules show it; empty if they can."""
    if any("forward" in vars(module) and not dispatches(module) for module in inside):
        return "modules of it have forward methods of their own"
    if any(hasattr(module, "base_layer") for module in inside):
        return "its adapters may be switched at any time"
    others = {type(parameter) for parameter in model.parameters()} - {nn.Parameter, torch.Tensor, WeightProxy}
    return f"its weights are of {', '.join(sorted(kind.__name__ for kind in others))}" if others else ""
