"""Clients that take their time over a request: closed after a while, and never waited for at the end."""

from __future__ import annotations

import json
import signal
import socket

from support.processes import wait_until
from support.serving.fake_engine import FakeEngine
from support.serving.live_server import PATIENCE_S, Live, live

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
SOON_S = 0.2


def connect(server: Live) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), PATIENCE_S)


def dribbled(client: socket.socket, byte: bytes) -> bytes:
    """What comes while a byte is sent now and then, until the connection is closed."""
    received = b""
    client.settimeout(SOON_S / 10)
    for _ in range(int(PATIENCE_S / SOON_S * 10)):
        try:
            client.sendall(byte)
            more = client.recv(65536)
        except TimeoutError:
            continue
        except OSError:  # closed between two of our bytes
            return received
        received += more
        if not more:
            return received
    raise AssertionError("it was never closed")


def test_a_head_that_never_ends_is_closed() -> None:
    with live(FakeEngine(), header_timeout_s=SOON_S) as server, connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: ")
        assert dribbled(client, b"x").startswith(b"HTTP/1.1 408 ")


def test_the_second_head_of_a_connection_is_closed_too() -> None:
    with live(FakeEngine(), header_timeout_s=SOON_S) as server, connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        client.sendall(b"GET /health HTTP/1.1\r\nHost: ")
        assert b"HTTP/1.1 408 " in dribbled(client, b"x")


def test_a_request_that_takes_longer_than_its_head_may_is_answered() -> None:
    with live(FakeEngine(step_s=0.01), header_timeout_s=SOON_S) as server, connect(server) as client:
        body = json.dumps({"prompt": "x", "max_tokens": 60, "ignore_eos": True}).encode().ljust(100)
        client.sendall(HEAD + body)
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_body_that_never_ends_is_answered_and_closed() -> None:
    with live(FakeEngine(), body_timeout_s=SOON_S) as server, connect(server) as client:
        client.sendall(HEAD + b'{"prompt": "')
        received = dribbled(client, b"x")
        assert received.startswith(b"HTTP/1.1 408 ")
        assert b"request_timeout" in received
        wait_until(lambda: server.server._serving.answering == 0)


def test_half_a_body_does_not_hold_up_the_end() -> None:
    with live(FakeEngine(), drain_s=10 * PATIENCE_S) as server, connect(server) as client:
        client.sendall(HEAD + b'{"prompt": "')
        wait_until(lambda: server.server._serving.answering == 1)
        server.server.handle_exit(signal.SIGTERM)
        received = b"".join(iter(lambda: client.recv(65536), b""))
        assert received.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 5" in received.lower()
        server.ended()
