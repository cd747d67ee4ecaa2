"""What a fleet keeps of each request: enough to go on with it anywhere, and to tell each token exactly once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from elastic.cluster.fleet.records.memory_file import HeldMemory
from elastic.engines.base import FinishReason, Listener, Output, Request
from elastic.engines.core.kv_state import KVSource, SequenceKV
from elastic.engines.core.step import SequenceState
from elastic.engines.sampling import answer_seed
from elastic.errors import IntegrityError


@dataclass(slots=True, eq=False)
class AnswerRecord:
    """One answer of a request, as far as it was delivered."""

    state: SequenceState
    """As it arrived: its seed is drawn by the fleet, so it goes on with the same tokens anywhere."""
    tokens: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def computed(self) -> int:
        """Tokens that have keys and values where it runs, once it has a token; the last one has none yet."""
        return len(self.state.request.prompt) + len(self.tokens) - 1 if self.tokens else 0


@dataclass(eq=False)
class Resumption:
    """Requests that go on somewhere else: what it cost, known when each has had its next token."""

    requests: int
    done: Callable[[Resumption], None] = lambda _: None
    """Called under the fleet's lock."""
    left: set[str] = field(default_factory=set)
    """Those of which nothing was heard yet."""
    recomputed_tokens: int = 0
    stalled_s: float = 0.0

    def heard(self, request: str) -> None:
        """Note that a request goes on, or has ended."""
        if request in self.left:
            self.left.discard(request)
            if not self.left:
                self.done(self)


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request that has not ended."""

    request: Request
    listener: Listener
    answers: tuple[AnswerRecord, ...]
    arrived_s: float
    left: int
    """Answers that have not ended."""
    hashes: Mapping[int, list[bytes]] = field(default_factory=dict)
    """Of the prompt's full blocks, by the tokens of a block, which ranks may have of their own; none where no rank
    shares them."""
    instance: str | None = None
    """Who computes it; None: it waits at the fleet."""
    given_s: float = 0.0
    """When its instance was given it."""
    begun: bool = False
    """Whether its instance has told anything of it."""
    scheduled: bool = False
    routed: bool = False
    """Whether an instance was given it."""
    moving: bool = False
    """Somebody has it moved, who repairs it too."""
    cancelled: set[int] = field(default_factory=set)
    """Answers that somebody wants to end."""
    refused: dict[str, float] = field(default_factory=dict)
    """Instances that had no room for it, and until when they are not asked again."""
    unreachable_s: float | None = None
    """Since when no instance could hold it, however empty."""
    kv: tuple[SequenceKV, ...] = ()
    """Where its keys and values are left, if its instance was lost."""
    source: KVSource | None = None
    memory: HeldMemory | None = None
    """What they lie in: it is open until nobody can go on from there."""
    had: dict[int, int] = field(default_factory=dict)
    """Answers that go on elsewhere, and their tokens that were computed once."""
    resumption: Resumption | None = None
    last_s: float = 0.0
    """When its last token came."""
    losses: int = 0
    """Ranks in a row that were lost before they told anything of it."""
    telling: bool = False
    """Whether a thread is in its listener; what comes meanwhile is in `untold`."""
    untold: deque[Output] = field(default_factory=deque)

    @property
    def live(self) -> list[AnswerRecord]:
        """List the answers that have not ended."""
        return [answer for answer in self.answers if not answer.ended]

    def forget_kv(self) -> None:
        """Know of no keys and values any more that were left anywhere."""
        self.kv, self.source = (), None
        if self.memory is not None:
            self.memory.close()
            self.memory = None

    def states(self) -> tuple[SequenceState, ...]:
        """Return what an engine needs to go on with the answers that have not ended."""
        return tuple(
            replace(answer.state, generated=tuple(answer.tokens)) if answer.tokens else answer.state
            for answer in self.live
        )

    def take(self, output: Output, start: int) -> Output | None:
        """Note the tokens that an instance tells, which follow `start` others; return what of it is new.

        Raises `IntegrityError` if tokens are missing before them, or there is no such answer.
        """
        if not 0 <= output.index < len(self.answers):
            raise IntegrityError(
                f"request {self.request.id!r} has {len(self.answers)} answers, and tokens of answer {output.index} came"
            )
        answer = self.answers[output.index]
        have = len(answer.tokens)
        if answer.ended:
            return None
        if not 0 <= start <= have:
            raise IntegrityError(
                f"request {self.request.id!r}, answer {output.index}: tokens from {start} on came after {have}"
            )
        if start < have:  # told before, by who computed it then
            overlap = have - start
            if overlap >= len(output.tokens) and output.finish is None:
                return None
            output = replace(output, tokens=output.tokens[overlap:], logprobs=output.logprobs[overlap:])
        if have and (output.scheduled_s is not None or output.cached_tokens is not None):
            output = replace(
                output, scheduled_s=None, waited_for_kv_s=None, cached_tokens=None, prompt_logprobs=None
            )  # which belong to the first output
        answer.tokens.extend(output.tokens)
        if output.finish is not None:
            answer.ended = True
            self.left -= 1
        return output

    def end(self, indices: Iterable[int], finish: FinishReason, now: float, error: str | None = None) -> list[Output]:
        """End answers; return what is to be told."""
        outputs = []
        for index in indices:
            if not self.answers[index].ended:
                self.answers[index].ended = True
                self.left -= 1
                outputs.append(Output(self.request.id, (), finish, error, now, index=index))
        return outputs


def new_record(request: Request, listener: Listener, now: float) -> RequestRecord:
    """Return the record of a request that arrives now, unless it says when it did."""
    names = [request.id] if request.n == 1 else [f"{request.id}[{index}]" for index in range(request.n)]
    states = [SequenceState(name, request, i, answer_seed(request, i)) for i, name in enumerate(names)]
    arrived_s = now if request.arrived_s is None else request.arrived_s
    return RequestRecord(request, listener, tuple(map(AnswerRecord, states)), arrived_s, len(states))
