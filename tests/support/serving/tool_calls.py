"""A model that calls tools and keeps to grammars, as far as a server sees it: a chat template, and scripted answers."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import openai

from elastic.engines.base import Grammar, Request
from elastic.errors import ConfigError
from support.serving.fake_engine import FakeEngine
from support.serving.live_server import TOKENIZER, Live, live

TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if mood %}{{ mood }}{% endif %}{% endif %}"
)
CHATTING = copy.deepcopy(TOKENIZER)
"""The tokenizer of the small model, with a chat template that knows tools."""
CHATTING.chat_template = TEMPLATE

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}},
            "required": ["city"],
            "$defs": {"days": {"type": "integer"}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
CALLED = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n' \
    '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'  # fmt: skip


class CheckedGrammars:
    """Compiles nothing, but refuses what is no grammar."""

    def __init__(self) -> None:
        self.compiled: list[Grammar] = []

    def matcher(self, grammar: Grammar) -> Any:
        try:
            if grammar.kind == "json_schema":
                json.loads(grammar.text)
            elif grammar.kind == "regex":
                re.compile(grammar.text)
        except (ValueError, re.error) as error:
            raise ConfigError(f"the grammar makes no language: {error}") from error
        self.compiled.append(grammar)
        return None


def instance(schema: Any, root: Any = None) -> Any:
    """The simplest value of a JSON schema, of those that clients in the tests make."""
    root = schema if root is None else root
    if schema is True or schema == {}:
        return {}
    if "$ref" in schema:
        target = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        return instance(target, root)
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return instance(schema[key][0], root)
    if "enum" in schema or "const" in schema:
        return schema["enum"][0] if "enum" in schema else schema["const"]
    match schema.get("type", "object"):
        case "object":
            return {name: instance(field, root) for name, field in schema.get("properties", {}).items()}
        case "array":
            return [instance(schema["items"], root)] * schema.get("minItems", 0)
        case "string":
            return "text"
        case "integer" | "number":
            return 7
        case "boolean":
            return True
    return None


def obedient(text: str = "") -> FakeEngine:
    """An engine whose answers are of the grammars that are asked for, and a text where there is none."""

    def script(request: Request) -> Sequence[int] | None:
        said = text
        if request.grammar is not None:
            is_json = request.grammar.kind == "json_schema"
            said = json.dumps(instance(json.loads(request.grammar.text))) if is_json else request.grammar.text
        ids: list[int] = CHATTING.encode(said, add_special_tokens=False)
        return ids if said else None

    return FakeEngine(script=script)


@contextlib.contextmanager
def serving(engine: FakeEngine, **options: Any) -> Iterator[tuple[openai.OpenAI, Live]]:
    """A server that knows tools and grammars, and a client of it."""
    options = {"tokenizer": CHATTING, "grammars": CheckedGrammars(), "tool_call_parser": "hermes", **options}
    with (
        live(engine, **options) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, server
