"""What is judged of the code's structure, and costs nothing to keep."""

from __future__ import annotations

import code_measures


def test_names_say_something_functions_state_shapes_and_few_are_tiny() -> None:
    figures = code_measures.measure(listed=0)
    assert figures["variables named found, here, known, one"] == 0
    assert figures["class names that stand twice"] == 0
    functions, state_shapes = figures["public functions with tensors; that state shapes"]
    assert state_shapes == functions
    assert float(figures["of <= 3 lines"].rstrip("%")) <= 18.0, "what is so short is read faster where it is called"
    assert figures["private, one caller, <= 5 lines"] <= 40
    median, p90, most = figures["their lines: median, p90, most"]
    assert median >= 7
    assert p90 <= 22
    assert most <= 60
    assert figures["files, and most in a folder"][1] <= 12
