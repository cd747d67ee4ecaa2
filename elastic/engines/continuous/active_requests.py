"""The requests that an engine has taken and that have not ended: who listens to them, and what was told."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from elastic.controller.sensors.request_metrics import Outcome, RequestMetrics
from elastic.engines.base import FinishReason, Listener, Output, Request
from elastic.engines.continuous.variant_recorder import VariantRecorder
from elastic.engines.core.sequence import Produced
from elastic.engines.core.sequence import Sequence as LiveSequence
from elastic.engines.core.step import SequenceState
from elastic.errors import ConfigError

logger = logging.getLogger(__name__)
OUTCOMES: dict[FinishReason, Outcome] = {
    "stop": "completed",
    "length": "completed",
    "cancelled": "cancelled",
    "failed": "failed",
}


@dataclass(slots=True)
class ActiveRequest:
    """A request of which an answer has not ended."""

    request: Request
    listener: Listener
    names: tuple[str, ...]
    """Its sequences."""
    live: dict[int, str]
    """The answers that have not ended: index -> sequence."""
    told: set[int] = field(default_factory=set)
    """Answers of which tokens were told."""
    scheduled: bool = False


class ActiveRequests:
    """Tells listeners and counters what becomes of requests. What the step loop calls is for its thread."""

    def __init__(self, counters: RequestMetrics, variants: VariantRecorder) -> None:
        self.counters = counters
        self._variants = variants
        self.active: dict[str, ActiveRequest] = {}
        """By their ids."""
        self.untold: dict[str, LiveSequence] = {}
        """The sequences whose token of a step is yet to be told, by name. For the loop's thread: listeners may ask."""
        self._names: set[str] = set()  # of their sequences
        self._lock = threading.Lock()

    def waiting_before(self, request: Request) -> int:
        """Count the others that were not in a step yet, without parts of this one's parent."""
        with self._lock:
            waiting = [active.request for active in self.active.values() if not active.scheduled]
        others = [each for each in waiting if each.id != request.id]
        return sum(request.parent is None or other.parent != request.parent for other in others)

    def add(self, states: Sequence[SequenceState], listener: Listener) -> None:
        """Take a request, of which the counters are not told. Raises `ConfigError` if its id is in use."""
        request = states[0].request
        live = {state.index: state.id for state in states}
        with self._lock:
            if request.id in self.active or not self._names.isdisjoint(live.values()):
                raise ConfigError(f"request id {request.id!r} is in use; choose another")
            self._names.update(live.values())
            self.active[request.id] = ActiveRequest(request, listener, tuple(live.values()), live)

    def forget(self, request: str, outcome: Outcome) -> None:
        """End a request without a word to its listener; unknown: nothing happens."""
        with self._lock:
            active = self.active.pop(request, None)
            self._names.difference_update(active.names if active is not None else ())
        if active is not None:
            self.counters.ended(request, outcome)

    def sequences(self, request: str, index: int | None = None) -> list[str]:
        """List the sequences of a request's answers, or of one, that have not ended."""
        active = self.active.get(request)
        live = dict(active.live) if active is not None else {}
        return list(live.values()) if index is None else [name for i, name in live.items() if i == index]

    # -- what becomes of sequences

    def scheduled(self, sequences: Iterable[LiveSequence]) -> None:
        """Note sequences that are in a step for the first time."""
        for sequence in sequences:
            active = self.active.get(sequence.request.id)
            if active is not None and not active.scheduled:
                active.scheduled = True
                self.counters.scheduled(sequence.request.id, sequence.scheduled_s)

    def produced(self, tokens: list[Produced]) -> None:
        """Tell the tokens of a step, and the ends."""
        now, weights = time.perf_counter(), self._variants.current
        untold = self.untold = {each.sequence.id: each.sequence for each in tokens if each.sampled.error is None}
        counts: dict[str, int] = {}
        for sequence, sampled, _ in tokens:
            if sampled.error is not None:
                self.end(sequence, "failed", sampled.error)
                continue
            counts[sequence.request.id] = counts.get(sequence.request.id, 0) + 1
        self.counters.produced_together(counts, now)
        for sequence, sampled, finish in tokens:
            active = self.active.get(sequence.request.id)
            if untold.pop(sequence.id, None) is None or active is None:  # it failed, or a listener exported it
                continue
            logprobs = () if sampled.logprobs is None else (sampled.logprobs,)
            if sequence.index in active.told:
                output = Output(
                    active.request.id, (sampled.token,), finish, None, now, weights,
                    index=sequence.index, logprobs=logprobs,
                )  # fmt: skip
            else:
                active.told.add(sequence.index)
                prompt = sequence.prompt_logprobs
                output = Output(
                    active.request.id, (sampled.token,), finish, None, now, weights,
                    sequence.scheduled_s, sequence.waited_for_kv_s, sequence.index, logprobs,
                    None if prompt is None else tuple(prompt), sequence.cached_tokens,
                )  # fmt: skip
            self._tell(active, output)

    def end(self, sequence: LiveSequence, finish: FinishReason, error: str | None = None) -> None:
        """Tell that a sequence ended without a token."""
        active = self.active.get(sequence.request.id)
        if active is not None:
            now, weights = time.perf_counter(), self._variants.current
            self._tell(active, Output(active.request.id, (), finish, error, now, weights, index=sequence.index))

    def _tell(self, active: ActiveRequest, output: Output) -> None:
        if output.finish is not None:
            del active.live[output.index]
            if not active.live:
                self.forget(output.request, OUTCOMES[output.finish])
        try:
            active.listener(output)
        except BaseException:  # a listener's fault, `sys.exit()` too, is not its engine's: the others are served on
            logger.exception("the listener of request %s failed", output.request)
