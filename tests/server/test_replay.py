"""`elastic bench` against a server of our own: what a replay needs of it is there."""

from __future__ import annotations

import pytest
from server.live import EMBEDDED, FAKE, Kind, live

from elastic.bench.prompts import random_prompts
from elastic.bench.remote import RemoteEngine
from elastic.bench.replay import Options, replay
from elastic.bench.traces import Trace, TraceRequest
from elastic.config import SLO


@pytest.mark.parametrize("kind", [pytest.param(FAKE, id="fake"), pytest.param(EMBEDDED, id="embedded")])
def test_a_trace_is_replayed_over_http(kind: Kind) -> None:
    trace = Trace(tuple(TraceRequest(i * 0.01, 5 + i, 4) for i in range(12)), "made up")
    prompts = random_prompts(trace, 200)
    with kind.made() as engine, live(engine) as server, RemoteEngine(server.url) as remote:
        run = replay(remote, trace, prompts, SLO(ttft_s=30.0), options=Options(warmup=1, timeout_s=30))
    assert [record.finish for record in run.records] == ["length"] * 12
    summary = run.summary()
    assert summary["completed"] == 12
    assert summary["total_output_tokens"] == 48
    assert summary["elastic"]["slo_attainment"] == 1.0
