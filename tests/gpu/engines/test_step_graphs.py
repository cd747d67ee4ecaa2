"""Decode steps in CUDA graphs: the tokens of the model, whatever actions and other threads do meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from elastic.engines.base import Request
from elastic.engines.executor.graphs import step_graphs
from elastic.engines.executor.graphs.captured_pass import CapturedPass
from elastic.engines.executor.graphs.piecewise_cuda_graph import PiecewiseCudaGraph
from elastic.memory.backends.streams import capturing, synchronize
from support import architectures
from support.lossless_variant import HALF, exact
from support.serving.generations import SERVED, Collector, Continuation, prompts, same_unless_close, serve
from support.serving.tracked_engine import TrackedEngine

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("no_violations")]
DEVICE = torch.device("cuda:0")
BUDGET = 1 << 30


@pytest.fixture(autouse=True)
def _captured_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "CAPTURE_AFTER", 4)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of sequences of all passes that were replayed."""
    counted: list[int] = []
    replay = CapturedPass.replay

    def counting(self: CapturedPass, inputs: dict[str, Any]) -> Any:
        assert isinstance(self._graph, PiecewiseCudaGraph)
        counted.append(inputs["input_ids"].shape[1])
        return replay(self, inputs)

    monkeypatch.setattr(CapturedPass, "replay", counting)
    return counted


@pytest.fixture
def engines() -> Iterator[Callable[..., TrackedEngine]]:
    made: list[TrackedEngine] = []

    def make(model: Any, **options: Any) -> TrackedEngine:
        made.append(TrackedEngine(model, BUDGET, cuda_graphs=True, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("name", sorted(SERVED))
def test_decode_steps_are_replayed(name: str, engines: Any, replays: list[int]) -> None:
    asked = [Request(prompt, 24, ignore_eos=True) for prompt in prompts([3, 9, 20], architectures.VOCAB)]
    tracked = engines(architectures.build(name, device=DEVICE), max_batch_tokens=64)
    heard = serve(tracked.engine, asked)
    refusal = tracked.engine._runner.graphs.refusal
    assert len(replays) >= 12 or "_grouped_mm" in refusal, refusal  # of float32 it waits, also on a GPU
    plain = architectures.build(name)
    assert all(same_unless_close(plain, request.prompt, heard.tokens[request.id]) for request in asked)


def test_actions_end_graphs_and_steps_are_replayed_again_behind_them(engines: Any, replays: list[int]) -> None:
    model = exact(architectures.build("llama-gqa", device=DEVICE))
    prompt = prompts([20], architectures.VOCAB)[0]
    expected = Continuation(exact(architectures.build("llama-gqa")), prompt, 130)
    engine = engines(model, wrap={"variants": [HALF]}).engine
    rt, heard, request = engine.runtime, Collector(), Request(prompt, 130, ignore_eos=True)
    engine.submit(request, heard)
    tokens = 12
    actions: list[tuple[Callable[[], Any], bool]] = [
        (lambda: rt.swap([0, 2], "half"), True),
        (lambda: rt.restore(), True),
        (lambda: rt.release([1]), False),  # streamed: not plain
        (lambda: rt.restore(), True),
    ]
    for act, replayed in actions:
        heard.wait_for_tokens(request.id, tokens)
        act()
        done = len(heard.tokens[request.id])
        replays.clear()
        heard.wait_for_tokens(request.id, done + 14)
        assert bool(replays) is replayed
        tokens = done + 16
    heard.wait([request.id])
    assert heard.tokens[request.id] == expected


def test_a_model_that_looks_in_its_tensors_is_called(
    engines: Any, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = architectures.build("llama-gqa", device=DEVICE)
    kind = type(model.model.norm)
    forward = kind.forward

    def looking(module: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = forward(module, x)
        return result if result.abs().max().item() < 1e9 else torch.zeros_like(result)

    monkeypatch.setattr(kind, "forward", looking)
    (prompt,) = prompts([5], architectures.VOCAB)
    tracked = engines(model)
    heard = serve(tracked.engine, [request := Request(prompt, 20, ignore_eos=True)])
    assert not replays
    assert "captur" in tracked.engine._runner.graphs.refusal
    assert same_unless_close(architectures.build("llama-gqa"), prompt, heard.tokens[request.id])


def test_a_thread_that_waits_for_the_device_ends_no_capture(
    engines: Any, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = architectures.build("llama-gqa", device=DEVICE)
    kind, waited = type(model.model.norm), [threading.Event() for _ in range(2)]
    forward, waiting = kind.forward, [threading.Thread(target=lambda done=done: wait(done)) for done in waited]

    def wait(done: threading.Event) -> None:
        synchronize(DEVICE)
        done.set()

    def with_another_thread(module: Any, x: torch.Tensor) -> torch.Tensor:
        if capturing() and waiting:
            thread = waiting.pop()
            thread.start()
            thread.join(0.1)
        result: torch.Tensor = forward(module, x)
        return result

    monkeypatch.setattr(kind, "forward", with_another_thread)
    (prompt,) = prompts([5], architectures.VOCAB)
    tracked = engines(model)
    heard = serve(tracked.engine, [request := Request(prompt, 20, ignore_eos=True)])
    assert not waiting
    assert all(done.wait(60) for done in waited)
    assert replays, tracked.engine._runner.graphs.refusal
    assert same_unless_close(architectures.build("llama-gqa"), prompt, heard.tokens[request.id])
