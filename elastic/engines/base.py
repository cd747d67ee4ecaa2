"""The interface of engines, for what brings requests: the server, the replay of traces, a user's own program."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np
import torch

from elastic.controller.sensors.request_metrics import RequestMetrics
from elastic.errors import ConfigError, is_integer, is_number, require, require_flag
from elastic.runtime.runtime import Runtime

FinishReason = Literal["stop", "length", "cancelled", "failed"]
MOST_ANSWERS = 512
"""Of one request; over HTTP: prompts times answers of each."""
_ids = itertools.count()

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_MOST_PENALTY = 1e30  # of float32, so that penalties leave finite scores


@dataclass(frozen=True)
class Sampling:
    """The rule by which the next token is chosen. The default is greedy."""

    temperature: float = 0.0
    """0: the likeliest token."""
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    """The least probability, as a share of the likeliest token's."""
    repetition_penalty: float = 1.0
    """Divides positive scores of tokens of the prompt and the answer, multiplies negative ones; 1: none."""
    presence_penalty: float = 0.0
    """Taken from the score of each token that the answer has."""
    frequency_penalty: float = 0.0
    """Taken from the score of a token for each time that the answer has it."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, and what is added to their scores."""
    seed: int | None = None
    """For the same tokens again from the same logits; None: other ones each time."""

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if type(value) is not float:
                require(isinstance(value, int | float) and not isinstance(value, bool), name, value, "a number")
        for name in ("top_k", "seed"):
            value = getattr(self, name)
            require(value is None or is_integer(value), name, value, "a whole number, or None")
        finite = is_number(self.temperature)
        require(finite and self.temperature >= 0, "temperature", self.temperature, "at least 0 and finite")
        require(self.top_k is None or self.top_k >= 1, "top_k", self.top_k, "at least 1, or None")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0, at most 1")
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        factor, most = self.repetition_penalty, _MOST_PENALTY
        require(1 / most <= factor <= most, "repetition_penalty", factor, "above 0, from 1e-30 to 1e30")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            require(-most <= value <= most, name, value, "finite, from -1e30 to 1e30")
        if not isinstance(self.logit_bias, tuple) or self.logit_bias:
            _check_biases(self.logit_bias)
            object.__setattr__(self, "logit_bias", tuple((token, bias) for token, bias in self.logit_bias))
        require(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", self.seed, "from -2**63 to 2**64 - 1")


def _check_biases(biases: object) -> None:
    """Raise `ConfigError` for what are no pairs of a token id and a number, which may be endless."""
    pairs = "pairs of a token id, a whole number of at least 0, and a number, such as ((5, -1.5), (7, 2.0))"
    require(isinstance(biases, Sequence), "logit_bias", biases, pairs)
    for pair in cast("Sequence[object]", biases):
        require(isinstance(pair, Sequence) and len(pair) == 2, "logit_bias", biases, pairs)
        token, bias = cast("Sequence[Any]", pair)
        require(_is_index(type(token)) and token >= 0, "logit_bias", token, "of token ids, which are at least 0")
        endless = isinstance(bias, float) and math.isinf(bias)
        require(is_number(bias) or endless, "logit_bias", bias, f"a number for token {token}")


def _is_index(kind: type) -> bool:
    """Return whether values of a type can be token ids."""
    return hasattr(kind, "__index__") and not issubclass(kind, bool | torch.Tensor | np.ndarray)


@dataclass(frozen=True)
class Grammar:
    """The language that the text of an answer must be of (structured output)."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    """The schema as JSON, the regular expression, or the grammar in Lark's notation."""

    def __post_init__(self) -> None:
        kinds = ("json_schema", "regex", "lark")
        require(isinstance(self.kind, str) and self.kind in kinds, "kind", self.kind, f"one of {', '.join(kinds)}")
        require(isinstance(self.text, str), "text", self.text, "a text, such as json.dumps(schema)")


@dataclass(frozen=True)
class Request:
    """One prompt, and how it is to be continued."""

    prompt: tuple[int, ...]
    """Token ids, at least one."""
    max_tokens: int
    """The most tokens to generate, at least 1."""
    sampling: Sampling = Sampling()
    stop_tokens: tuple[int, ...] = ()
    """Token ids that end the request besides the model's own; the one that did is part of the output."""
    ignore_eos: bool = False
    """Whether the model's own end tokens do not end it."""
    min_tokens: int = 0
    """Before so many tokens no stop token is chosen."""
    n: int = 1
    """How many answers to generate, at most `MOST_ANSWERS`; they share the KV blocks of the prompt."""
    logprobs: int | None = None
    """How many of the likeliest tokens to report with each new token's own log-probability; None: no report."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens."""
    grammar: Grammar | None = None
    """What the answer must match; needs an engine with a `GrammarCompiler`."""
    arrived_s: float | None = None
    """When it arrived, in seconds of `time.perf_counter`; None: when it is submitted."""
    parent: str | None = None
    """Names what it is a part of, such as a call with several prompts: parts of one are no queue to each other."""
    id: str = field(default_factory=lambda: f"request-{next(_ids)}")

    def __post_init__(self) -> None:
        _check_tokens("prompt", self.prompt, isinstance(self.prompt, Sequence))
        if not isinstance(self.stop_tokens, tuple) or self.stop_tokens:
            _check_tokens("stop_tokens", self.stop_tokens, isinstance(self.stop_tokens, Collection))
            least = min(self.stop_tokens, default=0)
            require(least >= 0, "stop_tokens", least, "of token ids, which are at least 0")
        for name in ("prompt", "stop_tokens"):  # lists may be changed by whoever gave them, while it is computed
            if not isinstance(given := getattr(self, name), tuple | frozenset):
                object.__setattr__(self, name, tuple(given))
        for name in ("max_tokens", "min_tokens", "n"):
            require(is_integer(getattr(self, name)), name, getattr(self, name), "a whole number")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            require(count is None or is_integer(count), name, count, "a whole number, or None")
        require_flag(self.ignore_eos, "ignore_eos")
        require(isinstance(self.sampling, Sampling), "sampling", self.sampling, "an elastic.Sampling")
        require(
            self.grammar is None or isinstance(self.grammar, Grammar), "grammar", self.grammar, "a Grammar, or None"
        )
        arrived = self.arrived_s
        require(arrived is None or is_number(arrived), "arrived_s", arrived, "a finite number of seconds, or None")
        require(self.parent is None or isinstance(self.parent, str), "parent", self.parent, "a text, or None")
        require(isinstance(self.id, str), "id", self.id, "a text")


def _check_tokens(name: str, tokens: Any, listed: bool) -> None:
    """Raise `ConfigError` for what is not `listed`, or has other things than whole numbers; looks at each type once."""
    listed = listed and not isinstance(tokens, bytes | bytearray | memoryview) and getattr(tokens, "ndim", 1) == 1
    kinds = set(map(type, tokens)) if listed else {type(tokens)}
    if not listed or not all(map(_is_index, kinds)):
        wrong = ", ".join(sorted(each.__name__ for each in kinds))
        what = next(each for each in tokens if not _is_index(type(each))) if listed else tokens
        shown = repr(what) if len(repr(what)) < 80 else f"{repr(what)[:80]}…"
        raise ConfigError(f"{name}: it has to be a tuple of token ids, whole numbers, not of {wrong}: {shown}")


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, as the model gave them: before temperature, penalties, biases, limits."""

    token: int
    logprob: float
    """Of this token, at most 0."""
    rank: int
    """How many tokens are at least as likely; 1: the likeliest."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log-probabilities, in order, as many as were asked for."""


class SampledToken(NamedTuple):  # which is made in a third of the time of a frozen dataclass
    """The next token of a sequence."""

    token: int
    logprobs: TokenLogprobs | None = None
    """If its request asks for them."""
    error: str | None = None
    """Why there is none: the sequence has failed, `token` means nothing."""


@dataclass(frozen=True)
class Output:
    """New tokens of one answer of a request, and how it ended, if it did."""

    request: str
    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    error: str | None = None
    """With `finish="failed"`: why."""
    at_s: float = 0.0
    """When the tokens were there, in seconds of `time.perf_counter`."""
    weights: int = 0
    """Which weights computed them: an index into `Engine.weights`."""
    scheduled_s: float | None = None
    """In the first output with tokens, where the engine counts it: when the request first went into a forward pass."""
    waited_for_kv_s: float | None = None
    """There too: how long before that no KV block was to be had for it although the batch had room."""
    index: int = 0
    """Which of the `n` answers."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `tokens`, if asked for."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """In the first output of answer 0, if asked for: one for each token of the prompt, None for the first."""
    cached_tokens: int | None = None
    """In the first output: tokens of the prompt whose KV blocks were there already."""


Listener = Callable[[Output], None]
"""Called on the engine's thread, in order; it returns soon and does not raise."""


class TokenMatcher(Protocol):
    """What may come next in one answer. For one thread."""

    def fill_mask(self, mask: torch.Tensor) -> None:
        """Write which tokens may come next.

        mask: int32 [ceil(vocabulary / 32)] on the CPU; bit i % 32 of element i // 32 stands for token i. Raises
        `ConfigError` when the grammar cannot be followed any further.
        """

    def accept(self, token: int) -> None:
        """Go on by a token that `fill_mask` allowed. After any other `fill_mask` raises."""


class GrammarCompiler(Protocol):
    """Makes matchers of grammars over one tokenizer's vocabulary. Thread-safe."""

    def matcher(self, grammar: Grammar) -> TokenMatcher:
        """Return a new matcher at the beginning of an answer.

        Raises `ConfigError` for a grammar that makes none, `BackendUnavailable` without the package that it needs.
        """


class Engine(Protocol):
    """Serves many requests at once with one model. Thread-safe."""

    counters: RequestMetrics
    """What the controller and the metrics read."""

    @property
    def runtime(self) -> Runtime | None:
        """The runtime of the model, if it is wrapped."""

    @property
    def weights(self) -> tuple[tuple[str, ...], ...]:
        """The forms that the model's layers have had while requests were computed: for each, the layers' variants."""

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The model's own end tokens: of each kind, if it ends turns and texts by different ones."""

    @property
    def serving(self) -> bool:
        """True while requests are taken: after `start`, until it is stopped or its thread has failed."""

    def start(self) -> None:
        """Begin to serve. Raises `StateError` if it was stopped."""

    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request; its outputs go to `listener`, the last with `finish`.

        Raises `Overloaded` when too many wait (parts of its `parent` do not count), or the limit of the KV cache is too
        low now, `CapacityError` for a request that can never fit, `ConfigError` for one that makes no sense,
        `StateError` when the engine is not serving; then nothing is queued.
        """

    def longest_request(self, most: int, *, ever: bool = False) -> int:
        """Return the most tokens of prompt and answer, up to `most`, that a request may have for the KV cache.

        At its present limit, or `ever`: at the highest that there can be as weights are now.
        """

    def cancel(self, request: str, index: int | None = None) -> None:
        """End a request, or one of its answers, and free what it holds; its listener gets `cancelled` for each.

        Unknown or ended: nothing happens.
        """

    def stop(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Take no more requests; finish those there are (`drain`), or end them as `cancelled`. Can be called twice."""
