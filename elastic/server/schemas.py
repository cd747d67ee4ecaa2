"""The bodies of requests. What is not supported is refused with its name; nothing is dropped in silence.

Fields of OpenAI's API that change nothing here (`user`, `metadata`, …) are taken and ignored; those that would change
the answer are taken with their neutral value only (`n=1`, `logprobs=null`, …). Of vLLM's further fields, `top_k`,
`ignore_eos` and `stop_token_ids` are known.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from elastic.server.errors import invalid, unsupported

MOST_STOPS = 16
LONGEST_STOP = 256
MOST_PROMPTS = 128
_IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier"}
    | {"prompt_cache_key", "prompt_cache_retention", "verbosity"}
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none"),
    "parallel_tool_calls": (None, True, False),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "web_search_options": (None,),
}

_GREEDY = 1e-5
"""A temperature below this is 0: dividing by it could overflow."""


def _check_unicode(text: str) -> str:
    """JSON can say half of a surrogate pair, which is no character and cannot be tokenized."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("must be of Unicode characters; it has half of a surrogate pair")
    return text


Text = Annotated[str, AfterValidator(_check_unicode)]
Count = Annotated[int, Field(ge=1, le=2**31)]
Token = Annotated[int, Field(ge=0, le=2**31)]
Stop = Annotated[Text, Field(min_length=1, max_length=LONGEST_STOP)]


class Body(BaseModel):
    """Strict: a number is not text, a boolean is not a number."""

    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(Body):
    include_usage: bool | None = None
    """Send the usage in a last chunk."""

    def check(self) -> None:
        _check_extra(self, "stream_options.")


class Sampled(Body):
    """What completions and chat completions have in common."""

    model: str | None = None
    """None: the one there is."""
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    """0 is greedy; None is 1, as OpenAI has it."""
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    """None, 0 or -1: all."""
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=MOST_STOPS)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """For the same tokens again, from the same logits."""

    @property
    def greedy(self) -> bool:
        return self.temperature is not None and self.temperature < _GREEDY

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """Raises `APIError` for what is not supported."""
        _check_extra(self)
        if self.stream_options is not None:
            if not self.stream:
                raise invalid("stream_options", "goes with stream=true only")
            self.stream_options.check()


class CompletionBody(Sampled):
    """`POST /v1/completions`."""

    prompt: Text | list[Token] | list[Text] | list[list[Token]]

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or more, each text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if not self.prompt or isinstance(self.prompt[0], int) else self.prompt  # type: ignore

    def check(self) -> None:
        super().check()
        if len(self.prompts) > MOST_PROMPTS:
            raise invalid("prompt", f"{len(self.prompts)} prompts; at most {MOST_PROMPTS} in one request")


class TextPart(Body):
    type: Literal["text"]
    text: Text


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(Sampled):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    """The newer name of `max_tokens`."""

    def check(self) -> None:
        super().check()
        for i, message in enumerate(self.messages):
            _check_extra(message, f"messages.{i}.", _IN_MESSAGES)


_IN_MESSAGES: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("tool_calls", "function_call", "refusal", "audio", "annotations"), (None, [])
)


def _check_extra(body: Body, prefix: str = "", neutral: dict[str, tuple[Any, ...]] = _NEUTRAL) -> None:
    for name, value in (body.model_extra or {}).items():
        if name in _IGNORED:
            continue
        if name not in neutral:
            raise invalid(prefix + name, "is not known here", "unknown_parameter")
        if not any(type(value) is type(allowed) and value == allowed for allowed in neutral[name]):
            allowed = " or ".join(map(json.dumps, neutral[name][1:])) or "null"
            raise unsupported(prefix + name, f"only {allowed} is supported")
