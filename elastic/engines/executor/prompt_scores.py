"""Log-probabilities of the tokens of prompts, which are computed chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from elastic.engines.base import Request, TokenLogprobs
from elastic.engines.core.step import ScheduledChunk
from elastic.engines.sampling import prompt_logprobs


@dataclass
class _Prompt:
    request: Request
    last: torch.Tensor | None = None
    """[vocabulary]: logits behind the last token of the chunk before."""


class PromptScores:
    """The prompts that are being computed and whose tokens' log-probabilities were asked for."""

    def __init__(self) -> None:
        self._prompts: dict[str, _Prompt] = {}

    def __contains__(self, sequence: str) -> bool:
        return sequence in self._prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def expect(self, sequence: str, request: Request) -> None:
        """Note that a sequence begins with a prompt whose log-probabilities are asked for."""
        self._prompts[sequence] = _Prompt(request)

    def forget(self, sequence: str) -> None:
        """Forget a sequence; unknown: nothing happens."""
        self._prompts.pop(sequence, None)

    def take(
        self, chunks: Sequence[ScheduledChunk], logits: torch.Tensor
    ) -> dict[str, tuple[TokenLogprobs | None, ...]]:
        """Return the log-probabilities of the prompts' tokens in a step, by sequence.

        logits: [kept, vocabulary] of the step, for the sequences here those behind each of their tokens.
        """
        by_sequence: dict[str, tuple[TokenLogprobs | None, ...]] = {}
        stop = 0
        for chunk in chunks:
            prompt = self._prompts.get(chunk.sequence)
            start, stop = stop, stop + (len(chunk.tokens) if prompt else int(chunk.samples))
            if prompt is None:
                continue
            behind = logits[start:stop]
            before = behind[:-1] if prompt.last is None else torch.cat([prompt.last[None], behind[:-1]])
            targets = chunk.tokens[prompt.last is None :]
            scores = prompt_logprobs(before, targets, prompt.request.prompt_logprobs or 0)
            by_sequence[chunk.sequence] = scores if prompt.last is not None else (None, *scores)
            prompt.last = behind[-1].clone()
            if chunk.start + len(chunk.tokens) >= len(prompt.request.prompt):
                self.forget(chunk.sequence)
        return by_sequence
