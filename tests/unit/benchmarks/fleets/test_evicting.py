"""The baselines that evict: they evict, and their tokens are those of the plain engine."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import elastic
from elastic.assets import MODEL_DIR
from elastic.engines.base import Output, Request
from elastic.engines.continuous import engine as engine_module
from elastic.engines.continuous.reports import EngineReports

sys.path.append(str(Path(__file__).parents[4] / "benchmarks"))

import evicting

REQUESTS = 4


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what a way replaces be as it was after each test."""
    for name in ("BlockManager", "RestartingScheduler"):
        monkeypatch.setattr(engine_module, name, getattr(engine_module, name))
    monkeypatch.setattr(EngineReports, "begin", EngineReports.begin)


def answers(place: str) -> tuple[list[tuple[int, ...]], int]:
    """Return the tokens of some requests, and how many evictions there were."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    elastic.wrap(model, places=[place])
    choose = random.Random(0)
    found: dict[str, list[int]] = {}
    with engine_module.ContinuousEngine(model, max_batch_tokens=64, share_prefixes=False) as engine:
        for number in range(REQUESTS):
            prompt = tuple(choose.randrange(3, 400) for _ in range(40))
            tokens = found.setdefault(str(number), [])
            request = Request(prompt, 100, ignore_eos=True, id=str(number))
            engine.submit(request, _collector(tokens))
        engine.stop()
        engine._blocks.check()
        evictions: int = getattr(engine._loop.scheduler, "evictions", 0)
    elastic.unwrap(model)
    return [tuple(tokens) for tokens in found.values()], evictions


def _collector(tokens: list[int]) -> Callable[[Output], None]:
    def listener(output: Output) -> None:
        assert output.error is None
        tokens.extend(output.tokens)

    return listener


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    """The tokens where nothing is evicted."""
    return answers("cpu#0=64MiB")[0]


@pytest.mark.parametrize("way", evicting.WAYS)
def test_what_was_evicted_goes_on_with_the_same_tokens(way: str, plain: list[tuple[int, ...]]) -> None:
    assert [len(tokens) for tokens in plain] == [100] * REQUESTS
    evicting.install(way)
    found, evictions = answers("cpu#0=14MiB")
    assert evictions
    assert found == plain
