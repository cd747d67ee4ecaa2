"""Steps as forward passes of a wrapped model over its cache in blocks, and the tokens chosen behind them."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from elastic.engines.base import GrammarCompiler, SampledToken
from elastic.engines.core.kv_state import KVFormat
from elastic.engines.core.step import ScheduledChunk, SequenceState, Step, StepResult
from elastic.engines.executor.batch_runner import BatchRunner
from elastic.engines.executor.graphs.step_graphs import StepGraphs
from elastic.engines.executor.prompt_scores import ScoredPrompt, take_scores
from elastic.engines.sampling import SamplingState, sample
from elastic.hooks.forward_gate import ForwardGate
from elastic.kvcache.storage.paged import BlockMemory
from elastic.memory.backends.streams import note_current_stream

MOST_PROMPT_TOKENS = 128
"""Of steps with prompts that are replayed: of more, the calls are a small part (100M Llama: 5 ms of 42 with 33)."""


@dataclass(frozen=True)
class BegunStep:
    """A step whose forward pass can be computed."""

    chunks: tuple[ScheduledChunk, ...]
    inputs: dict[str, Any]
    """What the model is called with."""
    rows: torch.Tensor | None
    """[kept]: the rows of the model's logits that are wanted; None: all."""
    sampled: list[int] | None
    """Which of these are to be sampled behind; None: all."""


class ModelRunner(BatchRunner):
    """An `Executor` in this process. Its calls come from one thread, on whose CUDA stream all of it is queued."""

    def __init__(
        self,
        model: Any,
        memory: BlockMemory,
        form: KVFormat,
        grammars: GrammarCompiler | None = None,
        gate: ForwardGate | None = None,
    ) -> None:
        """`gate`: the model's, for decode steps to be captured and replayed; None: the model is called for each."""
        super().__init__(model, memory, form)
        self._model = model
        self._cache_device = memory.kv.device
        self._grammars = grammars
        self._sampling: dict[str, SamplingState] = {}
        self._prompts: dict[str, ScoredPrompt] = {}
        one_device = self._device == self._cache_device
        self.graphs = StepGraphs(model, gate) if gate is not None and one_device else None
        """None: the model is called at each step."""
        # a pass that is checked is computed twice: a prompt would overwrite what it saw in a sliding window
        windows = any(window is not None for window in form.windows)
        self._most_prompt_tokens = 0 if windows or self._device.type != "cpu" else MOST_PROMPT_TOKENS
        self._picks_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def execute(self, step: Step) -> Future[StepResult]:
        """Compute a step; the future is done when it returns. An error of the model fails the step and no other."""
        done: Future[StepResult] = Future()
        try:
            begun = self.begin(step)
            with torch.no_grad():
                done.set_result(self.finish(begun, self._compute(begun)))
        except Exception as error:  # whatever the model raises ends the sequences of the step; the others go on
            if self._cache_device.type == "cuda":  # its kernels still write blocks that are free now
                torch.cuda.current_stream(self._cache_device).synchronize()
            self.remove(tuple(chunk.sequence for chunk in step.chunks))
            done.set_exception(error)
        return done

    def close(self) -> None:
        """Let go of the memory, and of the model."""
        if self.graphs is not None:
            self.graphs.close()
        self.cache.close()

    def remove(self, sequences: Collection[str]) -> None:
        """Forget sequences; unknown ones: nothing happens."""
        super().remove(sequences)
        for sequence in sequences:
            self._sampling.pop(sequence, None)
            self._prompts.pop(sequence, None)

    def begin(self, step: Step, *, eager: bool = False) -> BegunStep:
        """Note what a step says of sequences, and return what is to be computed; `eager`: see `BatchRunner.inputs`."""
        note_current_stream(self._cache_device)
        if step.removed:
            self.remove(step.removed)
        for state in step.added:
            self._add_state(state)
        inputs = self.inputs(step.chunks, eager=eager)
        kept, sampled = self._wanted_logits(step.chunks)
        rows = None
        tokens = inputs["input_ids"].shape[1]
        if len(kept) < tokens:
            wanted = torch.tensor(kept or [tokens - 1], device=self._device)
            if self._picks_logits:
                inputs["logits_to_keep"] = wanted
            else:
                rows = wanted
        return BegunStep(step.chunks, inputs, rows, sampled if len(sampled) < len(kept) else None)

    @torch.no_grad()
    def finish(self, begun: BegunStep, output: Any) -> StepResult:
        """Choose the tokens behind a step, from what the model returned. Steps of several cohorts may be in several
        threads at a time."""
        logits: torch.Tensor = output.logits[0]
        if begun.rows is not None:
            logits = logits[begun.rows]
        logits = logits.float()
        scores = take_scores(self._prompts, begun.chunks, logits) if self._prompts else {}
        if begun.sampled is not None:
            logits = logits[begun.sampled]
        return StepResult(self._choose(begun.chunks, logits), scores)

    def _compute(self, begun: BegunStep) -> Any:
        """Call the model, or replay a pass of it: of one new token for each sequence, or of prompts that are short."""
        tokens = begun.inputs["input_ids"].shape[1]
        if self.graphs is None or tokens > max(len(begun.chunks), self._most_prompt_tokens):
            return self._model(**begun.inputs)
        return self.graphs.run(begun.inputs)

    def _add_state(self, state: SequenceState) -> None:
        request = state.request
        matcher = None
        if request.grammar is not None and self._grammars is not None:
            matcher = self._grammars.matcher(request.grammar)
        self.add(state.id)
        self._sampling[state.id] = SamplingState(request, state.seed, state.generated, matcher)
        if state.scores_prompt:
            self._prompts[state.id] = ScoredPrompt(request)

    def _wanted_logits(self, chunks: Sequence[ScheduledChunk]) -> tuple[list[int], list[int]]:
        """List the tokens of the batch whose logits are wanted, and which of these are to be sampled behind."""
        kept: list[int] = []
        sampled = []
        stop = 0
        for chunk in chunks:
            start, stop = stop, stop + len(chunk.tokens)
            if chunk.sequence in self._prompts:
                kept.extend(range(start, stop))
            elif chunk.samples:
                kept.append(stop - 1)
            if chunk.samples:
                sampled.append(len(kept) - 1)
        return kept, sampled

    def _choose(self, chunks: Sequence[ScheduledChunk], logits: torch.Tensor) -> tuple[SampledToken, ...]:
        """Choose the tokens behind the chunks that sample, from logits [of these, vocabulary]."""
        states = [self._sampling[chunk.sequence] for chunk in chunks if chunk.samples]
        if not states:
            return ()
        tokens = sample(logits, states)
        for state, token in zip(states, tokens, strict=True):
            state.append(token.token)
        return tuple(tokens)
