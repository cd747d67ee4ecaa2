"""Steps of one model: which numbers of tokens have graphs.

While layers do more than compute with weights of their own place, passes are run as ever. Attention is called by
replays as by the model: its shapes change from step to step, and whose tokens they are, of prompts or of sequences with
one new token each, is its matter alone. Steps with prompts have many lengths: their graphs are of a few more tokens,
and what is computed of those behind the last is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from elastic.engines.executor.graphs.captured_pass import Inputs, NobodysCache
from elastic.engines.executor.graphs.model_graphs import Kind, ModelGraphs, modules_within
from elastic.engines.executor.graphs.operator_graph import CaptureRefused
from elastic.hooks.forward_gate import ForwardGate
from elastic.hooks.forward_override import install_root_override, remove_override
from elastic.weights import batch_context
from elastic.weights.decoder import PAGED_CACHE

PROMPT_STEP = 2
"""Tokens of steps with prompts are rounded up to a multiple of it. More would be fewer graphs, and more to compute: on
a CPU products take as long for each row (100M Llama: 1.6 ms with one thread, where calling the model takes 5 of 65)."""


PREPARE_AFTER = 2
"""Passes of a size before it is captured while nobody waits."""
LONGEST_S = 0.1
"""Of a pass that is captured so: whoever comes meanwhile waits for one or two of them."""


class PassSize(NamedTuple):
    """Of a pass."""

    tokens: int
    kept: int | None
    """Tokens whose logits are wanted; None: all, or the model cannot be told."""


class StepGraphs(ModelGraphs[PassSize]):
    """The forward passes of steps. For one thread, which alone runs them.

    The model is called as ever, so that its hooks run; it is its forward that is captured.
    """

    def __init__(self, model: nn.Module, gate: ForwardGate) -> None:
        # a hook behind the model may keep what it returns
        super().__init__(model, gate, modules_within(model), [model._forward_hooks])
        self._plain_commits, self._inputs = -1, Inputs()  # as of the first plain pass behind the last action
        if not self._for_good and not install_root_override(model):
            self._refuse("it has a forward method of its own", for_good=True)
            gate.before_commits.remove(self._end)

    def close(self) -> None:
        """Let go of all graphs, and of the model's forward."""
        if self._end in self._gate.before_commits:
            remove_override(self._model)
        super().close()

    def run_model(self, inputs: Inputs) -> Any:
        """Call the model; see `ModelGraphs.run` for what it returns."""
        if self._for_good:
            return self._model(**inputs)
        batch_context.thread.graphs = self
        try:
            return self._model(**inputs)
        finally:
            batch_context.thread.graphs = None

    @torch.no_grad()
    def prepare(self) -> bool:
        """Capture a size that has come before, or check its graph, with tokens of nobody; return whether there was one.

        For when no step waits. So most sizes are captured beside what is served, and not in the middle of it.
        """
        wanted = [size for size, entry in self._kinds.items() if is_wanted(entry)]
        if not wanted or self.refusal:
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
        entry = self._kinds[size]
        ids = self._inputs["input_ids"].new_zeros
        inputs = {**self._inputs, "input_ids": ids(1, size.tokens), "position_ids": ids(1, size.tokens)}
        if size.kept is not None:
            inputs["logits_to_keep"] = ids(size.kept)
        inputs[PAGED_CACHE] = NobodysCache()
        forward = partial(type(self._model).forward, self._model)
        if entry.captured is None:
            self._capture(entry, forward, inputs, _lengths(inputs, size))
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
        own, size = _sizes(kwargs)
        output = self.run(size, forward, kwargs, partial(_lengths, kwargs, size))
        rows = own.tokens if own.kept is None else own.kept
        if own == size or output.logits.shape[1] == rows:
            return output
        return replace(output, logits=output.logits[:, :rows])

    def _told(self, output: Any) -> torch.Tensor:
        logits: torch.Tensor = output.logits
        return logits


def is_wanted(entry: Kind) -> bool:
    """Return whether a pass that came before is to be captured or checked while nobody waits."""
    return entry.passes >= PREPARE_AFTER and entry.seconds <= LONGEST_S and not entry.checked


def _sizes(inputs: Inputs) -> tuple[PassSize, PassSize]:
    """Return the size of a pass, and that of the graph for it."""
    kept = inputs.get("logits_to_keep")
    own = PassSize(inputs["input_ids"].shape[1], None if kept is None else len(kept))
    if inputs[PAGED_CACHE].only_single:
        return own, own
    tokens = -(-own.tokens // PROMPT_STEP) * PROMPT_STEP
    return own, PassSize(tokens, None if own.kept is None else 1 << (own.kept - 1).bit_length())


def _lengths(inputs: Inputs, size: PassSize) -> Mapping[str, int]:
    lengths = {"input_ids": size.tokens, "position_ids": size.tokens}
    return lengths if size.kept is None else {**lengths, "logits_to_keep": size.kept}
