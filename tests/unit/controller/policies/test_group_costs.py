from __future__ import annotations

import pytest

from elastic.controller.policies.action_costs import ActionCost
from elastic.controller.policies.arbiter import CostWeights
from elastic.controller.policies.group_costs import GroupPrice, price
from elastic.planning.arrangement.arrangement import Arrangement, assign
from elastic.planning.arrangement.flips import LayerWeights, flip_order, layer_changes
from elastic.planning.arrangement.transfers import LayerKV, moves
from elastic.planning.measured_cost import LinearLatency
from elastic.planning.pipeline.chunk_cost import Chunk, ChunkCost, ModelCost
from elastic.planning.pipeline.step_time import pipeline_step_s, plain_step_s, sharded_step_s

LAYERS, WHOLE, CUT = 4, 20, 60
KV = [LayerKV(2, 5)] * LAYERS
BOTH = Arrangement.merged([Arrangement.alone(LAYERS, "a"), Arrangement.alone(LAYERS, "b")])
STAGES = Arrangement(((("a",),),) * 2 + ((("b",),),) * 2, "a", 2)
SHARDS = Arrangement.alone(LAYERS, "a", "b")
HOMES, TOKENS = {"x": "a", "y": "b"}, {"x": 10, "y": 30}
COST, WEIGHTS = ActionCost(1e-3, 1e-2), CostWeights(disturbance=0.5, horizon_s=10.0)


def priced(before: Arrangement, after: Arrangement, before_s: float, after_s: float) -> GroupPrice:
    at, then = assign(before, HOMES), assign(after, HOMES)
    changes = layer_changes(before, after, at, then, KV, TOKENS, [LayerWeights(WHOLE, CUT)] * LAYERS)
    order = flip_order(changes, {"a": 1000, "b": 1000})
    return price(changes, moves(before, after, at, then, KV, TOKENS), order, before_s, after_s, COST, WEIGHTS)


def test_a_drop_relieves_what_leaves_and_costs_copying_flips_and_the_pipeline() -> None:
    found = priced(BOTH, STAGES, 1.0, 1.2)
    assert found.relieved_bytes == LAYERS * (WHOLE + CUT)
    assert found.wire_bytes == 2 * 2 * 5 * (10 + 30)  # two layers of each, two heads
    assert found.flips == 4
    assert found.slower == pytest.approx(0.2)
    assert found.seconds == pytest.approx(0.5 * 1e-3 * 800 + 4 * 1e-2 + 10 * 0.2)


def test_a_restore_costs_the_weights_that_come_and_is_the_reverse() -> None:
    drop, restore = priced(BOTH, STAGES, 1.0, 1.2), priced(STAGES, BOTH, 1.2, 1.0)
    assert restore.relieved_bytes == -drop.relieved_bytes
    assert restore.wire_bytes == drop.wire_bytes + LAYERS * (WHOLE + CUT)
    assert restore.slower < 0


def test_a_reshard_relieves_half_of_what_is_cut_at_each_rank() -> None:
    found = priced(BOTH, SHARDS, 1.0, 1.0)
    assert found.relieved_bytes == LAYERS * CUT  # a half at each of two ranks
    assert found.wire_bytes == LAYERS * 5 * (10 + 30)  # one head of two
    assert found.seconds == pytest.approx(0.5 * 1e-3 * 800 + 4e-2)


def test_steps_are_compared_with_the_fitted_cost() -> None:
    model = ModelCost(ChunkCost(0, 0, 1e-4, 1e-3, 1e-3), ChunkCost(0, 0, 0, 1e-3, 1e-3), LAYERS)
    requests = [[Chunk("x", 10, 1)], [Chunk("y", 30, 1)]]
    before = plain_step_s(model, requests)
    piped = priced(BOTH, STAGES, before, pipeline_step_s(model, [2, 2], requests, hop_s=1e-4))
    halved = priced(
        BOTH, SHARDS, before, sharded_step_s(model, 2, [*requests[0], *requests[1]], LinearLatency(1e-4, 0), 8)
    )
    assert piped.slower > 0
    assert halved.slower < 0
    assert halved.seconds < piped.seconds


def test_without_requests_nothing_is_slower() -> None:
    assert priced(BOTH, STAGES, 0.0, 0.0).slower == 0
