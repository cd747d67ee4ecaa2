"""The JSON of `/v1/chat/completions`."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from functools import partial

from elastic.server.formats.base import JSON
from elastic.server.formats.logprobs import LogprobsFormat
from elastic.server.generation.metrics import Operation
from elastic.server.generation.response_stream import ChoiceStream, TextDelta
from elastic.server.generation.token_text import TokenTexts
from elastic.server.protocol.chat import ChatBody
from elastic.server.tools.base import CallDelta, Parsed, ToolParser


class CallsText:
    """One answer taken apart: content, and calls of tools with their ids."""

    def __init__(self, parser: Callable[[], ToolParser] | None, *, several: bool) -> None:
        """`parser` makes what takes it apart, None where there are no tools. Without `several`, only the first call is
        told."""
        self._parser, self._several = parser and parser(), several
        self.called = False

    def read(self, delta: TextDelta) -> Parsed:
        """Return what is certain with more of the answer."""
        if self._parser is None:
            return Parsed(delta.text)
        parts = [self._parser.push(delta.text), *([self._parser.flush()] if delta.finish else [])]
        calls = tuple(call for part in parts for call in part.calls if self._several or call.index == 0)
        self.called = self.called or bool(calls)
        return Parsed("".join(part.content for part in parts), calls)


class ChatFormat:
    """The answers to one body; `parser` makes what takes the text of each apart, as in `CallsText`."""

    operation: Operation = "chat"
    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatBody, texts: TokenTexts, parser: Callable[[], ToolParser] | None = None) -> None:
        self._body = body
        self._logprobs = LogprobsFormat(texts, as_ids=bool(body.return_tokens_as_token_ids))
        self._text = partial(CallsText, parser, several=body.parallel_tool_calls is not False)
        self._named = body.choice_of_tools not in ("none", "auto", "required")
        self._texts: dict[int, CallsText] = {}

    def choices(self, delta: TextDelta, answer: ChoiceStream) -> list[JSON]:
        """Return more of an answer, as choices of chunks; the first begin with the role."""
        changes: list[JSON] = []
        if delta.index not in self._texts:
            changes.append({"role": "assistant", "content": ""})
            self._texts[delta.index] = self._text()
        text = self._texts[delta.index]
        parsed = text.read(delta)
        if parsed.content or delta.tokens:
            changes.append({"content": parsed.content})
        changes += [{"tool_calls": [_call_chunk(call)]} for call in parsed.calls]
        reporting = len(changes) - 1 - len(parsed.calls)
        changes += [{}] if delta.finish else []
        choices: list[JSON] = [
            {"index": delta.index, "delta": change, "logprobs": None, "finish_reason": None} for change in changes
        ]
        if delta.tokens:
            choices[reporting] |= self._reported(delta)
        if delta.finish:
            choices[-1] |= {"finish_reason": self._finish(delta, text), "stop_reason": delta.stop_reason}
        return choices

    def choice(self, whole: TextDelta, answer: ChoiceStream) -> JSON:
        """Return a whole answer."""
        text = self._text()
        parsed = text.read(whole)
        calls = whole_calls(parsed.calls)
        message: JSON = {"role": "assistant", "content": parsed.content, "refusal": None}
        if calls:
            message |= {"content": parsed.content or None, "tool_calls": calls}
        return {
            "index": whole.index,
            "message": message,
            "logprobs": None,
            "finish_reason": self._finish(whole, text),
            "stop_reason": whole.stop_reason,
            **self._reported(whole),
        }

    def extra(self, answers: Sequence[ChoiceStream]) -> JSON:
        """Return the report of the prompt's tokens, and their ids, where they are asked for."""
        fields: JSON = {}
        if self._body.prompt_logprobs is not None:
            entries = answers[0].prompt_logprobs or ()
            fields["prompt_logprobs"] = self._logprobs.prompt(entries, self._body.prompt_logprobs)
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = list(answers[0].request.prompt)
        return fields

    def _reported(self, delta: TextDelta) -> JSON:
        fields: JSON = {}
        if self._body.logprobs:
            fields["logprobs"] = {"content": self._logprobs.chat(delta.tokens), "refusal": None}
        if self._body.return_token_ids:
            fields["token_ids"] = [token.id for token in delta.tokens]
        return fields

    def _finish(self, delta: TextDelta, text: CallsText) -> str | None:
        """Return why an answer ended; a function that was asked for by name is no reason, as OpenAI has it."""
        return "tool_calls" if text.called and not self._named and delta.finish == "stop" else delta.finish


def new_call_id() -> str:
    """Return an id for a call of a tool."""
    return f"call_{uuid.uuid4().hex[:24]}"


def whole_calls(deltas: Sequence[CallDelta]) -> list[JSON]:
    """Return calls as a message has them."""
    calls: list[JSON] = []
    for delta in deltas:
        if delta.name is not None:
            calls.append({"id": new_call_id(), "type": "function", "function": {"name": delta.name, "arguments": ""}})
        calls[-1]["function"]["arguments"] += delta.arguments
    return calls


def _call_chunk(delta: CallDelta) -> JSON:
    """Return more of a call as a delta has it; the first has its id and the function's name."""
    if delta.name is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": new_call_id(), "type": "function", "function": function}
