"""Steps of one model: which numbers of tokens have graphs, and when these are good.

A graph is captured after a few passes of its size, and checked against the pass that follows. An action may change any
weight, so all graphs end before it commits; while others have hooks inside of the model, or layers do more than compute
with weights of their own place, passes are run as ever. Attention is called by replays as by the model: its shapes
change from step to step, and whose tokens they are, of prompts or of sequences with one new token each, is its matter
alone. Steps with prompts have many lengths: their graphs are of a few more tokens, and what is computed of those behind
the last is not looked at.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from elastic.engines.executor.graphs.captured_pass import CapturedPass, Inputs, NobodysCache
from elastic.engines.executor.graphs.graph_memory import GraphMemory
from elastic.engines.executor.graphs.operator_graph import CaptureRefused
from elastic.hooks.base import Hook
from elastic.hooks.forward_gate import ForwardGate
from elastic.hooks.forward_override import dispatches, install_override, remove_override, root_forward
from elastic.weights import batch_context
from elastic.weights.decoder import PAGED_CACHE
from elastic.weights.proxy.tensor import WeightProxy

logger = logging.getLogger(__name__)
CAPTURE_AFTER = 16
"""Passes of a size before it is captured. A capture and its check take as long as some 20 replays save (2.6M, a Xeon):
a size that has come as often as that will come again, and one that does not has cost nothing."""
PREPARE_AFTER = 2
"""Passes of a size before it is captured while nobody waits."""
LONGEST_S = 0.1
"""Of a pass that is captured so: whoever comes meanwhile waits for one or two of them."""
MOST_GRAPHS = 64
"""Of different sizes; the one that was not used for the longest time goes first."""
MOST_SIZES = 1024
"""Whose passes are counted."""
PROMPT_STEP = 2
"""Tokens of steps with prompts are rounded up to a multiple of it. More would be fewer graphs, and more to compute: on
a CPU products take as long for each row (100M Llama: 1.6 ms with one thread, where calling the model takes 5 of 65)."""


class PassSize(NamedTuple):
    """Of a pass."""

    tokens: int
    kept: int | None
    """Tokens whose logits are wanted; None: all, or the model cannot be told."""

    @property
    def lengths(self) -> Mapping[str, int]:
        """Of the model's inputs, by their names."""
        lengths = {"input_ids": self.tokens, "position_ids": self.tokens}
        return lengths if self.kept is None else {**lengths, "logits_to_keep": self.kept}


@dataclass
class SizeGraph:
    """What there is for passes of one size."""

    passes: int = 0
    seconds: float = 0.0
    """Of the last that was called."""
    captured: CapturedPass | None = None

    @property
    def wanted(self) -> bool:
        """Whether a pass that came before is to be captured or checked while nobody waits."""
        checked = self.captured is not None and self.captured.checked
        return self.passes >= PREPARE_AFTER and self.seconds <= LONGEST_S and not checked


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
        self._sizes: OrderedDict[PassSize, SizeGraph] = OrderedDict()
        self._memory = GraphMemory()
        self._ended = False  # all that are in `_sizes`
        self._plain_commits, self._inputs = -1, Inputs()  # as of the first plain pass behind the last action
        hooks = [(m._forward_pre_hooks, m._forward_hooks) for m in model.modules() if m is not model]
        hooks.append((nn_module._global_forward_pre_hooks, nn_module._global_forward_hooks))  # of all modules there are
        self._hooks = [model._forward_hooks, *chain.from_iterable(hooks)]  # the model's: they may keep what it returns
        self._own_hooks = sum(isinstance(hook, Hook) for hooks in self._hooks for hook in hooks.values())
        if not self._for_good:
            install_override(model, root_forward)
            gate.before_commits.append(self._end)

    def close(self) -> None:
        """Let go of all graphs, and of the model's forward."""
        if self._end in self._gate.before_commits:
            self._gate.before_commits.remove(self._end)
            remove_override(self._model)
        self._drop("it was closed", for_good=True)

    def run(self, inputs: Inputs) -> Any:
        """Call the model; see `CapturedPass.replay` for what it returns."""
        if self._for_good:
            return self._model(**inputs)
        batch_context.thread.graphs = self.call
        try:
            return self._model(**inputs)
        finally:
            batch_context.thread.graphs = None

    @torch.no_grad()
    def prepare(self) -> bool:
        """Capture a size that has come before, or check its graph, with tokens of nobody; return whether there was one.

        For when no step waits; on a CPU alone. So most sizes are captured beside what is served, not in the middle.
        """
        room = len(self._captured()) < MOST_GRAPHS
        wanted = [size for size, entry in self._sizes.items() if entry.wanted and (room or entry.captured)]
        if not wanted or self.refusal or self._inputs["input_ids"].device.type != "cpu":
            return False
        self._gate.enter(id(self))
        try:
            if self._ended or self._hooked or self._plain_commits != self._gate.commits:
                return False
            self._prepare(wanted[-1])
        except Exception as error:  # of the model, which does not compute what nobody has asked for
            self._refuse(f"{type(error).__name__}: {error}", for_good=not isinstance(error, CaptureRefused))
        finally:
            self._gate.leave(id(self))
        return True

    def _prepare(self, size: PassSize) -> None:
        entry = self._sizes[size]
        ids = self._inputs["input_ids"].new_zeros
        inputs = {**self._inputs, "input_ids": ids(1, size.tokens), "position_ids": ids(1, size.tokens)}
        if size.kept is not None:
            inputs["logits_to_keep"] = ids(size.kept)
        inputs[PAGED_CACHE] = NobodysCache()
        forward = partial(type(self._model).forward, self._model)
        if entry.captured is None:
            self._capture(size, forward, inputs)
        else:
            self._check(entry.captured, forward, inputs)

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the model's own forward would; see `ModelForward`."""
        forward: Callable[..., Any] = partial(type(module).forward, module)
        if args or module.training or not self._gate.thread.plain:
            return forward(*args, **kwargs)
        if self._plain_commits != self._gate.commits:
            self._plain_commits = self._gate.commits
            self._inputs = {k: v for k, v in kwargs.items() if k not in ("logits_to_keep", PAGED_CACHE)}
        own, size = _sizes_of(kwargs)
        output = self._run(size, forward, kwargs)
        rows = own.tokens if own.kept is None else own.kept
        if own == size or output.logits.shape[1] == rows:
            return output
        return replace(output, logits=output.logits[:, :rows])

    def _run(self, size: PassSize, forward: Callable[..., Any], inputs: Inputs) -> Any:
        if self._ended:
            self._sizes.clear()
            self.refusal, self._ended = "", False
        if self.refusal or self._hooked:
            return forward(**inputs)
        entry = self._entry(size)
        entry.passes += 1
        try:
            if entry.captured is None:
                if entry.passes <= self.capture_after:
                    began_s = time.perf_counter()
                    output = forward(**inputs)
                    entry.seconds = time.perf_counter() - began_s
                    return output
                return self._capture(size, forward, inputs)
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

    def _captured(self) -> list[PassSize]:
        """List the sizes that have graphs; the one that was not used for the longest time first."""
        return [size for size, entry in self._sizes.items() if entry.captured is not None]

    def _capture(self, size: PassSize, forward: Callable[..., Any], inputs: Inputs) -> Any:
        captured = CapturedPass(inputs, inputs["input_ids"].device, size.lengths)
        output = captured.capture(forward, inputs, self._memory)
        earlier = self._captured()
        if len(earlier) >= MOST_GRAPHS:
            del self._sizes[earlier[0]]
        self._sizes[size].captured = captured
        return output

    def _check(self, captured: CapturedPass, forward: Callable[..., Any], inputs: Inputs) -> Any:
        """Run a pass as ever and as a replay, which writes the same keys and values once more; compare."""
        expected = captured.call(forward, inputs)
        replayed = captured.replay(inputs)
        captured.checked = torch.allclose(replayed.logits, expected.logits, rtol=0, atol=0, equal_nan=True)
        if not captured.checked:
            self._refuse("a replay gave other logits", for_good=True)
        return expected

    def _entry(self, size: PassSize) -> SizeGraph:
        entry = self._sizes.setdefault(size, SizeGraph())
        self._sizes.move_to_end(size)
        if len(self._sizes) > MOST_SIZES:
            self._sizes.popitem(last=False)
        return entry

    def _refuse(self, reason: str, *, for_good: bool) -> None:
        logger.info("steps of %s are run without graphs: %s", type(self._model).__name__, reason)
        self._drop(reason, for_good=for_good)

    def _drop(self, reason: str, *, for_good: bool) -> None:
        self.refusal, self._for_good = reason, for_good
        self._sizes.clear()
        self._memory.forget_views()

    def _end(self) -> None:
        """End all graphs: weights may be elsewhere, and other ones, from now on. No pass is running."""
        self._ended = not self._for_good
        self._memory.forget_views()


def _sizes_of(inputs: Inputs) -> tuple[PassSize, PassSize]:
    """Return the size of a pass, and that of the graph for it."""
    kept = inputs.get("logits_to_keep")
    own = PassSize(inputs["input_ids"].shape[1], None if kept is None else len(kept))
    if inputs[PAGED_CACHE].batch.only_single:
        return own, own
    tokens = -(-own.tokens // PROMPT_STEP) * PROMPT_STEP
    return own, PassSize(tokens, None if own.kept is None else 1 << (own.kept - 1).bit_length())


def _refusal(model: nn.Module) -> str:
    """Say why passes of a model cannot be captured, as far as its modules show it; empty if they can."""
    inside = [module for module in model.modules() if module is not model]
    if "forward" in vars(model) or any("forward" in vars(module) and not dispatches(module) for module in inside):
        return "modules of it have forward methods of their own"
    if any(hasattr(module, "base_layer") for module in inside):
        return "its adapters may be switched at any time"
    others = {type(parameter) for parameter in model.parameters()} - {nn.Parameter, torch.Tensor, WeightProxy}
    return f"its weights are of {', '.join(sorted(kind.__name__ for kind in others))}" if others else ""
