"""The benchmark of bursts counts what vLLM preempts."""

from __future__ import annotations

import pytest
from vllm_engine import _burst

from elastic.bench.traces.trace import Trace, TraceRequest
from support.vllm_engine.engine import counted_preemptions, elastic_engine


@pytest.mark.parametrize("promise", [True, False])
def test_preemptions_of_a_burst_are_counted(promise: bool) -> None:
    burst = Trace(tuple(TraceRequest(0.0, 20, 180) for _ in range(16)), "all at once")
    with elastic_engine("16MiB", promise=promise) as llm, counted_preemptions(llm) as preempted:
        counts = [_burst(llm, burst)["preemptions"], _burst(llm, burst)["preemptions"]]
    assert sum(counts) == len(preempted)
    assert all((count == 0) == promise for count in counts)
