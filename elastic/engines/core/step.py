"""What a scheduler asks of an executor, and what it gets back: records that can be sent to another process."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from elastic.engines.base import Request, SampledToken, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SequenceState:
    """One answer of a request, at any moment between two steps: all that another engine needs to go on with it."""

    id: str
    """Of the sequence: the request's id, and the answer's index where there are several."""
    request: Request
    index: int
    """Which of the request's answers."""
    seed: int
    """Of its random numbers; the one at a position depends on the seed and the position alone."""
    generated: tuple[int, ...] = ()
    """Tokens so far."""

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still to come with it, which executors know only as a whole."""
        return self.request.prompt_logprobs is not None and not self.index and not self.generated


class ScheduledChunk(
    NamedTuple
):  # which is made in a third of the time of a frozen dataclass, for each sequence and step
    """The new tokens of one sequence in a step."""

    sequence: str
    start: int
    """Tokens whose keys and values its blocks hold before."""
    tokens: tuple[int, ...]
    samples: bool
    """Whether a token is to be sampled behind its last one."""
    blocks: tuple[tuple[int, ...], ...]
    """For each group of layers, the logical blocks that its table gets more of for this step."""


@dataclass(frozen=True, slots=True)
class Step:
    """One batch."""

    number: int
    cohort: int
    """Sequences of different cohorts may be in flight at the same time."""
    chunks: tuple[ScheduledChunk, ...]
    added: tuple[SequenceState, ...] = ()
    """Sequences of `chunks` that the executor does not know yet."""
    removed: tuple[str, ...] = ()
    """Sequences that the executor can forget, before anything else."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a step."""

    sampled: tuple[SampledToken, ...]
    """For each chunk that samples, in order."""
    prompt_logprobs: dict[str, tuple[TokenLogprobs | None, ...]] = field(default_factory=dict)
    """Sequence -> those of the tokens of its chunk, if its request asks for them."""


class Executor(Protocol):
    """Computes steps in the order in which they are given. Its calls come from one thread."""

    def execute(self, step: Step) -> Future[StepResult]:
        """Compute a step. The future fails with what the model raised; the sequences of the step are then lost.

        With `RankLost` it is the step that was lost on its way, and its sequences go on once it has recovered.
        """

    def remove(self, sequences: tuple[str, ...]) -> None:
        """Forget sequences when no further step may come."""
