"""What steps take is known from a small part of the cache: for prompts and batches of any length."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.engines.continuous.engine import ContinuousEngine
from elastic.estimation.activations import peak_bytes, step_bytes
from support.architectures import build


@pytest.fixture
def engine(wrapped: Any) -> Any:
    made: list[ContinuousEngine] = []

    def make(name: str) -> ContinuousEngine:
        made.append(ContinuousEngine(wrapped(build(name), "cpu=4MiB"), max_batch_tokens=64, share_prefixes=False))
        return made[-1]

    yield make
    for each in made:
        each.stop()


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3-moe", "gemma2"])
def test_longer_prompts_and_larger_batches_take_what_is_told_of_them(name: str, engine: Any) -> None:
    one = engine(name)
    steps = step_bytes(one, 64, 16)
    for mix in (((448, 64),), ((0, 64),), ((200, 64),)):
        (start, tokens), most = mix[0], peak_bytes(one, mix)
        assert most <= 1.05 * (steps.fixed + steps.prompt * (start + tokens)), mix
    end = peak_bytes(one, ((448, 64),))
    assert end >= 0.5 * (steps.fixed + steps.prompt * 512)
    for mix in (((399, 1),) * 16, ((63, 1),) * 16):
        most, tokens = peak_bytes(one, mix), sum(start + 1 for start, _ in mix)
        assert most <= 1.05 * (steps.fixed + steps.decode * tokens), mix
    assert steps.prompt > 0
