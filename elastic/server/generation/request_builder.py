"""Requests of the engine from the bodies that clients send: token ids, limits, sampling, grammars."""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from elastic.engines.base import Grammar, GrammarCompiler, Request, Sampling
from elastic.errors import BackendUnavailable, ConfigError
from elastic.server.generation.chat_template import render
from elastic.server.generation.detokenizer import Detokenizer
from elastic.server.generation.token_length import longest_token
from elastic.server.protocol.chat import ChatBody, PromptFields
from elastic.server.protocol.completions import CompletionBody
from elastic.server.protocol.errors import APIError, invalid
from elastic.server.protocol.sampling import SamplingBody

T = TypeVar("T")
GeneratingBody = ChatBody | CompletionBody
DEFAULT_MAX_TOKENS = 16
"""Default of a completion, as OpenAI has it; a chat completion may use what is left of the context."""
SHORT = 32_768
"""Characters that are tokenized in a fraction of a second."""
SMALLEST_TEMPERATURE = 1e-5
"""A temperature below is 0, which is greedy: dividing by it could overflow."""


@dataclass(frozen=True)
class Echo:
    """The text of a prompt that comes before its answers."""

    text: str
    offsets: tuple[int, ...] = ()
    """For each of its tokens the characters before it, where its tokens are reported."""


class RequestBuilder:
    """Makes requests. Short texts are tokenized on one thread and long ones on another: these hold up only each other.

    A text that cannot fit the context, however it is divided into tokens, is refused before it is tokenized. Grammars
    are compiled on a thread of their own, before the engine asks for them.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_model_len: int | None,
        end_tokens: Callable[[], Sequence[int]] = tuple,
        longest: Callable[[int], int] = lambda most: most,
        sampling_defaults: Mapping[str, float] | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """`end_tokens` are those of the model; the tokenizer's own is one too. `sampling_defaults` are the model's.

        `longest` says how many of so many tokens of prompt and answer fit the KV cache now.
        """
        self._tokenizer = tokenizer
        self._end_tokens, self._longest = end_tokens, longest
        self._defaults = dict(sampling_defaults or {})
        self._grammars = grammars
        self._context = max_model_len
        self._vocabulary = len(tokenizer)
        in_token = longest_token(tokenizer)
        self._most_characters = max_model_len * in_token if max_model_len and in_token else None
        self._short = _TokenizerThread(tokenizer, ThreadPoolExecutor(1, "elastic-tokenizer"))
        self._long = _TokenizerThread(copy.deepcopy(tokenizer), ThreadPoolExecutor(1, "elastic-tokenizer-long"))
        self._compiling = ThreadPoolExecutor(1, "elastic-grammar")

    async def completion(self, body: CompletionBody, arrived_s: float) -> list[Request]:
        """Make one request for each prompt. Raises `APIError`."""
        most = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
        grammar, requests = await self._compiled(body.grammar()), []
        for prompt in body.prompts:
            if isinstance(prompt, str):
                if not prompt:
                    raise invalid("prompt", "is empty")
                prompt = await self.encode(prompt, add_special_tokens=body.add_special_tokens is not False)
            requests.append(self._request(prompt, body, grammar, most, "prompt", arrived_s))  # too long: it ends here
        return [replace(request, parent=requests[0].id) for request in requests] if len(requests) > 1 else requests

    async def chat(self, body: ChatBody, arrived_s: float) -> list[Request]:
        """Make one request for all messages. Raises `APIError`."""
        grammar = await self._compiled(body.grammar())
        ids = await self.encode_chat(body, add_special_tokens=body.add_special_tokens)
        most = body.max_completion_tokens or body.max_tokens
        return [self._request(ids, body, grammar, most, "messages", arrived_s)]

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a text. Raises `APIError` where it cannot fit the context."""
        self._check_characters(text, "prompt")
        work = partial(_encode, text=text, add_special_tokens=add_special_tokens)
        return await self._on_thread(len(text), work)

    async def encode_chat(self, body: PromptFields, *, add_special_tokens: bool | None) -> list[int]:
        """Return the tokens of messages; None: special ones are added where there is no chat template."""

        def work(tokenizer: Any) -> list[int]:
            text = render(tokenizer, body)
            self._check_characters(text, "messages")
            added = not getattr(tokenizer, "chat_template", None) if add_special_tokens is None else add_special_tokens
            return _encode(tokenizer, text, add_special_tokens=added)

        written = body.model_dump_json(include={"messages", "tools", "chat_template_kwargs"}, exclude_none=True)
        return await self._on_thread(len(written), work)

    async def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included. Raises `APIError` for ids that the vocabulary has not."""
        self._check_tokens(tokens, "tokens")
        return await self._on_thread(
            len(tokens), lambda tokenizer: str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
        )

    async def names(self, tokens: Sequence[int]) -> list[str]:
        """Return the names that tokens have in the vocabulary."""
        return await self._on_thread(len(tokens), lambda tokenizer: list(tokenizer.convert_ids_to_tokens(tokens)))

    async def echoes(self, body: CompletionBody, requests: Sequence[Request]) -> list[Echo]:
        """Return the texts that come before the answers, one for each prompt: as they were sent, or of their tokens."""
        skip_special = body.skip_special_tokens is not False

        def work(tokens: Sequence[int], tokenizer: Any) -> Echo:
            detokenizer, text, offsets = Detokenizer(tokenizer, (), skip_special=skip_special), "", []
            for token in tokens:
                offsets.append(len(text))
                text += detokenizer.push((token,))
            return Echo(text + detokenizer.flush(), tuple(offsets))

        echoes = []
        for prompt, request in zip(body.prompts, requests, strict=True):
            if isinstance(prompt, str) and body.logprobs is None:
                echoes.append(Echo(prompt))
            else:
                echo = await self._on_thread(len(request.prompt), partial(work, request.prompt))
                echoes.append(Echo(prompt, echo.offsets) if isinstance(prompt, str) else echo)
        return echoes

    def close(self) -> None:
        """End the threads."""
        for executor in (self._short.executor, self._long.executor, self._compiling):
            executor.shutdown(wait=False, cancel_futures=True)

    async def _on_thread(self, size: int, work: Callable[[Any], T]) -> T:
        """Return `work(tokenizer)`, done on the thread for texts of this length."""
        thread = self._short if size <= SHORT else self._long
        return await asyncio.get_running_loop().run_in_executor(thread.executor, work, thread.tokenizer)

    async def _compiled(self, grammar: Grammar | None) -> Grammar | None:
        """Return a grammar that the engine will find compiled. Raises `APIError`."""
        if grammar is None:
            return None
        if self._grammars is None:
            message = "structured output is off: this server was made without a compiler of grammars"
            raise APIError(400, message, code="unsupported_value")
        try:
            await asyncio.get_running_loop().run_in_executor(self._compiling, self._grammars.matcher, grammar)
        except ConfigError as error:
            raise invalid(None, str(error)) from error
        except BackendUnavailable as error:
            raise APIError(400, str(error), code="unsupported_value") from error
        return grammar

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

    def _check_tokens(self, ids: Sequence[int], param: str) -> None:
        """Raise `APIError` for a token id that is not in the vocabulary."""
        highest = max(ids, default=0)
        if highest >= self._vocabulary:
            raise invalid(param, f"token id {highest} is not in the vocabulary of {self._vocabulary:,}")

    def _request(
        self,
        ids: Sequence[int],
        body: GeneratingBody,
        grammar: Grammar | None,
        max_tokens: int | None,
        param: str,
        arrived_s: float,
    ) -> Request:
        most = self._most_new_tokens(len(ids), max_tokens, param)
        if not ids:
            raise invalid(param, "is empty")
        self._check_tokens(ids, param)
        if (body.min_tokens or 0) > most:
            raise invalid("min_tokens", f"{body.min_tokens} are more than the {most:,} that may be generated")
        echoes = isinstance(body, CompletionBody) and body.echo
        counts = [n for n in (body.prompt_logprobs, body.top_tokens if echoes else None) if n is not None]
        return Request(
            prompt=tuple(ids),
            max_tokens=most,
            sampling=self._sampling(body),
            stop_tokens=self._stop_tokens(body),
            ignore_eos=bool(body.ignore_eos),
            min_tokens=body.min_tokens or 0,
            n=body.answers,
            logprobs=body.top_tokens,
            prompt_logprobs=max(counts, default=None),
            grammar=grammar,
            arrived_s=arrived_s,
            id=uuid.uuid4().hex,
        )

    def _sampling(self, body: SamplingBody) -> Sampling:
        """Return the rule by which tokens are chosen: as the body says, or else the model's defaults."""

        def value(name: str, otherwise: float) -> float:
            given = getattr(body, name)
            return float(self._defaults.get(name, otherwise) if given is None else given)

        self._check_tokens([token for token, _ in body.biases], "logit_bias")
        temperature = value("temperature", 1.0)
        penalties: dict[str, Any] = {
            "repetition_penalty": value("repetition_penalty", 1.0),
            "presence_penalty": body.presence_penalty or 0.0,
            "frequency_penalty": body.frequency_penalty or 0.0,
            "logit_bias": body.biases,
        }
        if temperature < SMALLEST_TEMPERATURE:
            return Sampling(**penalties)
        top_k = int(value("top_k", 0))
        return Sampling(
            temperature,
            top_k=min(top_k, self._vocabulary) if top_k > 0 else None,
            top_p=value("top_p", 1.0),
            min_p=value("min_p", 0.0),
            seed=body.seed,
            **penalties,
        )

    def _most_new_tokens(self, prompt_tokens: int, max_tokens: int | None, param: str) -> int:
        """Return the most tokens to generate. Raises `APIError` where the context has no room for them.

        As many as were asked for, else what is left of the context, and of the KV cache as its limit is now.
        """
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
        return max_tokens or max(1, self._longest(self._context) - prompt_tokens)

    def _stop_tokens(self, body: SamplingBody) -> tuple[int, ...]:
        asked = tuple(body.stop_token_ids or ())
        if body.ignore_eos:
            return asked
        end = self._tokenizer.eos_token_id
        return tuple(dict.fromkeys((*self._end_tokens(), *(() if end is None else (end,)), *asked)))


class _TokenizerThread(NamedTuple):
    """A thread that tokenizes, with a tokenizer of its own: they are not thread-safe."""

    tokenizer: Any
    executor: ThreadPoolExecutor


def _encode(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    """Return token ids and nothing else: lists that nobody reads take as long, under the interpreter's lock."""
    unread = {"return_attention_mask": False, "return_token_type_ids": False}
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False, **unread))
