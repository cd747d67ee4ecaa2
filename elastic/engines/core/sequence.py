"""One answer of a request while it is generated here."""

from __future__ import annotations

from typing import NamedTuple

from elastic.engines.base import FinishReason, Request, SampledToken, TokenLogprobs
from elastic.engines.core.block_pool import BlockTable
from elastic.engines.core.kv_state import SequenceKV
from elastic.engines.core.step import SequenceState


class Sequence:
    """A sequence that has not ended. `tokens[:computed]` have keys and values, or a step is about to write them."""

    __slots__ = (
        "cached_tokens", "cohort", "computed", "ended", "id", "in_flight", "index", "known", "noted",
        "prompt_logprobs", "request", "scheduled_s", "seed", "short_of_kv_s", "table", "tokens", "waited_for_kv_s",
    )  # fmt: skip

    def __init__(self, state: SequenceState, table: BlockTable, short_of_kv_s: float) -> None:
        self.id = state.id
        self.request: Request = state.request
        self.index = state.index
        self.seed = state.seed
        self.tokens: list[int] = [*state.request.prompt, *state.generated]
        self.computed = 0
        self.table = table
        self.cohort = UNPLACED
        """Which one it is of, since it has blocks."""
        self.in_flight = 0
        """Of `computed`, the tokens that a step in flight computes."""
        self.known = False
        """Whether the executor knows it."""
        self.noted: tuple[int, ...] | None = None
        """Of a sequence whose blocks were noted between two steps: how many of each group, until the next ones are."""
        self.ended = False
        self.cached_tokens = 0
        """Of its tokens, those whose blocks were there when it began."""
        self.scheduled_s: float | None = None
        """When it first went into a step, on the scheduler's clock."""
        self.waited_for_kv_s = 0.0
        """How long before that no block was to be had."""
        self.short_of_kv_s = short_of_kv_s
        """`Scheduler.short_of_kv_s` when it came."""
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        """Of its tokens that were computed so far, if the request asks for them."""
        if state.scores_prompt:
            self.prompt_logprobs = []

    def restart(self, table: BlockTable) -> None:
        """Have nothing of it be computed, and its executor not know it."""
        self.table, self.computed, self.in_flight = table, 0, 0
        self.cohort, self.known, self.noted = UNPLACED, False, None
        if self.state().scores_prompt:
            self.prompt_logprobs = []  # else they were told

    def append(self, token: int) -> FinishReason | None:
        """Append a generated token; return why it is the last one, if it is."""
        self.tokens.append(token)
        if token in self.request.stop_tokens:
            return "stop"
        return "length" if len(self.tokens) >= self.table.most_tokens else None

    @property
    def in_prompt(self) -> bool:
        """True until all of its tokens but the last are computed: then it decodes."""
        return self.computed < len(self.tokens) - 1

    def state(self) -> SequenceState:
        """Return what another engine needs to go on with it."""
        generated = tuple(self.tokens[len(self.request.prompt) :])
        return SequenceState(self.id, self.request, self.index, self.seed, generated)

    def kv(self) -> SequenceKV:
        """Return where its keys and values are, as far as no step is about to write them."""
        computed = self.computed - self.in_flight
        return SequenceKV(self.id, computed, tuple(map(tuple, self.table.blocks)), computed >= len(self.tokens) - 1)


class Cohort:
    """Live sequences of which one step at a time is in flight."""

    __slots__ = ("copy", "decoding", "in_flight", "number", "prefilling", "refused", "salt")

    def __init__(self, number: int, copies: int = 1) -> None:
        """`copies`: of the layers that the executor computes; cohorts go by one after another of them in turn."""
        self.number = number
        self.copy = number % copies
        self.salt = bytes((self.copy,)) if self.copy else b""
        """Its sequences share blocks with those of cohorts that have the same."""
        self.decoding: dict[Sequence, None] = {}  # as sets in order
        self.prefilling: dict[Sequence, None] = {}
        self.in_flight = False
        self.refused = False  # whether a sequence found no room the last time

    def __len__(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    def remove(self, sequence: Sequence) -> None:
        """Have a sequence be none of these."""
        self.decoding.pop(sequence, None)
        self.prefilling.pop(sequence, None)


UNPLACED = Cohort(0)
"""Of sequences that are of no cohort."""


class Produced(NamedTuple):
    """A token that a step brought."""

    sequence: Sequence
    sampled: SampledToken
    finish: FinishReason | None
    """Why it is the last one of its sequence, which has ended then. "failed": there is no token, but an error."""
