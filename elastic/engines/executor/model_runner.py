"""Steps as forward passes of a wrapped model over its cache in blocks, and the tokens chosen behind them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from elastic.engines.base import GrammarCompiler, SampledToken
from elastic.engines.core.step import Chunk, SequenceState, Step, StepResult
from elastic.engines.executor.block_layout import BlockLayout
from elastic.engines.executor.input_batch import BatchTokens, InputBatch, Ints
from elastic.engines.executor.layer_groups import LayerGroup
from elastic.engines.executor.paged_cache import PagedCache, RequestSlice
from elastic.engines.executor.prompt_scores import PromptScores
from elastic.engines.sampling import SamplingState, sample
from elastic.kvcache.storage.paged import BlockMemory
from elastic.memory.backends.streams import note_current_stream


class ModelRunner:
    """An `Executor` in this process. Its calls come from one thread, on whose CUDA stream all of it is queued.

    Steps name logical blocks, which are the same for all executors of a request; this one has its own physical ones.
    """

    def __init__(
        self,
        model: Any,
        memory: BlockMemory,
        groups: Sequence[LayerGroup],
        layout: BlockLayout,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.batch = InputBatch([group.window for group in groups], layout.shape.tokens)
        self.cache = PagedCache(memory, groups, self.batch.tables, layout, model.dtype)
        self._model = model
        self._device = memory.kv.device
        self._grammars = grammars
        counts = [memory.sectors * memory.blocks_per_sector(group) for group in range(len(groups))]
        self._physical = [np.arange(count) for count in counts]  # by logical block
        self._sampling: dict[str, SamplingState] = {}
        self._scores = PromptScores()
        self._picks_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        # attention knows what each token sees: a finished mask keeps the model from building one of all against all
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)

    def execute(self, step: Step) -> Future[StepResult]:
        """Compute a step; the future is done when it returns. An error of the model fails the step and no other."""
        done: Future[StepResult] = Future()
        try:
            done.set_result(self._run(step))
        except Exception as error:  # whatever the model raises ends the sequences of the step; the others go on
            if self._device.type == "cuda":  # its kernels still write blocks that are free now
                torch.cuda.current_stream(self._device).synchronize()
            self.remove(tuple(chunk.sequence for chunk in step.chunks))
            done.set_exception(error)
        return done

    def remove(self, sequences: tuple[str, ...]) -> None:
        """Forget sequences; unknown ones: nothing happens."""
        for sequence in sequences:
            self.batch.remove(sequence)
            self._sampling.pop(sequence, None)
            self._scores.forget(sequence)

    def close(self) -> None:
        """Let go of the memory."""
        self.cache.close()

    @torch.no_grad()
    def _run(self, step: Step) -> StepResult:
        note_current_stream(self._device)
        if step.removed:
            self.remove(step.removed)
        for state in step.added:
            self._add(state)
        self._extend_tables(step.chunks)
        batch, ids = self.batch.begin_step(step.chunks)
        kept, sampled = self._wanted_logits(step.chunks)
        logits = self._forward(batch, ids, kept)
        scores = self._scores.take(step.chunks, logits) if self._scores else {}
        if len(sampled) < len(kept):
            logits = logits[sampled]
        return StepResult(self._choose(step.chunks, logits), scores)

    def _add(self, state: SequenceState) -> None:
        request = state.request
        matcher = None
        if request.grammar is not None and self._grammars is not None:
            matcher = self._grammars.matcher(request.grammar)
        self.batch.add(state.id)
        self._sampling[state.id] = SamplingState(request, state.seed, state.generated, matcher)
        if request.prompt_logprobs is not None and not state.index and not state.generated:
            self._scores.expect(state.id, request)

    def _extend_tables(self, chunks: Sequence[Chunk]) -> None:
        """Add the chunks' new blocks to the tables.

        Of a sequence's new blocks only the last is read before it is full: it begins as zeros.
        """
        for group, table in enumerate(self.batch.tables):
            cleared = []
            for chunk in chunks:
                new = chunk.blocks[group]
                if new:
                    row = self.batch.rows[chunk.sequence]
                    physical = self._physical[group][list(new)]
                    table.extend(row, physical)
                    first_slot = (int(table.counts[row]) - 1) * table.block_tokens
                    if first_slot >= chunk.start:  # else it came with tokens in it
                        cleared.append(physical[-1])
            if cleared:
                self.cache.clear(group, np.array(cleared))

    def _wanted_logits(self, chunks: Sequence[Chunk]) -> tuple[list[int], list[int]]:
        """List the tokens of the batch whose logits are wanted, and which of these are to be sampled behind."""
        kept: list[int] = []
        sampled = []
        stop = 0
        for chunk in chunks:
            start, stop = stop, stop + len(chunk.tokens)
            if chunk.sequence in self._scores:
                kept.extend(range(start, stop))
            elif chunk.samples:
                kept.append(stop - 1)
            if chunk.samples:
                sampled.append(len(kept) - 1)
        return kept, sampled

    def _forward(self, batch: BatchTokens, ids: Ints, kept: list[int]) -> torch.Tensor:
        """Run the model; return logits [kept, vocabulary], float32."""
        device = self._model.device
        inputs = {
            "input_ids": torch.from_numpy(ids)[None].to(device),
            "position_ids": torch.from_numpy(batch.positions)[None].to(device),
            "attention_mask": self._mask,
            "cache": RequestSlice(self.cache, batch),
            "use_cache": False,
        }
        picks = len(kept) < len(ids)
        wanted = torch.tensor(kept or [len(ids) - 1], device=device) if picks else None
        if picks and self._picks_logits:
            inputs["logits_to_keep"] = wanted
        logits: torch.Tensor = self._model(**inputs).logits[0]
        if picks and not self._picks_logits:
            logits = logits[wanted]
        return logits.float()

    def _choose(self, chunks: Sequence[Chunk], logits: torch.Tensor) -> tuple[SampledToken, ...]:
        """Choose the tokens behind the chunks that sample, from logits [of these, vocabulary]."""
        states = [self._sampling[chunk.sequence] for chunk in chunks if chunk.samples]
        if not states:
            return ()
        tokens = sample(logits, states)
        for state, token in zip(states, tokens, strict=True):
            state.append(token.token)
        return tuple(tokens)
