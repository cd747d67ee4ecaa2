"""What steps take is known from a small part of the cache: for prompts and batches of any length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic.engines.continuous.engine import ContinuousEngine
from elastic.estimation.activations import peak_bytes, step_bytes
from support.architectures import build


@pytest.fixture
def engine(wrapped: Any, tmp_path: Path) -> Any:
    made: list[ContinuousEngine] = []

    def make(name: str, **options: Any) -> ContinuousEngine:
        model = build(name)
        model.save_pretrained(tmp_path)
        wrapped(model, "cpu=4MiB", checkpoint=str(tmp_path))
        made.append(ContinuousEngine(model, max_batch_tokens=64, share_prefixes=False, **options))
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


@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize("name", ["llama-gqa", "gemma2"])
def test_where_weights_are_elsewhere_steps_take_no_more_than_is_told_by_formula(
    name: str, kv: str, engine: Any
) -> None:
    one = engine(name, kv_cache_dtype=kv)
    prompt, decodes = ((448, 64),), ((399, 1),) * 16
    measured = peak_bytes(one, prompt), peak_bytes(one, decodes)
    one.runtime.digests(1)
    one.runtime.drop(1)
    steps = step_bytes(one, 64, 16)
    assert measured[0] <= steps.fixed + steps.prompt * 512
    assert measured[1] <= steps.fixed + steps.decode * 400 * 16
    one.runtime.restore(1)
