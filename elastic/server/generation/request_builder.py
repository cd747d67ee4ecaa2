"""Requests of the engine from the bodies that clients send: token ids, limits, sampling."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from elastic.engines.base import Request, Sampling
from elastic.server.generation.errors import APIError, invalid
from elastic.server.generation.schemas import ChatBody, CompletionBody, Message, SamplingBody
from elastic.server.generation.token_length import longest_token

DEFAULT_MAX_TOKENS = 16
"""Default of a completion, as OpenAI has it; a chat completion may use all of the context."""
SHORT = 32_768
"""Characters that are tokenized in a fraction of a second."""
SMALLEST_TEMPERATURE = 1e-5
"""A temperature below is 0, which is greedy: dividing by it could overflow."""
_ROLES = {"developer": "system"}


class RequestBuilder:
    """Makes requests. Short texts are tokenized on one thread and long ones on another: these hold up only each other.

    A text that cannot fit the context, however it is divided into tokens, is refused before it is tokenized.
    """

    def __init__(
        self, tokenizer: Any, *, max_model_len: int | None, end_tokens: Callable[[], Sequence[int]] = tuple
    ) -> None:
        """`end_tokens` are those of the model; the tokenizer's own is one too."""
        self._tokenizer = tokenizer
        self._end_tokens = end_tokens
        self._context = max_model_len
        self._vocabulary = len(tokenizer)
        longest = longest_token(tokenizer)
        self._most_characters = max_model_len * longest if max_model_len and longest else None
        self._short = _TokenizerThread(tokenizer, ThreadPoolExecutor(1, "elastic-tokenizer"))
        self._long = _TokenizerThread(copy.deepcopy(tokenizer), ThreadPoolExecutor(1, "elastic-tokenizer-long"))

    async def completion(self, body: CompletionBody, arrived_s: float) -> list[Request]:
        """Make one request for each prompt. Raises `APIError`."""
        most, requests = body.max_tokens or DEFAULT_MAX_TOKENS, []
        for prompt in body.prompts:
            if isinstance(prompt, str):
                if not prompt:
                    raise invalid("prompt", "is empty")
                self._check_characters(prompt, "prompt")
                prompt = await self._tokenize(len(prompt), _encode, prompt)
            requests.append(self._request(prompt, body, most, "prompt", arrived_s))  # one that does not fit ends it
        return requests

    async def chat(self, body: ChatBody, arrived_s: float) -> list[Request]:
        """Make one request for all messages. Raises `APIError`."""
        characters = sum(len(message.text) for message in body.messages)
        ids = await self._tokenize(characters, self._encode_chat, body.messages)
        most = body.max_completion_tokens or body.max_tokens
        return [self._request(ids, body, most, "messages", arrived_s)]

    def close(self) -> None:
        """End the threads."""
        for thread in (self._short, self._long):
            thread.executor.shutdown(wait=False, cancel_futures=True)

    async def _tokenize(self, characters: int, work: Callable[[Any, Any], list[int]], argument: Any) -> list[int]:
        """Return `work(tokenizer, argument)`, done on the thread for texts of this length."""
        thread = self._short if characters <= SHORT else self._long
        return await asyncio.get_running_loop().run_in_executor(thread.executor, work, thread.tokenizer, argument)

    def _encode_chat(self, tokenizer: Any, messages: Sequence[Message]) -> list[int]:
        plain = [{"role": _ROLES.get(m.role, m.role), "content": m.text} for m in messages]
        rendered = bool(getattr(tokenizer, "chat_template", None))
        text = _render(tokenizer, plain) if rendered else without_template(plain)
        self._check_characters(text, "messages")
        return _encode(tokenizer, text, add_special_tokens=not rendered)

    def _check_characters(self, text: str, param: str) -> None:
        """Raise `APIError` for a text that cannot fit the context."""
        if self._most_characters is not None and len(text) > self._most_characters:
            raise APIError(
                400,
                f"the model's context is {self._context:,} tokens, at most {self._most_characters:,} characters; the "
                f"text has {len(text):,}: shorten it",
                param=param,
                code="context_length_exceeded",
            )

    def _request(
        self, ids: Sequence[int], body: SamplingBody, max_tokens: int | None, param: str, arrived_s: float
    ) -> Request:
        most = self._most_new_tokens(len(ids), max_tokens, param)
        if not ids:
            raise invalid(param, "is empty")
        highest = max(ids)
        if highest >= self._vocabulary:
            raise invalid(param, f"token id {highest} is not in the vocabulary of {self._vocabulary:,}")
        temperature, sampling = 1.0 if body.temperature is None else body.temperature, Sampling()
        if temperature >= SMALLEST_TEMPERATURE:
            top_k = min(body.top_k, self._vocabulary) if body.top_k and body.top_k > 0 else None
            sampling = Sampling(temperature, top_k, body.top_p or 1.0, seed=body.seed)
        return Request(
            prompt=tuple(ids),
            max_tokens=most,
            sampling=sampling,
            stop_tokens=self._stop_tokens(body),
            ignore_eos=bool(body.ignore_eos),
            arrived_s=arrived_s,
        )

    def _most_new_tokens(self, prompt_tokens: int, max_tokens: int | None, param: str) -> int:
        """Return the most tokens to generate. Raises `APIError` where the context has no room for them."""
        if self._context is None:
            return max_tokens or DEFAULT_MAX_TOKENS
        room = self._context - prompt_tokens
        if room < (max_tokens or 1):
            raise APIError(
                400,
                f"the model's context is {self._context:,} tokens; the prompt has {prompt_tokens:,} and "
                f"{max_tokens or 1:,} were to be generated: shorten the prompt or lower max_tokens",
                param=param if room < 1 else "max_tokens",
                code="context_length_exceeded",
            )
        return max_tokens or room

    def _stop_tokens(self, body: SamplingBody) -> tuple[int, ...]:
        asked = tuple(body.stop_token_ids or ())
        if body.ignore_eos:
            return asked
        end = self._tokenizer.eos_token_id
        return tuple(dict.fromkeys((*self._end_tokens(), *(() if end is None else (end,)), *asked)))


def without_template(messages: Sequence[dict[str, str]]) -> str:
    """Return the prompt where a tokenizer has no chat template: lines `role: content`, and an open `assistant:`."""
    return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant:"


class _TokenizerThread(NamedTuple):
    """A thread that tokenizes, with a tokenizer of its own: they are not thread-safe."""

    tokenizer: Any
    executor: ThreadPoolExecutor


def _encode(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Return token ids and nothing else: lists that nobody reads take as long, under the interpreter's lock."""
    unread = {"return_attention_mask": False, "return_token_type_ids": False}
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False, **unread))


def _render(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """Apply the chat template. Raises `APIError` where it refuses the messages."""
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except (TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
        raise invalid("messages", f"the model's chat template refuses them: {error}") from error
