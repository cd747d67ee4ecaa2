from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from elastic.engines.base import Output, Request
from elastic.engines.continuous import ContinuousEngine
from elastic.engines.continuous.chunk_profile import profile_chunks
from elastic.errors import ConfigError, StateError
from support import architectures
from support.wrapped_model import small

MIXES = [((0, 5),), ((0, 9), (16, 1), (7, 20)), ((40, 1),) * 3, ((30, 8),), ((0, 33), (0, 2))]


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
