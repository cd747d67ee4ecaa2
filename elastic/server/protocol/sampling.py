"""The fields that completions and chat completions have in common: sampling, stops, streams, reports."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from elastic.server.protocol.errors import invalid
from elastic.server.protocol.fields import (
    MOST_BIASES,
    MOST_STOPS,
    Bias,
    Logprobs,
    Penalty,
    RequestBody,
    Share,
    Stop,
    Temperature,
    Token,
)
from elastic.server.protocol.neutral_fields import STREAM_OPTIONS
from elastic.server.protocol.structured import StructuredFields


class EventOptions(RequestBody):
    """Options of a stream of events: none that is supported."""

    neutral = STREAM_OPTIONS


class StreamOptions(EventOptions):
    """Options of a stream."""

    include_usage: bool | None = None
    """Send the usage in a last chunk."""
    continuous_usage_stats: bool | None = None
    """Send the usage so far in every chunk, of the answer that it belongs to."""


class SamplingBody(StructuredFields):
    """The fields that completions and chat completions have in common."""

    model: str | None = None
    """None: the one there is."""
    max_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    """Tokens to generate at most; None: 16 for a completion, all of the context for a chat completion."""
    min_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    """Tokens before which nothing ends an answer."""
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    """Answers to each prompt."""
    temperature: Temperature | None = None
    """0 is greedy; None is the model's default, else 1, as OpenAI has it."""
    top_p: Share | None = None
    """Share of the probability that is drawn from; None: the model's default, else all."""
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    """Likeliest tokens that are drawn from; 0 or -1: all; None: the model's default, else all."""
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    """Least probability of a token that is drawn, as a share of the likeliest one's."""
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] | None = None
    """Above 1: tokens of prompt and answer are less likely to come again."""
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MOST_BIASES)] | None = None
    """Token ids, as text, and what is added to their scores."""
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    """Texts that end an answer, and are no part of it."""
    stop_token_ids: Annotated[list[Token], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    """True: the text that ends an answer is part of it."""
    skip_special_tokens: bool | None = None
    """False: special tokens are part of the text."""
    add_special_tokens: bool | None = None
    """Whether tokenizing adds its special tokens; None: to a prompt, not to what a chat template made."""
    ignore_eos: bool | None = None
    """True: the model's own end tokens do not end an answer."""
    prompt_logprobs: Logprobs | None = None
    """Likeliest tokens to report at each position of the prompt; None: no report."""
    return_tokens_as_token_ids: bool | None = None
    """True: reported tokens are named `token_id:ID`."""
    return_token_ids: bool | None = None
    """True: ids of the tokens of prompt and answer come along."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    """Only with `stream=true`."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """For the same tokens again, from the same logits."""

    @property
    def answers(self) -> int:
        """Answers to generate for each prompt."""
        return self.n or 1

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """Token ids and what is added to their scores. Raises `APIError`."""
        biases = []
        for token, bias in (self.logit_bias or {}).items():
            if not (token.isascii() and token.isdigit() and len(token) <= 10):
                raise invalid("logit_bias", f"{token[:20]!r} is no token id")
            biases.append((int(token), bias))
        return tuple(biases)

    def check(self, path: str = "") -> None:
        """Raise `APIError` for what is not supported."""
        super().check(path)
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "goes with stream=true only")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs", "does not go with stream=true")
