"""`benchmarks/engine_step.py` has a model of its own, which is called as the engine calls any."""

from __future__ import annotations

from typing import Any

import engine_step
import pytest

from elastic.engines.continuous import ContinuousEngine
from support.architectures import build
from support.wrapped_model import small


def test_steps_of_a_model_that_answers_at_once_are_timed(wrapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_step, "NEW", 12)
    monkeypatch.setattr(engine_step, "SKIPPED", 4)
    model = wrapped(build("llama-gqa"), small(4 << 20))
    with ContinuousEngine(model, share_prefixes=False) as engine:
        engine._runner._model = engine_step.InstantModel(1, 512, model.config.vocab_size)
        assert len(engine_step.step_ms(engine, 3)) == 7
