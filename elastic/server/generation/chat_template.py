"""From messages to the text of a prompt: the tokenizer's chat template, or plain lines without one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from elastic.server.protocol.chat import PromptFields
from elastic.server.protocol.errors import invalid

_REFUSALS = (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError, RecursionError)


def render(tokenizer: Any, body: PromptFields) -> str:
    """Return the text of the prompt. Raises `APIError` for what the template refuses."""
    messages = [message.as_template_message(f"messages.{i}") for i, message in enumerate(body.messages)]
    opens = body.add_generation_prompt is not False
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        _require_no_template(body, messages)
        return without_template(messages, opens=opens, goes_on=bool(body.continue_final_message))
    options = body.chat_template_kwargs or {}
    apply = tokenizer.apply_chat_template
    reserved = sorted(options.keys() & _parameters(getattr(apply, "__func__", apply)))
    if reserved:
        raise invalid("chat_template_kwargs", f"{reserved[0]!r} is no variable of a template")
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()] or None
    if tools and isinstance(template, str) and "tools" not in _variables(template):
        raise invalid("tools", "the model's chat template does not tell the model of tools")
    try:
        return str(
            tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=opens,
                continue_final_message=bool(body.continue_final_message),
                **options,
            )
        )
    except _REFUSALS as error:
        raise invalid("messages", f"the model's chat template refuses them: {error}") from error


def without_template(messages: Sequence[dict[str, Any]], *, opens: bool = True, goes_on: bool = False) -> str:
    """Return the prompt where a tokenizer has no chat template: lines `role: content`, and an open `assistant:`."""
    lines = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
    return lines.removesuffix("\n") if goes_on else lines + "assistant:" if opens else lines


def _require_no_template(body: PromptFields, messages: Sequence[dict[str, Any]]) -> None:
    """Raise `APIError` for what only a chat template can say to a model."""
    if body.tools:
        raise invalid("tools", "the model has no chat template, which would tell it of tools")
    if body.chat_template_kwargs:
        raise invalid("chat_template_kwargs", "the model has no chat template")
    for i, message in enumerate(messages):
        for name, used in (("role", message["role"] == "tool"), ("tool_calls", "tool_calls" in message)):
            if used:
                words = "the model has no chat template, which would tell it of calls of tools"
                raise invalid(f"messages.{i}.{name}", words)


@cache
def _parameters(apply_chat_template: Callable[..., Any]) -> frozenset[str]:
    """Return the names that the function of a tokenizer has its own use for."""
    names = inspect.signature(apply_chat_template).parameters
    return frozenset({*names, "messages", "documents"} - {"kwargs", "self"})


@cache
def _variables(template: str) -> frozenset[str]:
    """Return the variables that a template reads; none where it is no template, as rendering will say."""
    try:
        tree = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateError:
        return frozenset({"tools"})  # of transformers' own blocks
    return frozenset(find_undeclared_variables(tree))
