"""Which decode steps are replayed, and that their tokens are those of the model, whatever is done to it meanwhile."""

from __future__ import annotations

import copy
import gc
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import elastic
from elastic.engines.base import Output, Request
from elastic.engines.continuous import ContinuousEngine, step_loop
from elastic.engines.executor import paged_cache
from elastic.engines.executor.graphs import step_graphs
from elastic.engines.executor.graphs.captured_pass import CapturedPass
from elastic.engines.executor.graphs.step_graphs import StepGraphs
from support import architectures
from support.lossless_variant import HALF, exact
from support.processes import wait_until
from support.serving.generations import SERVED, Collector, Continuation, prompts, same_unless_close, serve
from support.serving.tracked_engine import TrackedEngine


@pytest.fixture(autouse=True)
def _captured_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "CAPTURE_AFTER", 4)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of sequences of all passes that were replayed, and not only to be checked."""
    counted: list[int] = []
    replay, check = CapturedPass.replay, StepGraphs._check

    def counting(self: CapturedPass, inputs: dict[str, Any]) -> Any:
        counted.append(inputs["input_ids"].shape[1])
        return replay(self, inputs)

    def checking(self: StepGraphs, *args: Any) -> Any:
        output = check(self, *args)
        counted.pop()
        return output

    monkeypatch.setattr(CapturedPass, "replay", counting)
    monkeypatch.setattr(StepGraphs, "_check", checking)
    return counted


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3-moe", "deepseek-v3", "gemma2"])
def test_prompts_of_lengths_that_come_again_are_replayed(name: str, engines: Any, replays: list[int]) -> None:
    """Alone, beside sequences that decode, and in parts; but where a window forgets what the prompt overwrites."""
    model, engine = architectures.build(name), engines(architectures.build(name), max_batch_tokens=24).engine
    for seed in range(8):
        first, *others = (Request(p, 12, ignore_eos=True) for p in prompts([13, 40, 13], architectures.VOCAB, seed))
        heard = serve(engine, [first])
        heard.tokens |= serve(engine, others).tokens
        for request in (first, *others):
            assert same_unless_close(model, request.prompt, heard.tokens[request.id])
    windows = any(table.window is not None for table in engine._runner.tables)
    assert (13 in replays, 24 in replays) == (not windows, not windows)
    assert windows == (name == "gemma2")


@pytest.mark.parametrize("kept", ["auto", "int8"])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_graph_serves_prompts_of_fewer_tokens(
    compiled: bool, kept: str, engines: Any, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it computes behind their last is nobody's: neither in the cache, nor in what is told of the prompt."""
    if not compiled:
        monkeypatch.setattr(paged_cache, "compiled_attention", lambda *of: None)
    options = {"kv_cache_dtype": kept, "share_prefixes": False}
    engine, eager = (
        engines(exact(architectures.build("llama-gqa")), enforce_eager=eager, **options).engine
        for eager in (False, True)
    )
    for seed, length in enumerate([13, 14, 15, 16, 13, 14, 15]):
        (asked,) = prompts([length], architectures.VOCAB, seed)
        request = Request(asked, 12, ignore_eos=True, prompt_logprobs=0)
        replayed, called = serve(engine, [request]), serve(eager, [request])
        assert replayed.tokens == called.tokens
        scores = [heard.first[request.id].prompt_logprobs for heard in (replayed, called)]
        assert len(scores[0]) == length
        given, expected = (torch.tensor([token.logprob for token in of_all[1:]]) for of_all in scores)
        torch.testing.assert_close(given, expected, rtol=0, atol=1e-4)
        wait_until_prepared(engine)
    assert {13, 14, 15} <= set(replays), "by the graphs of fourteen and sixteen"


def wait_until_prepared(engine: ContinuousEngine) -> None:
    """Until no size that came before is left to be captured or checked."""
    kinds = engine._runner.graphs._sizes
    wait_until(lambda: not any(kind.wanted for kind in list(kinds.values())))


def test_sizes_are_captured_while_nobody_waits(engines: Any, replays: list[int]) -> None:
    """With tokens of nobody: no hook of the model is called, and no token changes."""
    model, tracked = architectures.build("llama-gqa"), engines(architectures.build("llama-gqa"), share_prefixes=False)
    for seed, length in enumerate([13, 14, 14, 13]):
        request = Request(prompts([length], architectures.VOCAB, seed)[0], 4, ignore_eos=True)
        heard = serve(tracked.engine, [request])
        assert same_unless_close(model, request.prompt, heard.tokens[request.id])
        if seed == 1:
            wait_until_prepared(tracked.engine)
            replays.clear()
    assert replays == [14, 1, 1, 1, 13, 1, 1, 1], "none had come four times"
    assert tracked.computed == 2 * (13 + 14) + 4 * 3


def test_nothing_is_captured_before_the_engine_has_been_idle_for_a_while(
    engines: Any, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sends one request after another would wait for it."""
    monkeypatch.setattr(step_loop, "IDLE_S", 3600.0)
    engine, (prompt,) = engines(architectures.build("llama-gqa"), share_prefixes=False).engine, prompts([13], 50)
    for _ in range(3):
        serve(engine, [Request(prompt, 1, ignore_eos=True)])
    assert [entry.captured for entry in engine._runner.graphs._sizes.values()] == [None]
    monkeypatch.setattr(step_loop, "IDLE_S", 0.0)
    serve(engine, [Request(prompt, 1, ignore_eos=True)])  # the fourth: captured in its step
    wait_until_prepared(engine)
    serve(engine, [Request(prompt, 1, ignore_eos=True)])
    assert replays == [13]


def test_behind_an_action_sizes_have_to_come_again(engines: Any, replays: list[int]) -> None:
    engine = engines(exact(architectures.build("llama-gqa")), wrap={"variants": [HALF]}, nbytes=8 << 20).engine
    (prompt,) = prompts([9], architectures.VOCAB)
    serve(engine, [Request(prompt, 6, ignore_eos=True)])
    wait_until_prepared(engine)
    engine.runtime.swap([0], "half")
    replays.clear()
    serve(engine, [Request(prompt, 2, ignore_eos=True)])
    assert not replays
    serve(engine, [Request(prompt, 6, ignore_eos=True)])
    wait_until_prepared(engine)
    serve(engine, [Request(prompt, 6, ignore_eos=True)])
    assert replays


def test_a_model_that_fails_on_tokens_of_nobody_goes_on_without_graphs(
    engines: Any, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("not these")

    monkeypatch.setattr(StepGraphs, "_prepare", fail)
    engine, (prompt,) = engines(architectures.build("llama-gqa")).engine, prompts([9], architectures.VOCAB)
    serve(engine, [Request(prompt, 3, ignore_eos=True)])
    wait_until(lambda: engine._runner.graphs.refusal)
    assert engine._runner.graphs.refusal == "ValueError: not these"
    heard = serve(engine, [request := Request(prompt, 12, ignore_eos=True)])
    assert same_unless_close(architectures.build("llama-gqa"), prompt, heard.tokens[request.id])
    assert not replays


def test_prompts_of_many_lengths_leave_the_graphs_of_decode_steps(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_graphs, "MOST_GRAPHS", 2)
    monkeypatch.setattr(step_graphs, "MOST_SIZES", 6)
    engine = engines(architectures.build("llama-gqa"), share_prefixes=False).engine
    for length in range(3, 20):
        for _ in range(2 if length < 16 else 6):
            serve(engine, [Request(prompts([length], architectures.VOCAB)[0], 8, ignore_eos=True)])
    sizes = engine._runner.graphs._sizes
    assert len(sizes) <= 6
    captured = [tokens for (tokens, _), size in sizes.items() if size.captured is not None]
    assert sorted(captured) == [1, 20]


@pytest.fixture
def engines() -> Iterator[Callable[..., TrackedEngine]]:
    made: list[TrackedEngine] = []

    def make(model: Any, **options: Any) -> TrackedEngine:
        made.append(TrackedEngine(model, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("name", sorted(SERVED))
def test_decode_steps_of_every_architecture_are_replayed(name: str, engines: Any, replays: list[int]) -> None:
    asked = [Request(prompt, 24, ignore_eos=True) for prompt in prompts([3, 9, 20], architectures.VOCAB)]
    engine = engines(architectures.build(name), max_batch_tokens=64).engine
    engine.exchange.pause()  # until all are there: who comes between two steps has others of their own captured
    heard = Collector()
    for request in asked:
        engine.submit(request, heard)
    engine.exchange.resume()
    heard.wait([request.id for request in asked])
    assert len(replays) >= 12
    assert set(replays) <= {1, 2, 3}
    for request in asked:
        assert same_unless_close(architectures.build(name), request.prompt, heard.tokens[request.id])


def test_actions_end_graphs_and_steps_are_replayed_again_behind_them(engines: Any, replays: list[int]) -> None:
    model = exact(architectures.build("llama-gqa"))
    prompt = prompts([20], architectures.VOCAB)[0]
    expected = Continuation(exact(architectures.build("llama-gqa")), prompt, 120)
    engine = engines(model, wrap={"variants": [HALF]}, nbytes=8 << 20).engine
    rt, heard, request = engine.runtime, Collector(), Request(prompt, 120, ignore_eos=True)
    reached, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def hold(output: Output) -> None:
        heard(output)
        if len(heard.tokens[request.id]) % 20 == 0:
            reached.release()
            assert go_on.acquire(timeout=120)

    engine.submit(request, hold)
    actions: list[tuple[Callable[[], Any], bool]] = [
        (lambda: rt.swap([0, 2], "half"), True),
        (lambda: rt.restore(), True),
        (lambda: rt.release([1]), False),  # streamed: not plain
        (lambda: rt.restore(), True),
        (lambda: rt.kv.resize(rt.kv.capacity_bytes), True),
    ]
    for act, replayed in actions:
        assert reached.acquire(timeout=120)
        act()
        replays.clear()
        go_on.release()
        assert reached.acquire(timeout=120)
        assert bool(replays) is replayed
        reached.release()
    go_on.release()
    heard.wait([request.id])
    assert heard.tokens[request.id] == expected


def test_graphs_that_ended_do_not_wait_for_the_garbage_collector(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []
    begin = CapturedPass.__init__

    def noting(self: CapturedPass, *args: Any) -> None:
        begin(self, *args)
        made.append(weakref.ref(self._graph))

    monkeypatch.setattr(CapturedPass, "__init__", noting)
    engine = engines(architectures.build("llama-gqa")).engine
    gc.disable()
    try:
        for _ in range(2):
            serve(engine, [Request((5, 6, 7), 12, ignore_eos=True)])
            engine.runtime.release([0])
            engine.runtime.restore()
        assert [graph() is None for graph in made] == [True, False]  # the second at the next step
    finally:
        gc.enable()


def test_hooks_of_others_are_called_at_each_step_while_they_are_there(engines: Any, replays: list[int]) -> None:
    model, heard = architectures.build("llama-gqa"), Collector()
    tracked = engines(model)
    (prompt,) = prompts([5], architectures.VOCAB)
    calls: list[int] = []
    mlp = model.model.layers[1].mlp
    of_one = mlp.register_forward_pre_hook, mlp.register_forward_hook, model.register_forward_hook
    of_all = register_module_forward_pre_hook, register_module_forward_hook
    for register in (*of_one, *of_all):
        first, second = (Request(prompt, 20, ignore_eos=True) for _ in range(2))
        handle = register(lambda module, *_: calls.append(1) if module in (mlp, model) else None)
        serve(tracked.engine, [first])
        assert not replays
        assert len(calls) == (40 if register in of_all else 20)
        handle.remove()
        calls.clear()
        heard = serve(tracked.engine, [second])
        assert replays
        assert not calls
        replays.clear()
    assert same_unless_close(architectures.build("llama-gqa"), prompt, heard.tokens[second.id])


class Looking(nn.Module):
    """A module that looks in its tensors."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result if result.abs().max() < 1e9 else torch.zeros_like(result)


class Counting(Looking):
    """A module whose results depend on how often it was called, as no operator shows."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        result: torch.Tensor = self.inner(x)
        return result * (1 + self.calls / 64)


@pytest.mark.parametrize(("kind", "reason"), [(Looking, "it calls aten"), (Counting, "a replay gave other logits")])
def test_models_that_cannot_be_replayed_are_called(
    kind: type[Looking], reason: str, engines: Any, replays: list[int]
) -> None:
    def build() -> Any:
        model = architectures.build("llama-gqa")
        model.model.layers[1].mlp = kind(model.model.layers[1].mlp)
        return model

    (prompt,) = prompts([5], architectures.VOCAB)
    eager = serve(engines(build(), enforce_eager=True).engine, [first := Request(prompt, 20, ignore_eos=True)])
    tracked = engines(build())
    heard = serve(tracked.engine, [second := Request(prompt, 20, ignore_eos=True)])
    assert not replays
    assert reason in tracked.engine._runner.graphs.refusal
    if kind is Looking:  # the other one counts the pass that was compared, too
        assert heard.tokens[second.id] == eager.tokens[first.id]


@pytest.mark.parametrize("change", ["adapter", "forward", "root"])
def test_models_that_others_have_changed_are_called(change: str, engines: Any, replays: list[int]) -> None:
    model = architectures.build("llama-gqa")
    if change == "adapter":
        model.model.norm.base_layer = nn.Identity()
    else:
        module = model if change == "root" else model.model.norm
        module.forward = module.forward
    (prompt,) = prompts([5], architectures.VOCAB)
    tracked = engines(model)
    heard = serve(tracked.engine, [request := Request(prompt, 20, ignore_eos=True)])
    assert not replays
    assert tracked.engine._runner.graphs.refusal
    assert same_unless_close(architectures.build("llama-gqa"), prompt, heard.tokens[request.id])


def test_a_model_keeps_its_signature_while_it_is_served_and_has_its_own_forward_afterwards() -> None:
    model = architectures.build("llama-gqa")
    signature = inspect.signature(model.forward)
    elastic.wrap(model)
    engine = ContinuousEngine(model)
    try:
        assert "forward" in vars(model)
        assert inspect.signature(model.forward) == signature
        copied = copy.deepcopy(model)
        tokens = torch.tensor([[5, 6, 7]])
        with torch.no_grad():
            assert torch.equal(copied(tokens).logits, model(tokens).logits)
    finally:
        engine.stop()
    assert "forward" not in vars(model)
    elastic.unwrap(model)


def test_an_eager_engine_leaves_the_model_as_it_is(engines: Any, replays: list[int]) -> None:
    model = architectures.build("llama-gqa")
    tracked = engines(model, enforce_eager=True)
    assert "forward" not in vars(model)
    serve(tracked.engine, [Request((5, 6, 7), 20, ignore_eos=True)])
    assert not replays
