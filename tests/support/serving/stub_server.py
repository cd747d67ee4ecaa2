"""A small HTTP server that speaks enough of OpenAI's API to be replayed to; what it says is the test's choice."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[["Handler", dict[str, Any]], None]


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Stub

    def do_GET(self) -> None:
        document = self.server.documents.get(self.path)
        if callable(document):
            document = document()
        self.reply(200 if document is not None else 404, document)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.headers_seen.append(dict(self.headers))
        try:
            self.server.answer(self, body)
        except (BrokenPipeError, ConnectionResetError):
            self.server.gone.release()

    def reply(self, status: int, document: Any) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def begin(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()

    def say(self, text: str) -> None:
        self.wfile.write(text.encode())
        self.wfile.flush()

    def event(self, document: Any) -> None:
        self.say(f"data: {json.dumps(document)}\n\n")

    def piece(self, text: str, finish: str | None = None) -> None:
        self.event({"choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": None})

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


class Stub(ThreadingHTTPServer):
    """What was asked of it, and what it answers."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.headers_seen: list[dict[str, str]] = []
        self.documents: dict[str, Any] = {"/v1/models": {"object": "list", "data": [{"id": "stub"}]}}
        self.lock = threading.Lock()
        self.gone = threading.Semaphore(0)
        """Released for each client that closed its connection early."""
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


def complete(handler: Handler, body: dict[str, Any]) -> None:
    """As many pieces as were asked for, then the reason, the usage, the end; as most servers do."""
    handler.begin()
    handler.say(": a comment\n\n")
    for i in range(body["max_tokens"]):
        handler.piece(f"t{i} ")
    handler.piece("", "length")
    handler.event({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
    handler.say("data: [DONE]\n\n")


@contextmanager
def stub(answer: Answer = complete) -> Iterator[Stub]:
    server = Stub(answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
