"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from elastic.engines.base import Grammar
from elastic.server.protocol.errors import invalid
from elastic.server.protocol.fields import Count, JSONObject, Logprobs, RequestBody, Text
from elastic.server.protocol.neutral_fields import CHAT, MESSAGE, PART
from elastic.server.protocol.sampling import SamplingBody
from elastic.server.protocol.structured import json_grammar
from elastic.server.protocol.tools import NO_ARGUMENTS, NamedTool, Tool, ToolCall, ToolChoice, Tools, calls_grammar

MOST_MESSAGES = 4096
_ROLES = {"developer": "system"}


class TextPart(RequestBody):
    """One text of a message."""

    neutral = PART

    type: Literal["text"]
    text: Text


class Message(RequestBody):
    """One message of a chat."""

    neutral = MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    """None is for the assistant, who may have said nothing."""
    name: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_MESSAGES, fail_fast=True)] | None = None
    """What the assistant had called."""
    tool_call_id: Text | None = None
    """The call that a tool's message answers."""

    @property
    def text(self) -> str:
        """Text of the message; empty without any."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    def as_template_message(self, path: str) -> dict[str, Any]:
        """Return the message as chat templates read it. Raises `APIError`."""
        message: dict[str, Any] = {"role": _ROLES.get(self.role, self.role), "content": self.text}
        if self.tool_calls:
            calls = enumerate(self.tool_calls)
            message["tool_calls"] = [call.as_template_message(f"{path}.tool_calls.{i}") for i, call in calls]
        if self.role == "tool":
            message |= {} if self.tool_call_id is None else {"tool_call_id": self.tool_call_id}
            message |= {} if self.name is None else {"name": self.name}
        return message

    def check(self, path: str = "") -> None:
        """Raise `APIError` for what is not supported."""
        if self.content is None and self.role != "assistant":
            raise invalid(f"{path}content", f"is null; a message of role {self.role!r} has a text or a list of texts")
        if self.tool_calls and self.role != "assistant":
            raise invalid(f"{path}tool_calls", f"a message of role {self.role!r} has none; the assistant calls tools")
        if self.tool_call_id is not None and self.role != "tool":
            raise invalid(f"{path}tool_call_id", "goes with the role 'tool' only")
        super().check(path)


class PromptFields(RequestBody):
    """The fields of a body that a chat template makes a prompt of."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    """False: the prompt does not open an answer of the assistant."""
    continue_final_message: bool | None = None
    """True: the last message goes on; goes with `add_generation_prompt=false`."""
    chat_template_kwargs: JSONObject | None = None
    """More variables for the chat template, such as `enable_thinking`."""

    def check(self, path: str = "") -> None:
        """Raise `APIError` for what is not supported."""
        super().check(path)
        if self.continue_final_message and self.add_generation_prompt is not False:
            raise invalid("continue_final_message", "goes with add_generation_prompt=false only")


class ChatBody(PromptFields, SamplingBody):
    """`POST /v1/chat/completions`."""

    neutral = CHAT

    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    """The newer name of `max_tokens`."""
    logprobs: bool | None = None
    """True: report the log-probability of each new token."""
    top_logprobs: Logprobs | None = None
    """Likeliest tokens to report with it."""
    tool_choice: ToolChoice | None = None
    """None: `auto` where there are tools."""
    parallel_tool_calls: bool | None = None
    """False: at most one call in an answer."""

    @property
    def top_tokens(self) -> int | None:
        """Likeliest tokens to report with each new one; None: no report."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def choice_of_tools(self) -> Literal["none", "auto", "required"] | NamedTool:
        """Which tools are to be called."""
        return self.tool_choice if self.tools and self.tool_choice is not None else "auto" if self.tools else "none"

    def grammar(self) -> Grammar | None:
        """Return what the text of an answer must be, None where nothing is said. Raises `APIError`."""
        rule, choice = super().grammar(), self.choice_of_tools
        if choice in ("none", "auto"):
            return rule
        if rule is not None:
            raise invalid("tool_choice", "the answer is a call: it can have no other format; leave that, or the choice")
        if isinstance(choice, NamedTool):
            return json_grammar(self._named(choice.function.name).function.parameters or NO_ARGUMENTS)
        return calls_grammar(self.tools or (), several=self.parallel_tool_calls is not False)

    def check(self, path: str = "") -> None:
        """Raise `APIError` for what is not supported."""
        super().check(path)
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "goes with logprobs=true only")
        if not self.tools and (self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)):
            raise invalid("tool_choice", "there are no tools to choose from; give tools")
        if isinstance(self.tool_choice, NamedTool):
            self._named(self.tool_choice.function.name)

    def _named(self, name: str) -> Tool:
        for tool in self.tools or ():
            if tool.function.name == name:
                return tool
        raise invalid("tool_choice", f"there is no tool {name[:100]!r}; it must be one of tools")
