"""Tools as OpenAI's chat completions have them: functions that a model may ask its client to call."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from elastic.engines.base import Grammar
from elastic.server.protocol.errors import invalid
from elastic.server.protocol.fields import JSONObject, RequestBody, Text
from elastic.server.protocol.structured import json_grammar

MOST_TOOLS = 128
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
FunctionName = Annotated[Text, Field(min_length=1, max_length=256)]


class Function(RequestBody):
    """A function that can be called."""

    neutral = {}

    name: FunctionName
    description: Text | None = None
    parameters: JSONObject | None = None
    """A JSON schema of its arguments; None: it has none."""
    strict: bool | None = None


class Tool(RequestBody):
    """One tool; there are functions only."""

    neutral = {}

    type: Literal["function"]
    function: Function


class NamedFunction(RequestBody):
    """The name of a function."""

    name: FunctionName


class NamedTool(RequestBody):
    """`tool_choice`: this function is to be called."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(RequestBody):
    """What was called, and with what."""

    name: FunctionName
    arguments: Text
    """JSON, as text."""


class ToolCall(RequestBody):
    """A call in a message of the assistant."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_template_message(self, path: str) -> dict[str, Any]:
        """Return the call as chat templates read it, its arguments as an object. Raises `APIError`."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise invalid(f"{path}.function.arguments", "must be a JSON object, as text")
        return {
            **({} if self.id is None else {"id": self.id}),
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }


Tools = Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


def calls_grammar(tools: Sequence[Tool], *, several: bool) -> Grammar:
    """Return the rule of a JSON list of calls: `[{"name": …, "parameters": {…}}, …]`.

    Raises `APIError` where two functions mean different things by the same name of a definition, and for a reference to
    anything else than a definition: the schema is a part of the list's then, and it would mean something of that.
    """
    definitions: dict[str, dict[str, Any]] = {"$defs": {}, "definitions": {}}
    calls = []
    for i, tool in enumerate(tools):
        schema = dict(tool.function.parameters or NO_ARGUMENTS)
        for reference in _references(schema):
            if not reference.startswith(("#/$defs/", "#/definitions/")):
                where = f"tools.{i}.function.parameters"
                raise invalid(where, f"$ref {reference[:100]!r} is no definition: refer to one below $defs")
        for kind, schemas in definitions.items():
            own = schema.pop(kind, None) or {}
            if not isinstance(own, dict):
                raise invalid(f"tools.{i}.function.parameters.{kind}", "must be an object: schemas by their names")
            for name, definition in own.items():
                if schemas.setdefault(name, definition) != definition:
                    raise invalid(f"tools.{i}.function.parameters", f"another tool defines {name[:100]!r} otherwise")
        call = {"name": {"type": "string", "enum": [tool.function.name]}, "parameters": schema}
        calls.append({**NO_ARGUMENTS, "properties": call, "required": ["name", "parameters"]})
    bound = {} if several else {"maxItems": 1}
    items = {"anyOf": calls} if len(calls) > 1 else calls[0]
    kept = {kind: schemas for kind, schemas in definitions.items() if schemas}
    return json_grammar({"type": "array", "minItems": 1, **bound, "items": items, **kept})


def _references(schema: Any) -> Iterator[str]:
    """Yield what the schemas in one refer to."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if isinstance(reference := part.get("$ref"), str):
                yield reference
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
