"""The bodies of requests. What is not supported is refused with its name; nothing is dropped in silence.

Of vLLM's further fields, `top_k`, `ignore_eos`, `stop_token_ids` and `continuous_usage_stats` are supported. The
values that other fields may have are in `neutral_fields.py`. Lists stop at their first error: a body of a million wrong
elements is one error.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from elastic.server.generation.errors import invalid
from elastic.server.generation.neutral_fields import (
    CHAT,
    COMPLETION,
    MESSAGE,
    PART,
    STREAM_OPTIONS,
    Neutral,
    check_neutral,
)

MOST_STOPS = 16
LONGEST_STOP = 256
MOST_PROMPTS = 128
MOST_MESSAGES = 4096


def _check_unicode(text: str) -> str:
    """Refuse half of a surrogate pair: JSON can say it, but it is no character and cannot be tokenized."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be of Unicode characters; it has half of a surrogate pair") from None
    return text


Text = Annotated[str, AfterValidator(_check_unicode)]
Count = Annotated[int, Field(ge=1, le=2**31)]
Token = Annotated[int, Field(ge=0, le=2**31)]
Stop = Annotated[Text, Field(min_length=1, max_length=LONGEST_STOP)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]
Texts = Annotated[list[Text], Field(fail_fast=True, max_length=MOST_PROMPTS)]
ListsOfTokens = Annotated[list[Tokens], Field(fail_fast=True, max_length=MOST_PROMPTS)]


class RequestBody(BaseModel):
    """Strict: a number is not text, a boolean is not a number."""

    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(RequestBody):
    """Options of a stream."""

    include_usage: bool | None = None
    """Send the usage in a last chunk."""
    continuous_usage_stats: bool | None = None
    """Send the usage so far in every chunk, of the answer that it belongs to."""


class SamplingBody(RequestBody):
    """The fields that completions and chat completions have in common."""

    neutral: ClassVar[Neutral]

    model: str | None = None
    """None: the one there is."""
    max_tokens: Count | None = None
    """Tokens to generate at most; None: 16 for a completion, all of the context for a chat completion."""
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    """0 is greedy; None is 1, as OpenAI has it."""
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    """Share of the probability that is drawn from; None: all."""
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    """Likeliest tokens that are drawn from; None, 0 or -1: all."""
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    """Texts that end an answer, and are no part of it."""
    stop_token_ids: Annotated[list[Token], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    """True: the model's own end tokens do not end an answer."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    """Only with `stream=true`."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """For the same tokens again, from the same logits."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings, none or more."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def check(self) -> None:
        """Raise `APIError` for what is not supported."""
        check_neutral(self.model_extra, self.neutral)
        if self.stream_options is not None:
            if not self.stream:
                raise invalid("stream_options", "goes with stream=true only")
            check_neutral(self.stream_options.model_extra, STREAM_OPTIONS, "stream_options.")


class CompletionBody(SamplingBody):
    """`POST /v1/completions`."""

    neutral = COMPLETION

    prompt: Text | Tokens | Texts | ListsOfTokens

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or more prompts, each text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if not self.prompt or isinstance(self.prompt[0], int) else self.prompt  # type: ignore


class TextPart(RequestBody):
    """One text of a message."""

    type: Literal["text"]
    text: Text


class Message(RequestBody):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    """None is for the assistant, who may have said nothing."""
    name: str | None = None

    @property
    def text(self) -> str:
        """Text of the message; empty without any."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    def check(self, path: str) -> None:
        """Raise `APIError` for what is not supported; `path` is that to this message in the body."""
        if self.content is None and self.role != "assistant":
            raise invalid(f"{path}.content", f"is null; a message of role {self.role!r} has a text or a list of texts")
        check_neutral(self.model_extra, MESSAGE, f"{path}.")
        for i, part in enumerate(self.content if isinstance(self.content, list) else ()):
            check_neutral(part.model_extra, PART, f"{path}.content.{i}.")


class ChatBody(SamplingBody):
    """`POST /v1/chat/completions`."""

    neutral = CHAT

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    max_completion_tokens: Count | None = None
    """The newer name of `max_tokens`."""

    def check(self) -> None:
        super().check()
        for i, message in enumerate(self.messages):
            message.check(f"messages.{i}")
