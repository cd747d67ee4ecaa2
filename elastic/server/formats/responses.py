"""The JSON of `/v1/responses`: one response of items, and the events while it comes to be."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any, Literal

from elastic.server.formats.base import JSON, usage
from elastic.server.formats.chat import CallsText, new_call_id
from elastic.server.formats.logprobs import LogprobsFormat
from elastic.server.generation.response_stream import ChoiceStream, ReadToken, TextDelta
from elastic.server.generation.token_text import TokenTexts
from elastic.server.protocol.errors import APIError
from elastic.server.protocol.responses import ResponsesBody
from elastic.server.tools.base import CallDelta, ToolParser

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponsesFormat:
    """One response. `events` has what is new; `document` is the response as far as it has come."""

    def __init__(
        self,
        body: ResponsesBody,
        model: str,
        id: str,
        texts: TokenTexts,
        parser: Callable[[], ToolParser] | None = None,
    ) -> None:
        self._body, self._logprobs = body, LogprobsFormat(texts)
        self._text = CallsText(parser, several=body.parallel_tool_calls is not False)
        self._output: list[JSON] = []
        self._unsaid: list[ReadToken] = []
        """Tokens of text that may yet be a call's."""
        self._sequence = 0
        self._id, self._model, self._created_s = f"resp_{id}", model, int(time.time())

    def opening(self) -> list[JSON]:
        """Return the events before anything is there."""
        names = ("response.created", "response.in_progress")
        return [self._event(name, response=self.document("in_progress")) for name in names]

    def events(self, delta: TextDelta) -> list[JSON]:
        """Return the events of more of the answer."""
        parsed = self._text.read(delta)
        events: list[JSON] = []
        self._unsaid += delta.tokens
        if parsed.content or (self._unsaid and not parsed.calls and self._open("message") is not None):
            events += self._say(parsed.content, tuple(self._unsaid))
            self._unsaid = []
        for call in parsed.calls:
            self._unsaid = []
            events += self._call(call)
        if delta.finish:
            events += [] if self._output else self._say("", tuple(self._unsaid))
            events += self._close("incomplete" if delta.finish == "length" else "completed")
        return events

    def closing(self, delta: TextDelta, answer: ChoiceStream) -> JSON:
        """Return the last event."""
        status: Status = "incomplete" if delta.finish == "length" else "completed"
        return self._event(f"response.{status}", response=self.document(status, answer))

    def failure(self, error: APIError) -> JSON:
        """Return the last event where something failed."""
        document = {**self.document("failed"), "error": {"code": "server_error", "message": error.message}}
        return self._event("response.failed", response=document)

    def document(self, status: Status, answer: ChoiceStream | None = None) -> JSON:
        """Return the response."""
        body = self._body
        chosen: Any = body.tool_choice or "auto"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [dict(item) for item in self._output],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": _dumped(body.text and body.text.format) or {"type": "text"}},
            "tool_choice": chosen if isinstance(chosen, str) else _dumped(chosen),
            "tools": [{"parameters": None, "strict": None, **_dumped(tool)} for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if answer is None else _usage(answer),
        }

    def _say(self, text: str, tokens: tuple[ReadToken, ...]) -> list[JSON]:
        """Return the events of more text, in the message that is open or a new one."""
        events: list[JSON] = []
        item = self._open("message")
        if item is None:
            events += self._close("completed")
            item = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "status": "in_progress"}
            events += self._add({**item, "content": []})
            item = self._output[-1]
            item["content"] = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
            part = {**item["content"][0], "logprobs": []}  # of its own: more comes to the other
            events.append(self._of_item("response.content_part.added", content_index=0, part=part))
        part = item["content"][0]
        logprobs = self._logprobs.chat(tokens) if self._body.reports_logprobs else []
        part["text"] += text
        part["logprobs"] += logprobs
        if text or logprobs:
            events.append(self._of_item("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs))
        return events

    def _call(self, call: CallDelta) -> list[JSON]:
        """Return the events of more of a call."""
        events: list[JSON] = []
        if call.name is not None:
            events += self._close("completed")
            item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "in_progress"}
            events += self._add({**item, "call_id": new_call_id(), "name": call.name, "arguments": ""})
        if call.arguments:
            self._output[-1]["arguments"] += call.arguments
            events.append(self._of_item("response.function_call_arguments.delta", delta=call.arguments))
        return events

    def _open(self, kind: str) -> JSON | None:
        """Return the item that is not complete, if it is of a kind."""
        item = self._output[-1] if self._output else None
        return item if item is not None and item["type"] == kind and item["status"] == "in_progress" else None

    def _add(self, item: JSON) -> list[JSON]:
        self._output.append(item)
        return [self._event("response.output_item.added", output_index=len(self._output) - 1, item=dict(item))]

    def _close(self, status: Status) -> list[JSON]:
        """Return the events of the end of the item that is not complete, if there is one."""
        events: list[JSON] = []
        if (item := self._open("message")) is not None:
            part = item["content"][0]
            done = {"text": part["text"], "logprobs": part["logprobs"]}
            events.append(self._of_item("response.output_text.done", content_index=0, **done))
            events.append(self._of_item("response.content_part.done", content_index=0, part=dict(part)))
        elif (item := self._open("function_call")) is not None:
            done = {"arguments": item["arguments"], "name": item["name"]}
            events.append(self._of_item("response.function_call_arguments.done", **done))
        if item is not None:
            item["status"] = status
            number = len(self._output) - 1
            events.append(self._event("response.output_item.done", output_index=number, item=dict(item)))
        return events

    def _of_item(self, kind: str, **fields: Any) -> JSON:
        number = len(self._output) - 1
        return self._event(kind, item_id=self._output[number]["id"], output_index=number, **fields)

    def _event(self, kind: str, **fields: Any) -> JSON:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}


def _usage(answer: ChoiceStream) -> JSON:
    counted = usage([answer])
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {**counted["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counted["total_tokens"],
    }


def _dumped(part: Any) -> JSON:
    """Return a part of the body as JSON, without what was not said."""
    return {} if part is None else dict(part.model_dump(exclude_none=True, by_alias=True))
