"""Clients that go away, do not read, or come all at once: nothing lost, nothing repeated, nothing left behind."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
from typing import Any

import httpx
import pytest

from elastic.engines.base import Output, Request
from elastic.server.generation.response_stream import (
    AnswerOptions,
    ChoiceStream,
    LoopQueue,
    ResponseStream,
    TextDelta,
)
from support.processes import wait_until
from support.serving.fake_engine import FakeEngine
from support.serving.live_server import EMBEDDED, FAKE, TOKENIZER, Kind, Live, body, empty, live, text_of, texts

CLIENTS = 64
LONG = 900
WHOLE = 16
PROMPTS = ["import os", "def f(x):", "class A:\n", "# The"]


def known(kind: Kind, prompt: str, most: int) -> str:
    """The text of so many tokens, `eos` ignored."""
    ids = tuple(TOKENIZER.encode(prompt))
    return text_of(kind.tokens(ids, most))


async def read(client: httpx.AsyncClient, i: int, leave_after: int | None) -> str:
    """Read one stream, all of it or until so many pieces were read."""
    got = ""
    asked = body(PROMPTS[i % len(PROMPTS)], LONG if leave_after is not None else WHOLE, stream=True)
    async with client.stream("POST", "/v1/completions", json=asked) as response:
        assert response.status_code == 200
        if leave_after == 0:
            return got
        pieces = 0
        async for text in texts(response):
            got += text
            pieces += 1
            if pieces == leave_after:
                break
    return got


@pytest.mark.parametrize("kind", [pytest.param(FAKE, id="fake"), pytest.param(EMBEDDED, id="embedded")])
@pytest.mark.slow
def test_64_streams_with_random_disconnects(kind: Kind) -> None:
    rng = random.Random(5)
    leaving = [rng.randrange(6) if rng.random() < 0.5 else None for _ in range(CLIENTS)]

    async def everyone(url: str) -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as client:
            return await asyncio.gather(*(read(client, i, leave) for i, leave in enumerate(leaving)))

    texts = [known(kind, prompt, WHOLE) for prompt in PROMPTS]
    with kind.made() as engine, live(engine) as server:
        before = engine.counters.read()
        got = asyncio.run(everyone(server.url))
        wait_until(lambda: empty(engine))
        after = engine.counters.read()
    gone = sum(leave is not None for leave in leaving)
    told = [getattr(after, name) - getattr(before, name) for name in ("arrived", "completed", "cancelled")]
    assert told == [CLIENTS, CLIENTS - gone, gone]
    for i, leave in enumerate(leaving):
        text = texts[i % len(PROMPTS)]
        if leave is None:
            assert got[i] == text
        else:
            assert got[i][: len(text)] == text[: len(got[i])]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("state", ["running", "queued"])
def test_a_client_that_goes_away_is_cancelled(state: str, stream: bool) -> None:
    engine = FakeEngine(step_s=0.005, batch=1)
    with live(engine) as server:
        first = send(server, body("first", LONG, stream=True))
        wait_until(lambda: len(engine._running) == 1)
        second = send(server, body("second", LONG, stream=stream)) if state == "queued" else first
        wait_until(lambda: len(engine._waiting) == int(state == "queued"))
        waiting = [request.id for request, _ in engine._waiting] or list(engine._running)
        second.close()
        wait_until(lambda: engine.cancelled == waiting)
        first.close()
        wait_until(lambda: empty(engine))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_while_its_answer_is_computed(stream: bool) -> None:
    engine = FakeEngine(step_s=0.005)
    with live(engine) as server:
        client = send(server, body("x", LONG, stream=stream))
        wait_until(lambda: len(engine._running) == 1)
        client.close()
        wait_until(lambda: len(engine.cancelled) == 1 and empty(engine))


def test_a_client_that_does_not_read_holds_up_nobody() -> None:
    engine = FakeEngine(batch=4)
    with live(engine) as server:
        lazy = send(server, body("lazy", LONG, stream=True), small_buffer=True)
        wait_until(lambda: len(engine._running) == 1)
        with httpx.Client(base_url=server.url, timeout=120) as client:
            got = client.post("/v1/completions", json=body("eager", 40, stream=False)).json()
        assert got["choices"][0]["text"] == known(FAKE, "eager", 40)
        wait_until(lambda: empty(engine))  # the lazy one's request ran to its end
        received = b""
        while b"[DONE]" not in received[-64:]:
            received += lazy.recv(65536)
        lazy.close()
        events = [line for line in received.decode().split("\r\n") if line.startswith("data: {")]
        assert "".join(json.loads(e[6:])["choices"][0]["text"] for e in events) == known(FAKE, "lazy", LONG)
        assert engine.cancelled == []


def send(server: Live, asked: dict[str, Any], *, small_buffer: bool = False) -> socket.socket:
    """A client that sends a request and reads nothing."""
    client = socket.socket()
    if small_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", server.port))
    content = json.dumps(asked).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    client.sendall(head.encode() + b"\r\n\r\n" + content)
    return client


def test_no_request_keeps_the_event_loop_for_all_of_its_answers() -> None:
    answers, tokens = 40, 30
    read: list[int] = []

    async def other(stream: ResponseStream) -> None:
        """Note what was read whenever the loop has a turn."""
        while not all(answer.read_to_end for answer in stream.answers):
            read.append(sum(answer.tokens for answer in stream.answers))
            await asyncio.sleep(0)

    async def read_all() -> list[TextDelta]:
        request = Request((1,), tokens, ignore_eos=True, n=answers)
        queue = LoopQueue(asyncio.get_running_loop())
        choices = [ChoiceStream(i, request, TOKENIZER, AnswerOptions()) for i in range(answers)]
        stream = ResponseStream(FakeEngine(), choices, queue, lambda _: None, lambda *_: None, eager=True)
        take = stream._listener(choices)
        for i in range(answers):
            take(Output(request.id, (TOKENIZER.encode("a")[0],) * tokens, "length", index=i))
        found, _ = await asyncio.gather(stream.whole(), other(stream))
        return found

    assert [delta.text for delta in asyncio.run(read_all())] == ["a" * tokens] * answers
    turns = [after - before for before, after in itertools.pairwise([*read, answers * tokens])]
    assert max(turns) <= 64
