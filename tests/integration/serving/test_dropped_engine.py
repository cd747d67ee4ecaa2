"""An engine that nobody has any more gives its model back, when its last request has ended."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest

import elastic
from elastic import ContinuousEngine, Output, Request, StateError
from elastic.engines.continuous import lifetime
from elastic.memory import places
from support.architectures import build
from support.child_process import TESTS, end_of_fork, wait_for_the_janitor


@pytest.fixture
def model(wrapped: Any) -> Any:
    return wrapped(build("llama-gqa"))


@pytest.mark.parametrize("started", [False, True])
def test_an_engine_that_is_dropped_gives_its_model_back_at_once(started: bool, model: Any) -> None:
    engine = ContinuousEngine(model)
    if started:
        engine.start()
    del engine
    elastic.unwrap(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_its_requests_are_answered_before(model: Any) -> None:
    engine, heard, inside, go_on = ContinuousEngine(model), list[Output](), threading.Event(), threading.Event()

    def listen(output: Output) -> None:
        heard.append(output)
        inside.set()
        assert go_on.wait(60)

    engine.start()
    engine.submit(Request((1, 2, 3), 8), listen)
    assert inside.wait(60)
    del engine
    with pytest.raises(StateError, match=r"in use by a continuous batching engine.*dropped ends with its last request"):
        elastic.unwrap(model)
    go_on.set()
    wait_for_the_janitor()
    assert [output.finish for output in heard] == [None] * 7 + ["length"]
    elastic.unwrap(model)


@pytest.mark.parametrize("started", [False, True])
def test_a_model_that_is_dropped_with_its_engine_is_gone(started: bool) -> None:
    model = elastic.wrap(build("llama-gqa"), places="cpu=64MiB")
    engine, gone = ContinuousEngine(model), weakref.ref(model)
    if started:
        engine.start()
    del engine, model
    wait_for_the_janitor()
    gc.collect()
    assert gone() is None
    wait_for_the_janitor()
    assert "cpu" not in places._open


def test_a_process_ends_with_an_engine_that_was_dropped_in_the_middle_of_a_request() -> None:
    status, said, errors = end_of_fork(f"""
        import threading, sys
        sys.path.append({TESTS!r})
        import elastic
        from support.architectures import build
        model, began = elastic.wrap(build("llama-gqa"), places="cpu=64MiB"), threading.Event()
        engine = elastic.ContinuousEngine(model)
        engine.start()
        engine.submit(elastic.Request((1, 2, 3), 500), lambda output: began.set())
        began.wait()
        del engine
        print("ends")
    """)
    assert (status, said, errors) == (0, "ends\n", "")


def test_an_engine_that_cannot_end_with_its_process_does_not_keep_others_from_it(
    wrapped: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    models = [wrapped(build("llama-gqa")) for _ in range(2)]
    engines = [ContinuousEngine(model) for model in models]

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a fault")

    for engine in engines:
        engine.start()
    with monkeypatch.context() as patched:
        for engine in engines:
            patched.setattr(engine._lifetime, "end", fail)
        lifetime._stop_all()
    assert [record.getMessage() for record in caplog.records] == ["an engine could not be ended with its process"] * 2
    for engine in engines:
        engine.stop()
