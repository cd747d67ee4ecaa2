"""A server to test: a real one on a free port, or an app in process; in front of an engine whose answers are known."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import torch
from fastapi import FastAPI
from transformers import AutoModelForCausalLM, AutoTokenizer

import elastic
from elastic.assets import MODEL_DIR
from elastic.server.app import create_app
from elastic.server.uvicorn_server import Server, bind, listen
from support.serving.fake_engine import FakeEngine, token_after
from support.serving.generations import continuation

TOKENIZER = AutoTokenizer.from_pretrained(MODEL_DIR)
NAME = "small"
CONTEXT = 1_000
FEW = 4
"""Layers that are served unless a test needs the whole model: a step takes a third of the time."""
PATIENCE_S = 30


@dataclass(frozen=True)
class Kind:
    """A kind of engine, and the tokens that it is known to generate, `eos` ignored: `tokens(prompt, most)`."""

    made: Callable[[], AbstractContextManager[Any]]
    tokens: Callable[[tuple[int, ...], int], list[int]]


def fake_tokens(prompt: tuple[int, ...], most: int) -> list[int]:
    return [token_after(prompt, k) for k in range(most)]


@contextlib.contextmanager
def fake() -> Iterator[FakeEngine]:
    yield FakeEngine(step_s=0.0005, batch=16)


@cache
def model(layers: int = FEW) -> Any:
    """The first layers of the model that ships, which has twelve."""
    found = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32, num_hidden_layers=layers)
    return found.eval().requires_grad_(False)


@cache
def _files() -> TemporaryDirectory[str]:
    folder: TemporaryDirectory[str] = TemporaryDirectory(prefix="elastic-served-")
    model().save_pretrained(folder.name)
    TOKENIZER.save_pretrained(folder.name)
    return folder


def model_files() -> str:
    """The directory of its files and its tokenizer's, which are there until this process ends."""
    return _files().name


@cache
def model_tokens(prompt: tuple[int, ...], most: int) -> list[int]:
    return continuation(model(), prompt, most)


@contextlib.contextmanager
def embedded() -> Iterator[Any]:
    """The small model behind the embedded engine."""
    from elastic.engines.continuous import ContinuousEngine

    elastic.wrap(model(), places=[elastic.Place("cpu", torch.device("cpu"), 64 << 20, page_bytes=4096)])
    engine = ContinuousEngine(model())
    try:
        yield engine
        model().elastic.check()
    finally:
        engine.stop(drain=False)
        elastic.unwrap(model())


FAKE = Kind(fake, fake_tokens)
EMBEDDED = Kind(embedded, model_tokens)


def text_of(tokens: list[int]) -> str:
    """The text of an answer of these tokens."""
    return str(TOKENIZER.decode(tokens, skip_special_tokens=True))


def answer(kind: Kind, prompt: str, most: int) -> tuple[str, str, int]:
    """Text, finish reason and number of tokens of the answer to a prompt."""
    tokens, end = kind.tokens(tuple(TOKENIZER.encode(prompt)), most), TOKENIZER.eos_token_id
    tokens = tokens[: tokens.index(end) + 1] if end in tokens else tokens
    return text_of(tokens), "stop" if tokens[-1] == end else "length", len(tokens)


def app_for(engine: Any, *, tokenizer: Any = TOKENIZER, **options: Any) -> FastAPI:
    return create_app(engine, tokenizer, NAME, **{"max_model_len": CONTEXT, **options})


@dataclass
class Live:
    """A server that runs in a thread of this process."""

    engine: Any
    server: Server
    port: int
    thread: threading.Thread

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ended(self) -> None:
        """Return when the server has."""
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def live(
    engine: Any,
    *,
    drain_s: float = PATIENCE_S,
    header_timeout_s: float = PATIENCE_S,
    allowed_hosts: tuple[str, ...] = ("*",),
    **options: Any,
) -> Iterator[Live]:
    """Serve an engine; at the end, drain."""
    app = app_for(engine, **options)
    bound = bind("127.0.0.1", 0)
    listen(bound)
    patience: Any = {"header_timeout_s": header_timeout_s, "allowed_hosts": allowed_hosts}
    server = Server(app, drain_s=drain_s, log_level="critical", **patience)
    thread = threading.Thread(target=server.run, args=([bound],))
    running = Live(engine, server, bound.getsockname()[1], thread)
    thread.start()
    try:
        yield running
    finally:
        server.handle_exit(15)
        running.ended()
        bound.close()


def empty(engine: Any) -> bool:
    """Whether an engine holds no request."""
    now = engine.counters.read()
    return not now.waiting and not now.running


def body(prompt: str, most: int, *, stream: bool) -> dict[str, Any]:
    asked = {"model": NAME, "prompt": prompt, "max_tokens": most, "temperature": 0}
    return {**asked, "ignore_eos": True, "stream": stream}


async def texts(response: httpx.Response) -> AsyncIterator[str]:
    """The pieces of a stream; it must end as it should."""
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line:
            yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    raise AssertionError("the stream broke off")
