"""The state that the endpoints of one server share: the engine, the tokenizer, and whether requests are taken."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast
from weakref import WeakSet

from elastic.engines.base import Engine, GrammarCompiler, Output, Request
from elastic.server.fleets.views import RankViews
from elastic.server.generation.bodies import Bodies
from elastic.server.generation.metrics import Metrics, Operation
from elastic.server.generation.request_builder import RequestBuilder
from elastic.server.generation.response_stream import AnswerOptions, ChoiceStream, LoopQueue, ResponseStream
from elastic.server.generation.token_text import TokenTexts
from elastic.server.protocol.errors import unavailable
from elastic.server.tools.base import ToolFormat

if TYPE_CHECKING:
    from elastic.cluster.fleet.fleet import Fleet

State = Literal["serving", "draining", "stopped"]
SHUTTING_DOWN = "the server is shutting down; try another, or again later"


class ServerState:
    """One engine behind one server."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        name: str,
        *,
        max_model_len: int | None,
        sampling_defaults: Mapping[str, float] | None = None,
        grammars: GrammarCompiler | None = None,
        tool_format: ToolFormat | None = None,
    ) -> None:
        """`sampling_defaults` and `grammars` are for `RequestBuilder`; `tool_format` is how the model writes calls."""
        self.engine, self.name, self.max_model_len = engine, name, max_model_len
        self.tool_format = tool_format
        self.fleet = cast("Fleet", engine) if hasattr(engine, "look") else None  # a fleet has ranks to look at
        """The engine, if it is a fleet."""
        self.ranks = RankViews(self.fleet) if self.fleet is not None else None
        self.since_s = time.time()
        self.bodies = Bodies(max_model_len=max_model_len)
        self.prompts = RequestBuilder(
            tokenizer,
            max_model_len=max_model_len,
            end_tokens=lambda: engine.end_tokens,
            longest=engine.longest_request,
            sampling_defaults=sampling_defaults,
            grammars=grammars,
        )
        self.token_texts = TokenTexts(tokenizer)
        self.metrics = Metrics(engine, name, self.ranks)
        self.answering = 0
        """HTTP requests whose answers are not complete."""
        self.forced = False
        """True when the server ends without waiting for the engine's step."""
        self._tokenizer = tokenizer
        self._draining = self._cancelled = False
        self._streams: WeakSet[ResponseStream] = WeakSet()
        self._queue: LoopQueue | None = None
        self._tokens: Counter[int] = Counter()
        """Index into `Engine.weights` -> tokens that were generated with them. Counted on the event loop."""

    @property
    def state(self) -> State:
        """State of the server: it is serving while requests are taken."""
        if self._draining:
            return "draining"
        return "serving" if self.engine.serving else "stopped"

    @property
    def longest_request(self) -> int | None:
        """The most tokens of prompt and answer: of the context, and of what the KV cache can hold; None: any."""
        return None if self.max_model_len is None else self.engine.longest_request(self.max_model_len, ever=True)

    def drain(self) -> None:
        """Refuse new requests from now on. Thread-safe."""
        self._draining = True

    def require_serving(self) -> None:
        """Raise `APIError` while requests are not taken."""
        if self.state == "draining":
            raise unavailable(SHUTTING_DOWN)
        if self.state == "stopped":
            raise unavailable("the engine is not serving")

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request as being answered, in a `with` around its answer."""
        self.answering += 1
        try:
            yield
        finally:
            self.answering -= 1

    async def idle(self) -> None:
        """Return when nothing is being answered."""
        while self.answering:
            await asyncio.sleep(0.05)

    def cancel_answers(self) -> None:
        """End the answers that still run, as cancelled, and refuse those that are yet to begin. On the event loop."""
        self._cancelled = True
        for stream in list(self._streams):
            for request in {answer.request.id for answer in stream.answers}:
                self.engine.cancel(request)

    def close(self) -> None:
        """End the threads."""
        self.bodies.close()
        self.prompts.close()

    def respond(
        self, requests: Sequence[Request], options: AnswerOptions, operation: Operation, *, eager: bool
    ) -> ResponseStream:
        """Make the answers to requests; called on the event loop. Raises `APIError` behind `cancel_answers`."""
        if self._cancelled:
            raise unavailable(SHUTTING_DOWN)
        loop = asyncio.get_running_loop()
        if self._queue is None or self._queue.loop is not loop:
            self._queue = LoopQueue(loop)
        answers: list[ChoiceStream] = []
        for request in requests:
            first: ChoiceStream | None = None
            for _ in range(request.n):
                answers.append(ChoiceStream(len(answers), request, self._tokenizer, options, first))
                first = first or answers[-1]
        observe = partial(self.metrics.observe, operation)
        stream = ResponseStream(self.engine, answers, self._queue, observe, self._count, eager=eager)
        self._streams.add(stream)
        return stream

    def _count(self, output: Output, gap_s: float | None) -> None:
        """Count the tokens of an output, and the time since those before."""
        self._tokens[output.weights] += len(output.tokens)
        if gap_s is not None:
            self.metrics.inter_token_latency.observe(gap_s)

    def token_layers(self) -> dict[str, int]:
        """Count the pairs of a generated token and a decoder layer, by the layer's variant then. On any thread."""
        weights = self.engine.weights
        pairs: Counter[str] = Counter()
        for index, tokens in self._tokens.copy().items():
            for variant in weights[index] if index < len(weights) else ():
                pairs[variant] += tokens
        return dict(pairs)
