"""What the endpoints of one server share: the engine, the tokenizer, and whether requests are taken."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

from elastic.engines.engine import Engine, Request
from elastic.server.errors import unavailable
from elastic.server.job import Answer, Job, Mailbox
from elastic.server.metrics import Metrics, Operation
from elastic.server.prompts import Prompts

State = Literal["serving", "draining", "stopped"]


class Serving:
    """One engine behind one server."""

    def __init__(self, engine: Engine, tokenizer: Any, name: str, *, max_model_len: int | None) -> None:
        self.engine, self.name, self.max_model_len = engine, name, max_model_len
        self.since_s = time.time()
        self.prompts = Prompts(tokenizer, max_model_len=max_model_len)
        self.metrics = Metrics(engine, name)
        self._tokenizer = tokenizer
        self._draining = False
        self._answering = 0
        self._box: Mailbox | None = None

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
            raise unavailable("the server is shutting down; try another, or again later")
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

    async def idle(self) -> None:
        """Return when nothing is being answered."""
        while self._answering:
            await asyncio.sleep(0.05)

    def job(self, requests: Sequence[Request], stops: Sequence[str], operation: Operation, *, stream: bool) -> Job:
        """The answers to requests; called on the event loop."""
        loop = asyncio.get_running_loop()
        if self._box is None or self._box.loop is not loop:
            self._box = Mailbox(loop)
        answers = [Answer(i, request, self._tokenizer, stops) for i, request in enumerate(requests)]
        observe = partial(self.metrics.observe, operation)
        return Job(self.engine, answers, self._box, observe, eager=stream or bool(stops))
