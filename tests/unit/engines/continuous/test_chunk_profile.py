from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from elastic.engines.base import Output, Request
from elastic.engines.continuous import ContinuousEngine
from elastic.engines.continuous.chunk_profile import fit_cost, profile_chunks
from elastic.engines.pipeline.path import LayerPath
from elastic.errors import ConfigError, StateError
from elastic.planning.pipeline.chunk_cost import Chunk, ChunkCost
from support import architectures
from support.wrapped_model import small

MIXES = [((0, 5),), ((0, 9), (16, 1), (7, 20)), ((40, 1),) * 3, ((30, 8),), ((0, 33), (0, 2)), ((12, 4),)]


@pytest.fixture(params=["qwen3", "gemma3"])
def engine(request: pytest.FixtureRequest, wrapped: Any) -> Iterator[ContinuousEngine]:
    model = architectures.build(request.param)
    wrapped(model, small(8 << 20))
    made = ContinuousEngine(model, block_tokens=8, max_batch_tokens=64)
    yield made
    made.stop(drain=False)
    made._blocks.check()
    made.runtime.check()


def test_every_batch_is_run_behind_its_prefix(engine: ContinuousEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[tuple[int, int]]] = []
    begin_step = engine._runner.batch.begin_step

    def watch(chunks: Any) -> Any:
        seen.append([(chunk.start, len(chunk.tokens)) for chunk in chunks])
        return begin_step(chunks)

    monkeypatch.setattr(engine._runner.batch, "begin_step", watch)
    profile = profile_chunks(engine, MIXES, rounds=2)
    assert sorted(seen) == sorted([list(mix) for mix in MIXES] * 4)  # two rounds, each once before it is timed
    assert [sample.chunks for sample in profile.layer] == [sample.chunks for sample in profile.rest] == MIXES
    assert profile.layers == len(engine._model.model.layers)
    assert min(sample.seconds for sample in (*profile.layer, *profile.rest)) > 0
    for one, layer, rest in zip(profile.whole, profile.layer, profile.rest, strict=True):
        assert one.seconds == pytest.approx(profile.layers * layer.seconds + rest.seconds)
    cost = profile.fit()
    assert min(*cost.layer.coefficients, *cost.rest.coefficients) >= 0


def test_nothing_is_left_and_the_engine_can_serve(engine: ContinuousEngine) -> None:
    hooks = sum(len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in engine._model.model.layers)
    profile_chunks(engine, MIXES, rounds=1)
    after = sum(len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in engine._model.model.layers)
    assert hooks == after
    assert not engine._runner.batch.rows
    engine._blocks.check()
    outputs: list[Output] = []
    engine.start()
    engine.submit(Request((1, 2, 3), 4, ignore_eos=True), outputs.append)
    engine.stop()
    assert sum(output.finish is not None for output in outputs) == 1
    assert outputs[-1].finish == "length"


def test_an_engine_that_serves_is_not_profiled(engine: ContinuousEngine) -> None:
    engine.start()
    with pytest.raises(StateError, match="before it is started"):
        profile_chunks(engine, MIXES)


@pytest.mark.slow
def test_batches_that_do_not_fit_are_refused_and_leave_nothing(engine: ContinuousEngine) -> None:
    with pytest.raises(ConfigError, match="no room for the batch"):
        profile_chunks(engine, [((64, 8),) * 2000], rounds=1)
    assert not engine._runner.batch.rows
    profile_chunks(engine, MIXES[:1], rounds=1)


def test_the_cost_of_a_model_is_fitted_in_few_rounds(engine: ContinuousEngine) -> None:
    cost = fit_cost(engine, 64, most_s=0.2)
    assert cost.layers == len(engine._model.model.layers)
    assert cost.whole.batch([Chunk("a", 0, 1), Chunk("b", 0, 64)]) > cost.whole(Chunk("a", 0, 1)) > 0
    engine._blocks.check()


def test_no_round_but_the_first_begins_late(engine: ContinuousEngine) -> None:
    steps = engine._runner.batch.begin_step
    counted: list[Any] = []
    engine._runner.batch.begin_step = lambda chunks: (counted.append(chunks), steps(chunks))[1]
    profile_chunks(engine, MIXES, rounds=5, most_s=0.0)
    assert len(counted) == 2 * len(MIXES)


def test_steps_are_of_equal_cost_only_while_other_ranks_compute_layers(engine: ContinuousEngine) -> None:
    count = len(engine._model.model.layers)
    engine.use_cost(ChunkCost(prefix=1.0, own=0.0, token=0.0, chunk=0.0, shared=0.0))
    budget, queue = engine._loop.scheduler.budget, [Chunk("a", 0, 40), Chunk("b", 100, 10)]
    assert budget.tokens((), queue) == 64
    engine._home.path = LayerPath("", ("",) * (count - 1) + ("other",), 1)
    tokens = budget.tokens((), queue)
    engine._home.path = LayerPath.alone("", count)
    assert 64 // 4 <= tokens < 64
