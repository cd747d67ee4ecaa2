"""What is predicted of stages: no token is lost, and each stage more is a hop more for a request that is alone."""

from __future__ import annotations

import sys
from dataclasses import astuple
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[4] / "benchmarks"))

import stages

from elastic.planning.pipeline.chunk_cost import Chunk, ChunkCost

COST, HOP_S = ChunkCost(0.0, 0.0, 1e-4, 2e-2, 1.8e-2), 1e-3
"""Without attention: each token of an answer takes as long."""
COSTS = stages.Costs(
    dict(zip(("prefix", "own", "token", "chunk", "shared", "read"), astuple(COST), strict=True)),
    rest=0.05, hop_s=HOP_S, byte_s=0.0, contention=0.0, stage_s=0.0,
)  # fmt: skip


@pytest.mark.parametrize("count", [2, 3, 4, 6, 12])
def test_a_request_that_is_alone_waits_for_each_hop_once_a_token(count: int) -> None:
    batches = stages.drawn(0, 12, quick=True)
    served = stages.predicted(COSTS.model(0.0), 12, count, batches)
    for requests, answers in zip(batches, served, strict=True):
        assert [len(answer.tokens) for answer in answers] == [request.max_tokens for request in requests]
        assert {answer.finish for answer in answers} == {"length"}
    step_s = COST.batch([Chunk("", 0, 1)])
    hops = stages.figures(served)["tpot_ms"] / 1e3 - step_s
    assert hops == pytest.approx(count * HOP_S, rel=1e-3)  # from the last stage to the first, too


def test_stages_whose_hops_cost_nothing_take_no_longer_for_one_request() -> None:
    free = stages.Costs(COSTS.chunks, COSTS.rest, hop_s=0.0, byte_s=0.0, contention=0.0, stage_s=0.0)
    one, six = (
        stages.figures(stages.predicted(free.model(0.0), 12, k, stages.drawn(0, 12, quick=True))) for k in (1, 6)
    )
    assert six["tpot_ms"] == pytest.approx(one["tpot_ms"], rel=1e-3)
