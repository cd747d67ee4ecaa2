"""A server with OpenAI's `/v1/completions` as the target of a replay."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any

from elastic.bench.replay.recorder import Recorder
from elastic.bench.replay.records import Finish
from elastic.bench.replay.server_status import parse_actions, parse_state
from elastic.bench.replay.sse import error_message, parse
from elastic.bench.replay.timeline import ActionKey, EngineState, FinishedAction, Observation
from elastic.engines.base import Request
from elastic.errors import BackendUnavailable, ConfigError, StateError

REFUSED = frozenset({429, 503})
"""HTTP statuses of an overloaded server."""
PROBE_S = 10.0
"""Seconds that a server may take to list its models."""
STATUS_S = 2.0
"""Seconds that a server may take to answer with its status."""


class HTTPTarget:
    """Requests as HTTP streams, all at once, on an event loop in a thread of its own; a context manager.

    `model` is the name that the server gives it; None: its first one. `headers` go with every request, such as
    `{"Authorization": "Bearer ..."}`. Prompts are sent as token ids, and with `ignore_eos`, which vLLM, SGLang and
    `elastic serve` understand: outputs are as long as the trace says. Tokens are timed as pieces of the stream come;
    their number is what the server counts (`usage`). Where it is `elastic serve`, states and actions are read from
    `/elastic/status`. Raises `BackendUnavailable` without httpx, `ConfigError` when no such server answers.
    """

    def __init__(self, url: str, *, model: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        try:
            import httpx
        except ModuleNotFoundError as error:
            raise BackendUnavailable("a replay to a URL needs httpx: pip install 'elastic-llm[bench]'") from error
        self._httpx = httpx
        self.url = url.rstrip("/").removesuffix("/v1")
        self._require_address(url)
        self._headers = {name.encode(): value.encode() for name, value in (headers or {}).items()}  # httpx takes ASCII
        if model is not None and not model.strip():
            raise ConfigError(f"model={model!r} is empty; give the name that the server has for it, or None")
        self.model = self._first_model() if model is None else model
        self._tasks: dict[str, Future[None]] = {}
        self._client: Any = None
        self._status_client = httpx.Client(headers=self._headers, timeout=STATUS_S)
        self._actions: dict[ActionKey, FinishedAction] = {}
        self._has_status = True
        self._has_status = self.observe(0.0).state is not None

    def __enter__(self) -> HTTPTarget:
        limits = self._httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = self._httpx.AsyncClient(headers=self._headers, limits=limits, timeout=None)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="elastic-bench-http", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, request: Request, recorder: Recorder) -> None:
        """Send a request; its tokens and its end go to the recorder. Raises `StateError` outside of the context."""
        if self._client is None:
            raise StateError("an HTTPTarget is used as a context manager: with HTTPTarget(url) as engine: ...")
        self._tasks[request.id] = asyncio.run_coroutine_threadsafe(self._complete(request, recorder), self._loop)

    def cancel(self, request: str) -> None:
        """Close the connection of a request."""
        task = self._tasks.get(request)
        if task is not None:
            task.cancel()

    def observe(self, t_s: float) -> Observation:
        """Return the present state, and the actions of the last one; a server that gives none is not asked again."""
        state: EngineState | None = None
        if self._has_status:
            with suppress(self._httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError):
                document = self._status_client.get(f"{self.url}/elastic/status").raise_for_status().json()
                self._actions = parse_actions(document)
                state = parse_state(document, t_s)
        return Observation(state, self._actions)

    def close(self) -> None:
        """Close all connections. Can be called twice."""
        self._status_client.close()
        if self._client is None:
            return
        for task in self._tasks.values():
            task.cancel()
        asyncio.run_coroutine_threadsafe(self._close_client(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _require_address(self, url: str) -> None:
        """Raise `ConfigError` for an URL that nothing can be sent to: httpx says so of each request, one by one."""
        try:
            parts = self._httpx.URL(url)
            good = parts.scheme in ("http", "https") and bool(parts.host)
        except self._httpx.InvalidURL:
            good = False
        if not good:
            raise ConfigError(f"--url {url!r} is no address of a server; write http://127.0.0.1:8000")

    def _first_model(self) -> str:
        """Return the name of the server's first model. Raises `ConfigError` where it gives none."""
        problem = ""
        try:
            answer = self._httpx.get(f"{self.url}/v1/models", headers=self._headers, timeout=PROBE_S)
            if answer.is_success:
                return str(answer.json()["data"][0]["id"])
            problem = f"HTTP {answer.status_code}"
        except self._httpx.HTTPError as error:
            problem = str(error) or type(error).__name__
        except (ValueError, LookupError, TypeError, RecursionError):
            problem = "its answer lists no model"
        raise ConfigError(f"--url {self.url}: GET /v1/models does not tell what is served there: {problem}")

    async def _close_client(self) -> None:
        """Wait for the tasks, which were cancelled, and close the connections."""
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()
        self._client = None

    async def _complete(self, request: Request, recorder: Recorder) -> None:
        """Send one request and record its stream."""
        body = {
            "model": self.model,
            "prompt": list(request.prompt),
            "max_tokens": request.max_tokens,
            "temperature": request.sampling.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        try:
            async with self._client.stream("POST", f"{self.url}/v1/completions", json=body) as response:
                if response.is_success:
                    await self._record_stream(response, recorder)
                else:
                    await response.aread()
                    finish: Finish = "rejected" if response.status_code in REFUSED else "failed"
                    message = f"HTTP {response.status_code}: {error_message(response.text)}"
                    recorder.end(finish, time.perf_counter(), message)
        except self._httpx.HTTPError as error:
            recorder.end("failed", time.perf_counter(), str(error) or type(error).__name__)
        except asyncio.CancelledError:
            recorder.end("cancelled", time.perf_counter())
            raise

    async def _record_stream(self, response: Any, recorder: Recorder) -> None:
        """Read a stream to its end; behind an error too, hung up on: generators left early may outlive the loop."""
        finish: str | None = None
        async for line in response.aiter_lines():
            event = parse(line)
            now_s = time.perf_counter()
            if event is None:
                continue
            if event.kind == "piece":
                recorder.piece(now_s)
            if event.output_tokens is not None:
                recorder.counted(event.output_tokens)
            if event.kind == "error":
                recorder.end("failed", now_s, event.error)
                await response.aclose()  # for the server to stop
            finish = event.finish or finish
        if finish is None:
            recorder.end("failed", time.perf_counter(), "the stream ended without a reason (finish_reason)")
        else:
            recorder.end("stop" if finish == "stop" else "length", time.perf_counter())
