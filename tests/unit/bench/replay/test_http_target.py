"""A replay to a URL: many streams at once, every way in which one can end, and what a status page adds."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.bench.replay.http_target import HTTPTarget
from elastic.bench.replay.open_loop import ReplayOptions, replay
from elastic.bench.replay.recorder import Recorder
from elastic.bench.replay.run import ReplayRun
from elastic.bench.replay.server_status import parse_actions, parse_state
from elastic.bench.replay.sse import parse
from elastic.bench.report.summary import summarize
from elastic.bench.traces.prompts import random_prompts
from elastic.bench.traces.trace import Trace, TraceRequest
from elastic.config import SLO
from elastic.controller.snapshot import RequestStats
from elastic.errors import ConfigError, StateError
from support.serving.status_documents import VARIANTS, fleet_document
from support.serving.stub_server import Handler, stub


def offered(n: int, output: int = 3) -> Trace:
    return Trace(tuple(TraceRequest(i * 0.001, 4, output) for i in range(n)), "made up")


def replayed(url: str, trace: Trace, options: ReplayOptions | None = None, **more: Any) -> ReplayRun:
    with HTTPTarget(url, **more) as remote:
        return replay(
            remote, trace, random_prompts(trace, 50), SLO(30.0), options=options or ReplayOptions(timeout_s=30)
        )


def test_a_replay_sends_token_ids_and_counts_the_pieces() -> None:
    trace = offered(20)
    with stub() as server:
        run = replayed(server.url, trace, headers={"Authorization": "Bearer geheimnisträger"})
        assert [r.finish for r in run.records] == ["length"] * 20
        assert all(len(r.token_times_s) == r.output_tokens == 3 for r in run.records)
        assert summarize(run)["elastic"]["slo_attainment"] == 1.0
        sent = sorted(map(str, (body["prompt"] for body in server.bodies)))
        assert sent == sorted(str(list(p)) for p in random_prompts(trace, 50))
        body = {k: v for k, v in server.bodies[0].items() if k != "prompt"}
        assert body == {
            "model": "stub",
            "max_tokens": 3,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        assert server.headers_seen[0]["Authorization"].encode("latin-1").decode() == "Bearer geheimnisträger"


def test_all_streams_are_open_at_once() -> None:
    """Each stream waits for all the others to have begun: fewer connections than requests would never end."""
    together = threading.Barrier(100)

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        handler.begin()
        handler.piece("first")
        together.wait(timeout=30)
        handler.piece("last", "length")
        handler.say("data: [DONE]\n\n")

    with stub(answer) as server:
        run = replayed(server.url, offered(100, output=2))
    assert summarize(run)["completed"] == 100
    assert summarize(run)["max_concurrent_requests"] == 100


def test_what_the_server_counts_is_believed_over_the_number_of_pieces() -> None:
    def answer(handler: Handler, body: dict[str, Any]) -> None:
        handler.begin()
        handler.piece("several tokens at once")
        time.sleep(0.01)
        handler.event({"choices": [{"text": "more", "finish_reason": "length"}], "usage": {"completion_tokens": 5}})

    with stub(answer) as server:
        record = replayed(server.url, offered(1)).records[0]
    assert len(record.token_times_s) == 2
    assert record.output_tokens == 5
    assert record.tpot_s == pytest.approx((record.token_times_s[1] - record.token_times_s[0]) / 4)


def refuse(status: int, document: Any) -> Any:
    return lambda handler, body: handler.reply(status, document)


def cut_short(handler: Handler, body: dict[str, Any]) -> None:
    handler.begin()
    handler.piece("then nothing")


def error_in_stream(handler: Handler, body: dict[str, Any]) -> None:
    handler.begin()
    handler.piece("so far")
    handler.event({"error": {"message": "out of pages"}})


def hang_up(handler: Handler, body: dict[str, Any]) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("answer", "finish", "words"),
    [
        (refuse(429, {"error": {"message": "too many wait"}}), "rejected", "HTTP 429: too many wait"),
        (refuse(503, {"detail": "draining"}), "rejected", "draining"),
        (refuse(400, {"error": {"message": "prompt too long"}}), "failed", "HTTP 400: prompt too long"),
        (cut_short, "failed", "ended without a reason"),
        (error_in_stream, "failed", "out of pages"),
        (hang_up, "failed", "disconnected"),
    ],
)
def test_every_bad_end_is_written_down(answer: Any, finish: str, words: str) -> None:
    with stub(answer) as server:
        run = replayed(server.url, offered(2))
    assert [r.finish for r in run.records] == [finish] * 2
    assert words in (run.records[0].error or "")
    assert summarize(run)["elastic"]["slo_attainment"] == 0.0


def test_a_stream_is_read_to_its_end_behind_an_error() -> None:
    """A generator of httpx that is left early ends when the event loop has gone, and warns."""
    end = []

    class Response:
        async def aiter_lines(self) -> AsyncIterator[str]:
            yield 'data: {"error": {"message": "out of pages"}}'
            yield 'data: {"choices": [{"text": "", "finish_reason": "length"}]}'
            end.append("read")

        async def aclose(self) -> None:
            end.append("closed")

    recorder = Recorder("r", TraceRequest(0.0, 4, 3), 0.0, threading.Semaphore(0))
    with stub() as server, HTTPTarget(server.url) as target:
        asyncio.run(target._record_stream(Response(), recorder))
    assert end == ["closed", "read"]
    assert (recorder.record().finish, recorder.record().error) == ("failed", "out of pages")


def test_a_server_is_hung_up_on_at_a_line_that_cannot_be_read(recwarn: pytest.WarningsRecorder) -> None:
    def answer(handler: Handler, body: dict[str, Any]) -> None:
        handler.begin()
        handler.say("data: {\n\n")
        while True:
            handler.piece("more")

    with stub(answer) as server, HTTPTarget(server.url) as remote:
        trace = offered(1)
        run = replay(remote, trace, random_prompts(trace, 50), SLO(30.0), options=ReplayOptions(timeout_s=30))
        assert server.gone.acquire(timeout=30)
    assert (run.records[0].finish, run.records[0].error) == ("failed", "the server sent what is not JSON: '{'")
    assert not recwarn.list


def test_a_request_that_takes_too_long_is_hung_up_on() -> None:
    release = threading.Event()

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        handler.begin()
        while not release.wait(0.01):
            handler.piece("still here")

    with stub(answer) as server:
        run = replayed(server.url, offered(2), ReplayOptions(timeout_s=0.3))
        assert [server.gone.acquire(timeout=20) for _ in run.records] == [True, True], "the server noticed"
        release.set()
    assert [r.finish for r in run.records] == ["timeout"] * 2
    assert all(r.output_tokens > 0 for r in run.records)


def event(number: int, when_s: float, kind: str = "swap") -> dict[str, Any]:
    shown = {"kind": kind, "layers": [3], "variant": "int4"}
    return {
        "id": number, "action": shown, "when_s": when_s, "why": "kv 0.97", "moved_bytes": 7, "released_bytes": 9,
        "prepare_ms": 1.0, "wait_ms": 0.1, "pause_ms": 0.2, "ok": True, "outcome": "applied",
    }  # fmt: skip


def test_states_and_actions_come_from_the_status_page() -> None:
    asked = 0
    skew_s = 1000.0  # the server's clock is ahead

    def document() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        now = time.time() + skew_s
        events = [event(0, now - 50)]
        events += [event(1, now - 40, "release")] if asked > 1 else []  # as of warm-up requests
        events += [event(2, now)] if asked > 3 else []
        cache = {"used_bytes": 5, "capacity_bytes": 10}
        return {
            "at_s": now, "events": events, "layers": ["float32", "int4"], "status": {"kv": [cache, cache]},
            "traffic": asdict(RequestStats(waiting=asked, running=1, preemptions=asked)),
        }  # fmt: skip

    with stub() as server:
        server.documents["/elastic/status"] = document
        run = replayed(server.url, offered(5), ReplayOptions(timeout_s=30, sample_every_s=0.01))
    assert run.timeline[-1].kv_used_bytes == 10
    assert run.timeline[-1].kv_capacity_bytes == 20
    assert run.timeline[-1].layers == {"float32": 1, "int4": 1}
    assert [a.kind for a in run.actions] == ["swap"], "what happened before the run is left out"
    assert run.actions[0].layers == (3,)
    assert -1 < run.actions[0].t_s < 30, "on our clock"
    assert summarize(run)["elastic"]["preemptions"] == len(run.timeline) - 1


def test_of_a_fleet_states_are_of_all_ranks_and_actions_of_each_and_of_itself() -> None:
    document = fleet_document(at_s=time.time())
    rank, lost = document["ranks"]
    for index, event in enumerate(document["fleet_events"]):
        event["id"] = index
    second = {**rank, "name": "r2", "pid": 8, "layers": ["dropped"] * len(VARIANTS)}
    document["ranks"] = [rank, second, {**rank, "name": "r3", "state": "ended", "events": []}, lost]
    state, actions = parse_state(document, 1.5), parse_actions(document)
    (kv,) = rank["status"]["kv"]
    assert (state.kv_used_bytes, state.kv_capacity_bytes) == (2 * kv["used_bytes"], 2 * kv["capacity_bytes"])
    assert state.layers == {**Counter(VARIANTS), "dropped": len(VARIANTS)}
    assert [action.kind for action in actions.values()] == ["swap", "resize_kv"] * 2 + ["lost", "moved"]
    assert actions["", 1].bytes == 3 << 20
    again = parse_actions({**document, "ranks": [{**rank, "pid": 9}]})
    assert not actions.keys() & again.keys() - {("", 0), ("", 1)}, "of another process of that name"
    nothing = parse_state({**document, "ranks": [lost]}, 1.5)
    assert (nothing.kv_used_bytes, nothing.layers) == (None, {})


def test_what_was_done_before_a_replay_is_left_out_though_the_server_did_not_tell_of_it_then() -> None:
    asked = 0
    old = event(0, time.time() - 50)

    def document() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        now = time.time()
        if asked == 2:
            return {}  # as of a server that is too busy to answer
        done = [old, event(1, now)] if asked > 3 else [old] if asked > 1 else []
        traffic = asdict(RequestStats(waiting=0, running=1))
        return {"at_s": now, "events": done, "layers": ["int4"], "status": None, "traffic": traffic}

    with stub() as server:
        server.documents["/elastic/status"] = document
        run = replayed(server.url, offered(5), ReplayOptions(timeout_s=30, sample_every_s=0.01))
    assert len(run.timeline) == asked - 2
    assert [-1 < action.t_s < 30 for action in run.actions] == [True]


def test_what_a_server_counts_by_variant_during_the_run_is_the_share_of_the_work() -> None:
    asked = 0

    def document() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        return {
            "at_s": time.time(), "events": [], "layers": ["int4"], "status": None, "traffic": asdict(RequestStats()),
            "token_layers": {"float32": 100, "int4": 7} if asked < 4 else {"float32": 400, "int4": 107, "int3": 0},
        }  # fmt: skip

    with stub() as server:
        server.documents["/elastic/status"] = document
        run = replayed(server.url, offered(5), ReplayOptions(timeout_s=30))
    assert summarize(run)["elastic"]["token_share_by_variant"] == {"float32": 0.75, "int4": 0.25}


@pytest.mark.parametrize("page", [None, {}, [], {"traffic": {}}, {"events": [{}], "at_s": 1.0}])
def test_a_server_without_such_a_page_is_replayed_to_as_well(page: Any) -> None:
    with stub() as server:
        if page is not None:
            server.documents["/elastic/status"] = page
        run = replayed(server.url, offered(2))
    assert run.timeline == ()
    assert summarize(run)["elastic"]["token_share_by_variant"] is None, "not known, which is not none"
    assert summarize(run)["elastic"]["preemptions"] is None


def test_no_server_is_one_clear_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"--url {url}: GET /v1/models does not tell"):
            HTTPTarget(url)
    with pytest.raises(ConfigError, match="--url 'no url at all' is no address of a server"):
        HTTPTarget("no url at all")
    with stub() as server:
        server.documents.clear()
        with pytest.raises(ConfigError, match="HTTP 404"):
            HTTPTarget(server.url)
        server.documents["/v1/models"] = {"data": []}
        with pytest.raises(ConfigError, match="lists no model"):
            HTTPTarget(server.url)
        remote = HTTPTarget(f"{server.url}/v1/", model="named")
        assert remote.url == server.url
        with pytest.raises(StateError, match="context manager"):
            replay(remote, offered(1), [(1, 2, 3, 4)])
        remote.close()


def test_lines_of_a_stream() -> None:
    assert parse("") is None
    assert parse(": ping") is None
    assert parse("event: x") is None
    assert parse("data: [DONE]").kind == "done"  # type: ignore[union-attr]
    assert parse('data: {"choices": [{"text": "", "finish_reason": null}]}').kind == "piece"  # type: ignore[union-attr]
    assert parse('data: {"choices": [{"text": "", "finish_reason": "stop"}]}').kind == "other"  # type: ignore[union-attr]
    assert parse('data: {"choices": [{"text": "x", "finish_reason": "stop"}]}').finish == "stop"  # type: ignore[union-attr]


@given(st.text(max_size=60) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["choices", "usage", "error", "text", "finish_reason", "completion_tokens", "message"]), inner
    ),
).map(__import__("json").dumps))  # fmt: skip
def test_no_line_breaks_the_reader(data: str) -> None:
    found = parse(f"data: {data}")
    assert found is not None
    assert found.kind in ("piece", "other", "done", "error")
