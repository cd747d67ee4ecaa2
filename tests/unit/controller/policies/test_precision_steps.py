"""Layers that are full in a variant, too, as a checkpoint may leave some, have no step to it."""

from __future__ import annotations

from elastic.controller.policies.precision_steps import LayerSize, PrecisionStep, path

BOTH = LayerSize("float32", 100, {"int8": 60, "gptq": 40})
FULL_IN_GPTQ = LayerSize("float32", 100, {"int8": 60})
GPTQ_ALONE = LayerSize("float32", 100, {"gptq": 40})


def test_a_layer_has_steps_to_the_levels_in_which_it_is_packed() -> None:
    steps = path((2, 0, 1), ("int8", "gptq"), (BOTH, FULL_IN_GPTQ, GPTQ_ALONE), 3)
    assert steps == (
        PrecisionStep(0, "float32", "int8", 100, 60),
        PrecisionStep(1, "float32", "int8", 100, 60),
        PrecisionStep(2, "float32", "gptq", 100, 40),
        PrecisionStep(0, "int8", "gptq", 60, 40),
    )
