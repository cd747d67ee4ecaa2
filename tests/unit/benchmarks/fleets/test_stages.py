"""What the benchmark of stages predicts: more stages, more hops for a token, and less of a core for each request."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[4] / "benchmarks"))

import stages

from elastic.planning.pipeline.chunk_cost import ChunkCost

CHUNKS = ChunkCost(prefix=1e-8, own=1e-8, token=1e-4, chunk=1.2e-2, shared=1e-2)
COSTS = stages.Costs(asdict(CHUNKS), 0.05, hop_s=0.003, byte_s=1e-9, contention=0.0, stage_s=0.001)


@pytest.fixture(scope="module")
def by_stages() -> dict[int, dict[str, float]]:
    batches = stages.drawn(0, 4, quick=True)
    return {count: stages.figures(stages.predicted(COSTS.model(0.0), 4, count, batches)) for count in (1, 2, 4)}


def test_a_token_that_is_alone_takes_a_hop_more_for_each_stage(by_stages: dict[int, dict[str, float]]) -> None:
    tpot = {count: figures["tpot_ms"] for count, figures in by_stages.items()}
    assert tpot[2] - tpot[1] == pytest.approx(2 * 3 + 2, abs=0.5), "two hops, and what two engines do around them"
    assert tpot[4] - tpot[2] == pytest.approx(2 * (3 + 1), abs=0.5)


def test_ratios_are_to_one_stage(by_stages: dict[int, dict[str, float]]) -> None:
    told = stages.told([{str(count): figures for count, figures in by_stages.items()}] * 2)
    assert told["1"]["ttft_ms"]["over_one_stage"]["median"] == 1.0
    assert told["4"]["tpot_ms"]["over_one_stage"]["median"] == by_stages[4]["tpot_ms"] / by_stages[1]["tpot_ms"] > 1.0
