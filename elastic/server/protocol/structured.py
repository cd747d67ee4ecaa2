"""What an answer must be: `response_format` as OpenAI has it, `structured_outputs` and `guided_*` as vLLM has them."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from elastic.engines.base import Grammar
from elastic.server.protocol.errors import invalid
from elastic.server.protocol.fields import JSONObject, RequestBody, Text
from elastic.server.protocol.neutral_fields import STRUCTURED_OUTPUTS, Neutral

LONGEST_GRAMMAR = 65_536
MOST_CHOICES = 1024
ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')
_MEANING = re.compile(r"[.^$*+?()\[\]{}|\\]")
"""Characters that a regular expression does not take for themselves."""

Pattern = Annotated[Text, Field(min_length=1, max_length=LONGEST_GRAMMAR)]
Choices = Annotated[list[Text], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)]
Schema = JSONObject | bool | Text


class JSONSchema(RequestBody):
    """The `json_schema` of a `response_format`."""

    neutral: ClassVar[Neutral | None] = {}

    name: Text
    schema_: JSONObject | None = Field(None, alias="schema")
    description: Text | None = None
    strict: bool | None = None
    """The schema is kept to in any case."""


class TextFormat(RequestBody):
    """`response_format` without a rule."""

    neutral = {}

    type: Literal["text"]


class JSONObjectFormat(RequestBody):
    """Any JSON object."""

    neutral = {}

    type: Literal["json_object"]


class JSONSchemaFormat(RequestBody):
    """JSON of a schema."""

    neutral = {}

    type: Literal["json_schema"]
    json_schema: JSONSchema


ResponseFormat = Annotated[TextFormat | JSONObjectFormat | JSONSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(RequestBody):
    """vLLM's `structured_outputs`: one of its fields."""

    neutral = STRUCTURED_OUTPUTS

    json_: Schema | None = Field(None, alias="json")
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Pattern | None = None
    """In Lark's notation."""
    json_object: bool | None = None

    def rules(self) -> dict[str, Grammar | None]:
        """Return the rule of each field, None where it says nothing."""
        choices = "|".join(_MEANING.sub(r"\\\g<0>", choice) for choice in self.choice or ())
        return {
            "json": None if self.json_ is None else json_grammar(self.json_),
            "regex": Grammar("regex", self.regex) if self.regex else None,
            "choice": Grammar("regex", choices) if self.choice else None,
            "grammar": Grammar("lark", self.grammar) if self.grammar else None,
            "json_object": ANY_OBJECT if self.json_object else None,
        }


class StructuredFields(RequestBody):
    """The fields of a body that say what the text of an answer must be; at most one of them."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Pattern | None = None

    def grammar(self) -> Grammar | None:
        """Return the rule, None without one. Raises `APIError` for several, and for one that is too long."""
        guided = {name: getattr(self, f"guided_{name}") for name in ("regex", "choice", "grammar")}
        of_guided = StructuredOutputs.model_construct(json_=self.guided_json, **guided)
        sources = {"structured_outputs.": self.structured_outputs, "guided_": of_guided}
        rules = {"response_format": self.response_format and format_grammar(self.response_format)}
        for prefix, outputs in sources.items():
            rules |= {} if outputs is None else {f"{prefix}{name}": rule for name, rule in outputs.rules().items()}
        given = [(name, rule) for name, rule in rules.items() if isinstance(rule, Grammar)]
        if len(given) > 1:
            raise invalid(given[1][0], f"{given[0][0]} says already what the text must be; give one of them")
        for name, rule in given:
            if len(rule.text) > LONGEST_GRAMMAR:
                raise invalid(name, f"has {len(rule.text):,} characters; at most {LONGEST_GRAMMAR:,} are taken")
        return given[0][1] if given else None


def format_grammar(form: TextFormat | JSONObjectFormat | JSONSchemaFormat) -> Grammar | None:
    """Return the rule of a `response_format`, None for plain text."""
    match form:
        case JSONObjectFormat():
            return ANY_OBJECT
        case JSONSchemaFormat():
            return ANY_OBJECT if form.json_schema.schema_ is None else json_grammar(form.json_schema.schema_)
        case TextFormat():
            return None


def json_grammar(schema: dict[str, Any] | bool | str) -> Grammar:
    """Return the rule of a JSON schema, given as JSON or as its text."""
    return Grammar("json_schema", schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False))
