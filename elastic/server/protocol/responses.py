"""The body of `POST /v1/responses`: texts and functions, no stored state."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from elastic.server.protocol.chat import MOST_MESSAGES, ChatBody, Message
from elastic.server.protocol.errors import invalid
from elastic.server.protocol.fields import Count, JSONObject, Logprobs, RequestBody, Share, Temperature, Text
from elastic.server.protocol.neutral_fields import ITEM, RESPONSES
from elastic.server.protocol.sampling import EventOptions
from elastic.server.protocol.structured import (
    JSONObjectFormat,
    JSONSchema,
    JSONSchemaFormat,
    ResponseFormat,
    TextFormat,
)
from elastic.server.protocol.tools import (
    MOST_TOOLS,
    CalledFunction,
    Function,
    FunctionName,
    NamedFunction,
    NamedTool,
    Tool,
    ToolCall,
)

_AS_IN_CHAT = (
    *("temperature", "top_p", "top_k", "seed", "ignore_eos", "chat_template_kwargs", "top_logprobs"),
    "parallel_tool_calls",
)
"""Fields that mean what those of a chat completion mean."""
LOGPROBS = "message.output_text.logprobs"
_STATELESS = "nothing is stored here: send all of the conversation as input"


class ContentPart(RequestBody):
    """One text of an item."""

    type: Literal["input_text", "output_text", "text"]
    text: Text


Content = Text | Annotated[list[ContentPart], Field(fail_fast=True)]


class Item(RequestBody):
    """One element of the input."""

    neutral = ITEM


class MessageItem(Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class CallItem(Item):
    """A call that the model had made."""

    type: Literal["function_call"]
    call_id: Text
    name: FunctionName
    arguments: Text


class CallOutputItem(Item):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Content


class FunctionTool(RequestBody):
    """A function that can be called."""

    neutral = {}

    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: JSONObject | None = None
    strict: bool | None = None


class NamedChoice(RequestBody):
    """`tool_choice`: this function is to be called."""

    type: Literal["function"]
    name: FunctionName


class JSONSchemaText(JSONSchema):
    """Text that is JSON of a schema."""

    neutral = None

    type: Literal["json_schema"]


class TextOptions(RequestBody):
    """What the text must be."""

    neutral = {}

    format: Annotated[TextFormat | JSONObjectFormat | JSONSchemaText, Field(discriminator="type")] | None = None
    verbosity: str | None = None


class ResponsesBody(RequestBody):
    """`POST /v1/responses`."""

    neutral = RESPONSES

    input: (
        Text
        | Annotated[
            list[MessageItem | CallItem | CallOutputItem], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
        ]
    )
    model: str | None = None
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: JSONObject | None = None
    top_logprobs: Logprobs | None = None
    include: Annotated[list[str], Field(max_length=16, fail_fast=True)] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    stream_options: EventOptions | None = None
    metadata: JSONObject | None = None

    @property
    def reports_logprobs(self) -> bool:
        """True when log-probabilities are asked for."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def check(self, path: str = "") -> None:
        """Raise `APIError` for what is not supported."""
        super().check(path)
        if self.store:
            raise invalid("store", f"true is not supported: {_STATELESS}, and store=false", "unsupported_value")
        if self.previous_response_id is not None:
            raise invalid("previous_response_id", f"is not known: {_STATELESS}", "unsupported_value")
        for name in self.include or ():
            if name not in (LOGPROBS, "reasoning.encrypted_content"):
                raise invalid("include", f"only {LOGPROBS} is supported", "unsupported_value")

    def as_chat(self) -> ChatBody:
        """Return the chat completion that answers it. Raises `APIError`."""
        messages = self._messages()
        if len(messages) > MOST_MESSAGES:
            raise invalid("input", f"is {len(messages):,} messages with the instructions; at most {MOST_MESSAGES:,} go")
        functions = [Function(**_fields(tool, tuple(Function.model_fields))) for tool in self.tools or ()]
        choice: Any = self.tool_choice
        if isinstance(choice, NamedChoice):
            choice = NamedTool(type="function", function=NamedFunction(name=choice.name))
        chat = ChatBody(
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.reports_logprobs,
            response_format=self._response_format(),
            tools=[Tool(type="function", function=function) for function in functions] or None,
            tool_choice=choice,
            **_fields(self, _AS_IN_CHAT),
        )
        chat.check()
        return chat

    def _messages(self) -> list[Message]:
        """Return the items as messages: calls are part of the assistant's message before them."""
        messages = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            return [*messages, Message(role="user", content=self.input)]
        names: dict[str, str] = {}
        for item in self.input:
            match item:
                case MessageItem():
                    messages.append(Message(role=item.role, content=_text(item.content)))
                case CallItem():
                    names[item.call_id] = item.name
                    if not messages or messages[-1].role != "assistant":
                        messages.append(Message(role="assistant"))
                    call = ToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
                    messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]
                case CallOutputItem():
                    name, text = names.get(item.call_id), _text(item.output)
                    messages.append(Message(role="tool", content=text, tool_call_id=item.call_id, name=name))
        return messages

    def _response_format(self) -> ResponseFormat | None:
        form = self.text.format if self.text is not None else None
        if not isinstance(form, JSONSchemaText):
            return form
        schema = JSONSchema(**{"schema": form.schema_, **_fields(form, ("name", "strict"))})
        return JSONSchemaFormat(type="json_schema", json_schema=schema)


def _fields(part: RequestBody, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(part, name) for name in names}


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
