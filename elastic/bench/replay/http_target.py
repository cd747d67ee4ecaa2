"""A server that speaks OpenAI's `/v1/completions`, as what a trace is replayed to."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from elastic.bench.replay.recorder import Recorder
from elastic.bench.replay.records import Finish
from elastic.bench.replay.server_status import ServerStatus
from elastic.bench.replay.sse import error_text, parse
from elastic.bench.replay.timeline import EngineState, FinishedRequest
from elastic.engines.base import Request
from elastic.errors import BackendUnavailable, ConfigError, StateError

REFUSED = frozenset({429, 503})
"""HTTP statuses of a server that has too much to do."""
PROBE_S = 10.0
"""How long a server may take to say which models it has."""


class HTTPTarget:
    """Requests as HTTP streams, all at once, on an event loop in a thread of its own; a context manager.

    `model` is the name that the server gives it; None: its first one. `headers` go with every request, such as
    `{"Authorization": "Bearer ..."}`. Prompts are sent as token ids, and with `ignore_eos`, which vLLM, SGLang and
    `elastic serve` understand: outputs are as long as the trace says. Tokens are timed as pieces of the stream come;
    their number is what the server counts (`usage`). Where it is `elastic serve`, states and actions are read from
    `/elastic/status`. Raises `BackendUnavailable` without httpx, `ConfigError` when no such server answers.
    """

    weights: tuple[tuple[str, ...], ...] = ()

    def __init__(self, url: str, *, model: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        self._httpx = _require_httpx()
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = dict(headers or {})
        if model is not None and not model.strip():
            raise ConfigError(f"model={model!r} is empty; give the name that the server has for it, or None")
        self.model = self._first_model() if model is None else model
        self._status = ServerStatus(self._httpx, self.url, self._headers)
        self._tasks: dict[str, Future[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="elastic-bench-http", daemon=True)
        self._client: Any = None

    def __enter__(self) -> HTTPTarget:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, request: Request, recorder: Recorder) -> None:
        """Send a request; what comes of it goes to the recorder. Raises `StateError` outside of the context."""
        if self._client is None:
            raise StateError("an HTTPTarget is used as a context manager: with HTTPTarget(url) as engine: ...")
        self._tasks[request.id] = asyncio.run_coroutine_threadsafe(self._complete(request, recorder), self._loop)

    def cancel(self, request: str) -> None:
        """Close its connection."""
        task = self._tasks.get(request)
        if task is not None:
            task.cancel()

    def observe(self, t_s: float) -> EngineState | None:
        return self._status.observe(t_s)

    def actions(self) -> Mapping[int, FinishedRequest]:
        return self._status.actions

    def close(self) -> None:
        """Close all connections. Can be called twice."""
        if self._client is None:
            return
        for task in self._tasks.values():
            task.cancel()
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._status.close()

    def _first_model(self) -> str:
        problem = ""
        try:
            answer = self._httpx.get(f"{self.url}/v1/models", headers=self._headers, timeout=PROBE_S)
            if answer.is_success:
                return str(answer.json()["data"][0]["id"])
            problem = f"HTTP {answer.status_code}"
        except (self._httpx.HTTPError, self._httpx.InvalidURL) as error:
            problem = str(error) or type(error).__name__
        except (ValueError, LookupError, TypeError):
            problem = "its answer lists no model"
        raise ConfigError(f"--url {self.url}: GET /v1/models does not tell what is served there: {problem}")

    async def _open(self) -> None:
        limits = self._httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = self._httpx.AsyncClient(headers=self._headers, limits=limits, timeout=None)

    async def _shut(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()
        self._client = None

    async def _complete(self, request: Request, recorder: Recorder) -> None:
        try:
            await self._stream(request, recorder)
        except self._httpx.HTTPError as error:
            recorder.end("failed", time.perf_counter(), str(error) or type(error).__name__)
        except asyncio.CancelledError:
            recorder.end("cancelled", time.perf_counter())
            raise

    async def _stream(self, request: Request, recorder: Recorder) -> None:
        url = f"{self.url}/v1/completions"
        async with self._client.stream("POST", url, json=self._body(request)) as response:
            if not response.is_success:
                await response.aread()
                finish: Finish = "rejected" if response.status_code in REFUSED else "failed"
                recorder.end(finish, time.perf_counter(), f"HTTP {response.status_code}: {_message(response)}")
                return
            await self._pieces(response, recorder)

    async def _pieces(self, response: Any, recorder: Recorder) -> None:
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
                return
            finish = event.finish or finish
        if finish is None:
            recorder.end("failed", time.perf_counter(), "the stream ended without a reason (finish_reason)")
        else:
            recorder.end("stop" if finish == "stop" else "length", time.perf_counter())

    def _body(self, request: Request) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": list(request.prompt),
            "max_tokens": request.max_tokens,
            "temperature": request.sampling.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }


def _message(response: Any) -> str:
    try:
        return error_text(response.json())
    except ValueError:
        return str(response.text)[:500]


def _require_httpx() -> Any:
    try:
        import httpx
    except ModuleNotFoundError as error:
        raise BackendUnavailable("a replay to a URL needs httpx: pip install 'elastic-llm[bench]'") from error
    return httpx
