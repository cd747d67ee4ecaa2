"""The kinds of fields that bodies have, and their bounds.

Bodies are strict: a number is not text, a boolean is not a number. Lists stop at their first error: a body of a million
wrong elements is one error.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from elastic.server.protocol.neutral_fields import Neutral, check_neutral

MOST_STOPS = 16
LONGEST_STOP = 256
MOST_PROMPTS = 128
MOST_LOGPROBS = 20
MOST_BIASES = 1024


def _check_unicode(text: str) -> str:
    """Refuse half of a surrogate pair: JSON can say it, but it is no character and cannot be tokenized."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be of Unicode characters; it has half of a surrogate pair") from None
    return text


def _check_json(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse what cannot be written as JSON again: surrogates, and numbers that are none."""
    _check_unicode(json.dumps(value, ensure_ascii=False, allow_nan=False))
    return value


Text = Annotated[str, AfterValidator(_check_unicode)]
JSONObject = Annotated[dict[str, Any], AfterValidator(_check_json)]
Count = Annotated[int, Field(ge=1, le=2**31)]
Token = Annotated[int, Field(ge=0, le=2**31)]
Stop = Annotated[Text, Field(min_length=1, max_length=LONGEST_STOP)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]
Texts = Annotated[list[Text], Field(fail_fast=True, max_length=MOST_PROMPTS)]
ListsOfTokens = Annotated[list[Tokens], Field(fail_fast=True, max_length=MOST_PROMPTS)]
Logprobs = Annotated[int, Field(ge=0, le=MOST_LOGPROBS)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class RequestBody(BaseModel):
    """A body, or a part of one: its fields by their types; those that nobody knows are kept, to be refused by name."""

    model_config = ConfigDict(strict=True, extra="allow", serialize_by_alias=True)
    neutral: ClassVar[Neutral | None] = None
    """Fields that are not supported, with the values that are taken; None: all are taken, and ignored."""

    def check(self, path: str = "") -> None:
        """Raise `APIError` for what is not supported; `path` is what comes before the names of fields in the body."""
        if self.neutral is not None:
            check_neutral(self.model_extra, self.neutral, path)
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, RequestBody):
                value.check(f"{path}{name}.")
            elif isinstance(value, list) and value and isinstance(value[0], RequestBody):
                for i, part in enumerate(value):
                    part.check(f"{path}{name}.{i}.")


class StrictBody(BaseModel):
    """A part of a body of elastic's own endpoints: fields that nobody knows are refused as they are parsed."""

    model_config = ConfigDict(strict=True, extra="forbid")
