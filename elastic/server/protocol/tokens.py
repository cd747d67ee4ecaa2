"""The bodies of vLLM's `/tokenize` and `/detokenize`."""

from __future__ import annotations

from pydantic import Field

from elastic.server.protocol.chat import MOST_MESSAGES, Message, PromptFields
from elastic.server.protocol.errors import invalid
from elastic.server.protocol.fields import RequestBody, Text, Tokens
from elastic.server.protocol.neutral_fields import TOKENIZE


class TokenizeBody(PromptFields):
    """`POST /tokenize`: the tokens of a prompt, or of the messages of a chat."""

    neutral = TOKENIZE

    model: str | None = None
    prompt: Text | None = None
    messages: list[Message] = Field([], max_length=MOST_MESSAGES, fail_fast=True)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self, path: str = "") -> None:
        """Raise `APIError` for what is not supported."""
        super().check(path)
        if (self.prompt is None) == (not self.messages):
            raise invalid("prompt", "give either a prompt or messages")


class DetokenizeBody(RequestBody):
    """`POST /detokenize`: the text of tokens."""

    neutral = {}

    model: str | None = None
    tokens: Tokens
