from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import Any

import pytest

from elastic.engines.base import Output, Request, SampledToken
from elastic.engines.continuous import ContinuousEngine
from elastic.engines.continuous.chunk_profile import PROFILED_AFTER, fit_cost, profile_chunks, profile_replays
from elastic.engines.core.step import SequenceState, Step, StepResult
from elastic.engines.executor.graphs.captured_pass import CapturedPass
from elastic.engines.executor.graphs.step_graphs import CAPTURE_AFTER
from elastic.engines.pipeline.path import LayerPath
from elastic.errors import CapacityError, ConfigError, StateError
from elastic.planning.pipeline.chunk_cost import Chunk, ChunkCost
from support import architectures
from support.planning.halving import halve
from support.planning.pipelines import bubbles, by_tokens, heavy_tail, tokens
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
    inputs = engine._runner.inputs

    def watch(chunks: Any, **options: Any) -> Any:
        seen.append([(chunk.start, len(chunk.tokens)) for chunk in chunks])
        return inputs(chunks, **options)

    monkeypatch.setattr(engine._runner, "inputs", watch)
    profile = profile_chunks(engine, MIXES, rounds=2)
    assert sorted(seen) == sorted([list(mix) for mix in MIXES] * 4)  # two rounds, each once before it is timed
    assert [sample.chunks for sample in profile.layer] == [sample.chunks for sample in profile.rest] == MIXES
    assert profile.layers == len(engine._model.model.layers)
    assert min(sample.seconds for sample in (*profile.layer, *profile.rest)) > 0
    for one, layer, rest in zip(profile.whole, profile.layer, profile.rest, strict=True):
        assert one.seconds == pytest.approx(profile.layers * layer.seconds + rest.seconds)
    cost = profile.fit()
    assert min(*astuple(cost.layer), *astuple(cost.rest)) >= 0


def test_tokens_of_a_batch_choose_as_many_experts_as_those_of_requests(wrapped: Any) -> None:
    model = architectures.build("qwen3-moe")
    wrapped(model, small(8 << 20))
    chosen: list[int] = []
    experts = model.model.layers[0].mlp.experts
    experts.register_forward_pre_hook(lambda _, args: chosen.append(args[1].unique().numel()))
    engine = ContinuousEngine(model, block_tokens=8, max_batch_tokens=64)
    try:
        profile_chunks(engine, [((0, 1),), ((0, 1),) * 8], rounds=1)  # no prefix: nobody has written one
    finally:
        engine.stop(drain=False)
    assert model.config.num_experts_per_tok == min(chosen) < max(chosen)


def test_nothing_is_left_and_the_engine_can_serve(engine: ContinuousEngine) -> None:
    hooks = sum(len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in engine._model.model.layers)
    profile_chunks(engine, MIXES, rounds=1)
    after = sum(len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in engine._model.model.layers)
    assert hooks == after
    assert not engine._runner.rows
    engine._blocks.check()
    outputs: list[Output] = []
    engine.start()
    engine.submit(Request((1, 2, 3), 4, ignore_eos=True), outputs.append)
    engine.stop()
    assert sum(output.finish is not None for output in outputs) == 1
    assert outputs[-1].finish == "length"


def test_decode_steps_are_replayed_and_called_in_turn(
    engine: ContinuousEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    replay = CapturedPass.replay
    monkeypatch.setattr(CapturedPass, "replay", lambda self, inputs: (steps.append("replay"), replay(self, inputs))[1])
    first = engine._model.model.layers[0]
    forward = type(first).forward

    def called(layer: Any, *args: Any, **kwargs: Any) -> Any:
        steps.extend(["call"] if layer is first else [])
        return forward(layer, *args, **kwargs)

    monkeypatch.setattr(type(first), "forward", called)
    shares = profile_replays(engine, [((40, 1),), ((20, 1),) * 3], rounds=3)
    assert all(share > 0 for share in shares)
    until_captured, checked = ["call"] * (PROFILED_AFTER + 1), ["call", "replay"]
    assert steps == [*until_captured, *checked, "replay", *["call", "replay"] * 3] * 2
    steps.clear()
    profile_replays(engine, [((40, 1),), ((20, 1),) * 3], rounds=3, most_s=0.0)
    assert steps.count("call") == 2, "both sizes are captured, and no seconds are left for more than a pair of each"
    assert not engine._runner.rows
    engine._blocks.check()


def test_a_profile_that_fails_leaves_the_engine_to_capture_as_ever(
    engine: ContinuousEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(step: Step) -> None:
        raise CapacityError("no buffer", requested_bytes=1, free_bytes=0, total_bytes=1)

    monkeypatch.setattr(engine._runner, "execute", fail)
    with pytest.raises(CapacityError):
        profile_replays(engine, [((40, 1),)])
    assert engine._runner.graphs is not None
    assert engine._runner.graphs.capture_after == CAPTURE_AFTER


def test_an_engine_that_replays_nothing_saves_nothing(wrapped: Any) -> None:
    model = architectures.build("qwen3")
    wrapped(model, small(8 << 20))
    engine = ContinuousEngine(model, block_tokens=8, enforce_eager=True)
    assert profile_replays(engine, [((40, 1),), ((20, 1),) * 3], rounds=2) == [1.0, 1.0]
    engine.stop(drain=False)


def test_an_engine_that_serves_is_not_profiled(engine: ContinuousEngine) -> None:
    engine.start()
    with pytest.raises(StateError, match="before it is started"):
        profile_chunks(engine, MIXES)


@pytest.mark.slow
def test_batches_that_do_not_fit_are_refused_and_leave_nothing(engine: ContinuousEngine) -> None:
    with pytest.raises(ConfigError, match="no room for the batch"):
        profile_chunks(engine, [((64, 8),) * 2000], rounds=1)
    assert not engine._runner.rows
    profile_chunks(engine, MIXES[:1], rounds=1)


def test_the_cost_of_a_model_is_fitted_in_few_rounds(engine: ContinuousEngine) -> None:
    cost = fit_cost(engine, 64, most_s=0.2)
    assert cost.layers == len(engine._model.model.layers)
    assert cost.whole.batch([Chunk("a", 0, 1), Chunk("b", 0, 64)]) >= cost.whole(Chunk("a", 0, 1)) > 0
    engine._blocks.check()


def test_no_round_but_the_first_begins_late(engine: ContinuousEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = engine._runner.inputs
    counted: list[Any] = []
    monkeypatch.setattr(engine._runner, "inputs", lambda *a, **kw: (counted.append(a), inputs(*a, **kw))[1])
    profile_chunks(engine, MIXES, rounds=5, most_s=0.0)
    assert len(counted) == 2 * len(MIXES)


def test_steps_are_of_equal_cost_only_while_other_ranks_compute_layers(engine: ContinuousEngine) -> None:
    count = len(engine._model.model.layers)
    engine.cohorts.use_cost(ChunkCost(prefix=1.0, own=0.0, token=0.0, chunk=0.0, shared=0.0))
    budget, queue = engine._loop.scheduler.budget, [Chunk("a", 0, 40), Chunk("b", 100, 10)]
    assert budget.tokens((), queue) == 64
    engine._home.path = LayerPath("", ("",) * (count - 1) + ("other",), 1)
    tokens = budget.tokens((), queue)
    engine._home.path = LayerPath.alone("", count)
    assert 64 // 4 <= tokens < 64


def scheduled(engine: ContinuousEngine, queue: Sequence[Chunk]) -> list[list[Chunk]]:
    """Return the steps that an engine would compute of prompts that all wait from the start."""
    scheduler, batches = engine._loop.scheduler, []
    for prompt in queue:
        request = Request((1,) * prompt.tokens, 1, ignore_eos=True, id=prompt.request)
        scheduler.add([SequenceState(request.id, request, 0, 0)])
    while (step := scheduler.schedule()) is not None:
        batches.append([Chunk(chunk.sequence, chunk.start, len(chunk.tokens)) for chunk in step.chunks])
        samples = sum(chunk.samples for chunk in step.chunks)
        scheduler.update(step, StepResult((SampledToken(1),) * samples))
    return batches


@pytest.mark.parametrize("most", [256, 512, 2048])
def test_what_serves_in_a_pipeline_is_held_against_figure_11(wrapped: Any, most: int) -> None:
    """Steps are full before they cost their share where tokens are cheap; none is dearer than figure 11's dearest."""
    model = architectures.build("qwen3")
    wrapped(model, small(64 << 20))
    engine = ContinuousEngine(model, block_tokens=32, max_batch_tokens=most, share_prefixes=False)
    cost = ChunkCost(prefix=1e-6, own=1e-6, token=2e-4, chunk=1e-3, shared=5e-4)
    engine.cohorts.use_cost(cost)
    count, ours, theirs = len(model.model.layers), 0.0, 0.0
    engine._home.path = LayerPath("", ("",) * (count - 1) + ("other",), 1)
    for seed in range(8):
        queue = [prompt._replace(request=f"{seed} {prompt.request}") for prompt in heavy_tail(seed)]
        batches = scheduled(engine, queue)
        costs, dearest = [cost.batch(batch) for batch in batches], max(map(cost.batch, halve(queue, cost, most // 4)))
        assert sum(map(tokens, batches)) == tokens(queue)
        assert max(map(tokens, batches)) <= most
        assert max(costs) <= 1.1 * dearest
        equal = [c for c, batch in zip(costs[:-1], batches, strict=False) if tokens(batch) < most]
        assert not equal or max(costs) <= 1.1 * min(equal)
        ours += bubbles(batches, cost)
        theirs += bubbles(by_tokens(queue, -(-tokens(queue) // len(batches))), cost)
    assert ours <= 0.4 * theirs, "what KunServe says"
    engine._home.path = LayerPath.alone("", count)
    engine.stop(drain=False)
    engine._blocks.check()
