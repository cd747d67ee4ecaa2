"""A model that calls tools and keeps to grammars, as far as a server sees it: a chat template, and scripted answers."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from typing import Any

from elastic.engines.base import Grammar, Request
from elastic.errors import ConfigError
from support.serving.fake_engine import FakeEngine
from support.serving.live_server import TOKENIZER

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
