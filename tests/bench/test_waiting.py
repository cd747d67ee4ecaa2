"""Why requests waited: for KV blocks, or for their turn."""

from __future__ import annotations

from typing import Any

import architectures
from helpers import small, tight

from elastic.bench.prompts import random_prompts
from elastic.bench.replay import Options, replay
from elastic.bench.run import Run
from elastic.bench.traces import Trace, TraceRequest
from elastic.engines.continuous import ContinuousEngine


def served(model: Any, **options: Any) -> Run:
    """Six requests of 40 + 24 tokens at once."""
    trace = Trace(tuple(TraceRequest(0.001 * i, 40, 24) for i in range(6)), "by hand")
    engine = ContinuousEngine(model, block_tokens=8, max_batch_tokens=64, **options)
    engine.start()
    try:
        prompts = random_prompts(trace, architectures.VOCAB)
        return replay(engine, trace, prompts, options=Options(timeout_s=60, sample_every_s=0.01))
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
    assert 0 < run.summary()["elastic"]["queueing_kv_share"] <= 1


def test_where_the_batch_holds_one_request_none_of_the_wait_is_for_blocks(wrapped: Any) -> None:
    model = architectures.build("llama-gqa")
    wrapped(model, small(8 << 20))
    run = served(model, max_requests=1)
    assert [r.waited_for_kv_s for r in run.records] == [0.0] * 6
    assert run.summary()["elastic"]["queueing_kv_share"] == 0.0
