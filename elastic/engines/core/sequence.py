"""One answer of a request while it is generated here."""

from __future__ import annotations

from elastic.engines.base import FinishReason, Request, TokenLogprobs
from elastic.engines.core.block_manager import BlockTable
from elastic.engines.core.step import SequenceState


class Sequence:
    """A sequence that has not ended. `tokens[:computed]` have keys and values, or a step is about to write them."""

    __slots__ = (
        "cached_tokens", "cohort", "computed", "ended", "id", "in_flight", "index", "prompt_logprobs", "request",
        "scheduled_s", "seed", "short_of_kv_s", "table", "tokens", "waited_for_kv_s",
    )  # fmt: skip

    def __init__(self, state: SequenceState, table: BlockTable, short_of_kv_s: float) -> None:
        self.id = state.id
        self.request: Request = state.request
        self.index = state.index
        self.seed = state.seed
        self.tokens: list[int] = [*state.request.prompt, *state.generated]
        self.computed = 0
        self.table = table
        self.cohort = 0
        self.in_flight = False
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
        if state.request.prompt_logprobs is not None and state.index == 0 and not state.generated:
            self.prompt_logprobs = []

    def append(self, token: int) -> FinishReason | None:
        """Append a generated token; return why it is the last one, if it is."""
        self.tokens.append(token)
        if token in self.request.stop_tokens:
            return "stop"
        return "length" if len(self.tokens) >= self.table.most_tokens else None

    def state(self) -> SequenceState:
        """Return what another engine needs to go on with it."""
        generated = tuple(self.tokens[len(self.request.prompt) :])
        return SequenceState(self.id, self.request, self.index, self.seed, generated)
