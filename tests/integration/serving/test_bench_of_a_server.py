"""`elastic bench` against a server of our own: what a replay needs of it is there."""

from __future__ import annotations

import pytest

from elastic.bench.replay.http_target import HTTPTarget
from elastic.bench.replay.open_loop import ReplayOptions, replay
from elastic.bench.report.summary import summarize
from elastic.bench.traces.prompts import random_prompts
from elastic.bench.traces.trace import Trace, TraceRequest
from elastic.config import SLO
from support.serving.live_server import EMBEDDED, FAKE, Kind, live


@pytest.mark.parametrize("kind", [pytest.param(FAKE, id="fake"), pytest.param(EMBEDDED, id="embedded")])
def test_a_trace_is_replayed_over_http(kind: Kind) -> None:
    trace = Trace(tuple(TraceRequest(i * 0.01, 5 + i, 4) for i in range(12)), "made up")
    prompts = random_prompts(trace, 200)
    with kind.made() as engine, live(engine) as server, HTTPTarget(server.url) as remote:
        if engine.runtime:
            engine.runtime.release([1])
        run = replay(remote, trace, prompts, SLO(ttft_s=30.0), options=ReplayOptions(warmup=1, timeout_s=30))
    assert [record.finish for record in run.records] == ["length"] * 12
    summary = summarize(run)
    assert summary["completed"] == 12
    assert summary["total_output_tokens"] == 48
    assert summary["elastic"]["slo_attainment"] == 1.0
    shares = {"float32": 0.75, "absent": 0.25} if kind is EMBEDDED else {"float32": 1.0}
    assert summary["elastic"]["token_share_by_variant"] == shares
