"""From what clients send to requests of the engine: token ids, limits, sampling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from elastic.engines.engine import Request, Sampling
from elastic.server.errors import APIError, invalid
from elastic.server.schemas import ChatBody, CompletionBody, Message, Sampled

DEFAULT_MAX_TOKENS = 16
"""Of a completion, as OpenAI has it; a chat completion may use all of the context."""
_ROLES = {"developer": "system"}
_T = TypeVar("_T")


class Prompts:
    """Makes requests. Tokenizing runs on a thread of its own: it may take long, and tokenizers are not thread-safe."""

    def __init__(self, tokenizer: Any, *, max_model_len: int | None) -> None:
        self._tokenizer = tokenizer
        self._context = max_model_len
        self._vocabulary = len(tokenizer)
        self._thread = ThreadPoolExecutor(1, "elastic-tokenizer")

    async def completion(self, body: CompletionBody, arrived_s: float) -> list[Request]:
        """One request for each prompt. Raises `APIError`."""
        found = [p if isinstance(p, list) else await self._run(self._encode, p) for p in body.prompts]
        return [self._request(ids, body, body.max_tokens or DEFAULT_MAX_TOKENS, "prompt", arrived_s) for ids in found]

    async def chat(self, body: ChatBody, arrived_s: float) -> list[Request]:
        """One request for all messages. Raises `APIError`."""
        ids = await self._run(self._encode_chat, body.messages)
        most = body.max_completion_tokens or body.max_tokens
        return [self._request(ids, body, most, "messages", arrived_s)]

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[Any], _T], argument: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, argument)

    def _encode(self, text: str) -> list[int]:
        if not text:
            raise invalid("prompt", "is empty")
        return list(self._tokenizer.encode(text, verbose=False))

    def _encode_chat(self, messages: Sequence[Message]) -> list[int]:
        plain = [{"role": _ROLES.get(m.role, m.role), "content": m.text} for m in messages]
        if not getattr(self._tokenizer, "chat_template", None):
            return list(self._tokenizer.encode(without_template(plain), verbose=False))
        text = self._render(plain)
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def _render(self, messages: list[dict[str, str]]) -> str:
        from jinja2 import TemplateError

        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except (TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            raise invalid("messages", f"the model's chat template refuses them: {error}") from error

    def _request(
        self, ids: Sequence[int], body: Sampled, max_tokens: int | None, param: str, arrived_s: float
    ) -> Request:
        self._check(ids, param)
        return Request(
            prompt=tuple(ids),
            max_tokens=self._room(len(ids), max_tokens, param),
            sampling=self._sampling(body),
            stop_tokens=self._stop_tokens(body),
            arrived_s=arrived_s,
        )

    def _check(self, ids: Sequence[int], param: str) -> None:
        if not ids:
            raise invalid(param, "is empty")
        highest = max(ids)
        if highest >= self._vocabulary:
            raise invalid(param, f"token id {highest} is not in the vocabulary of {self._vocabulary:,}")

    def _room(self, prompt_tokens: int, max_tokens: int | None, param: str) -> int:
        """The most tokens to generate."""
        if self._context is None:
            return max_tokens or DEFAULT_MAX_TOKENS
        left = self._context - prompt_tokens
        if left < (max_tokens or 1):
            raise APIError(
                400,
                f"the model's context is {self._context:,} tokens; the prompt has {prompt_tokens:,} and "
                f"{max_tokens or 1:,} were to be generated: shorten the prompt or lower max_tokens",
                param=param if left < 1 else "max_tokens",
                code="context_length_exceeded",
            )
        return max_tokens or left

    def _sampling(self, body: Sampled) -> Sampling:
        if body.greedy:
            return Sampling()
        top_k = min(body.top_k, self._vocabulary) if body.top_k and body.top_k > 0 else None
        return Sampling(1.0 if body.temperature is None else body.temperature, top_k, body.top_p or 1.0, body.seed)

    def _stop_tokens(self, body: Sampled) -> tuple[int, ...]:
        end = self._tokenizer.eos_token_id
        ends = () if body.ignore_eos or end is None else (end,)
        return (*ends, *(body.stop_token_ids or ()))


def without_template(messages: Sequence[dict[str, str]]) -> str:
    """The prompt where a tokenizer has no chat template: a line `role: content` each, and an open `assistant:`."""
    return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant:"
