"""Why requests waited: for KV blocks, or for their turn."""

from __future__ import annotations

from typing import Any

from elastic.bench.replay.open_loop import ReplayOptions, replay
from elastic.bench.replay.run import ReplayRun
from elastic.bench.report.summary import summarize
from elastic.bench.traces.prompts import random_prompts
from elastic.bench.traces.trace import Trace, TraceRequest
from elastic.engines.continuous import ContinuousEngine
from support import architectures
from support.wrapped_model import small, tight


def served(model: Any, **options: Any) -> ReplayRun:
    """Six requests of 40 + 24 tokens at once."""
    trace = Trace(tuple(TraceRequest(0.001 * i, 40, 24) for i in range(6)), "by hand")
    engine = ContinuousEngine(model, block_tokens=8, max_batch_tokens=64, **options)
    engine.start()
    try:
        prompts = random_prompts(trace, architectures.VOCAB)
        return replay(engine, trace, prompts, options=ReplayOptions(timeout_s=60, sample_every_s=0.01))
    finally:
        engine.stop(drain=False)


def test_where_the_cache_holds_one_request_the_others_wait_for_blocks(wrapped: Any) -> None:
    model = architectures.build("llama-gqa")
    wrapped(model, tight(model, 12))
    run = served(model)
    waits = [r.waited_for_kv_s for r in run.records]
    assert all(r.finish == "length" for r in run.records)
    assert max(w for w in waits if w is not None) > 0
    for record in run.records:
        assert record.queued_s is not None
        assert record.waited_for_kv_s is not None
        assert 0 <= record.waited_for_kv_s <= record.queued_s
    assert 0 < summarize(run)["elastic"]["queueing_kv_share"] <= 1


def test_where_the_batch_holds_one_request_none_of_the_wait_is_for_blocks(wrapped: Any) -> None:
    model = architectures.build("llama-gqa")
    wrapped(model, small(8 << 20))
    run = served(model, max_requests=1)
    assert [r.waited_for_kv_s for r in run.records] == [0.0] * 6
    assert summarize(run)["elastic"]["queueing_kv_share"] == 0.0
