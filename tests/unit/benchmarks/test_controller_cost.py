"""`benchmarks/controller.py` calls what the controller and the hooks have, as they are."""

from __future__ import annotations

from typing import Any

import controller

from support.architectures import build
from support.wrapped_model import small


def test_ticks_and_the_counting_of_hooks_are_timed(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"), small(4 << 20), variants=["int8"], policy="balanced", controller=False)
    assert controller.counting(model) > 0
    assert len(controller.hour(model, 20)) == 10
