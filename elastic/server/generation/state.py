"""What the endpoints of one server share: the engine, the tokenizer, and whether requests are taken."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

from elastic.engines.base import Engine, Request
from elastic.server.generation.bodies import Bodies
from elastic.server.generation.errors import unavailable
from elastic.server.generation.metrics import Metrics, Operation
from elastic.server.generation.request_builder import RequestBuilder
from elastic.server.generation.response_stream import ChoiceStream, LoopQueue, ResponseStream
from elastic.server.generation.work import Work

State = Literal["serving", "draining", "stopped"]
SHUTTING_DOWN = "the server is shutting down; try another, or again later"


class ServerState:
    """One engine behind one server."""

    def __init__(self, engine: Engine, tokenizer: Any, name: str, *, max_model_len: int | None) -> None:
        self.engine, self.name, self.max_model_len = engine, name, max_model_len
        self.since_s = time.time()
        self.bodies = Bodies(max_model_len=max_model_len)
        self.prompts = RequestBuilder(tokenizer, max_model_len=max_model_len, end_tokens=lambda: engine.end_tokens)
        self.metrics = Metrics(engine, name)
        self.work = Work()
        self._tokenizer = tokenizer
        self.forced = False
        """Whether the server ends without waiting for the engine's step."""
        self._draining = False
        self._answering = 0
        self._box: LoopQueue | None = None

    @property
    def state(self) -> State:
        if self._draining:
            return "draining"
        return "serving" if self.engine.serving else "stopped"

    @property
    def answering(self) -> int:
        """HTTP requests whose answers are not complete."""
        return self._answering

    def drain(self) -> None:
        """Refuse new requests from now on. Thread-safe."""
        self._draining = True

    def require_serving(self) -> None:
        """Raises `APIError` while requests are not taken."""
        if self.state == "draining":
            raise unavailable(SHUTTING_DOWN)
        if self.state == "stopped":
            raise unavailable("the engine is not serving")

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Around the answer to a request."""
        self._answering += 1
        try:
            yield
        finally:
            self._answering -= 1

    def close(self) -> None:
        """End the threads."""
        self.bodies.close()
        self.prompts.close()

    async def idle(self) -> None:
        """Return when nothing is being answered."""
        while self._answering:
            await asyncio.sleep(0.05)

    def job(
        self, requests: Sequence[Request], stops: Sequence[str], operation: Operation, *, stream: bool
    ) -> ResponseStream:
        """The answers to requests; called on the event loop."""
        loop = asyncio.get_running_loop()
        if self._box is None or self._box.loop is not loop:
            self._box = LoopQueue(loop)
        answers = [ChoiceStream(i, request, self._tokenizer, stops) for i, request in enumerate(requests)]
        observe = partial(self.metrics.observe, operation)
        return ResponseStream(self.engine, answers, self._box, observe, self.work.add, eager=stream or bool(stops))
