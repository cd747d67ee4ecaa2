"""What Ctrl-C, a thread's end, a cancelled future or another thread interrupts: nothing is stuck, no token is wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import elastic
from elastic import StateError
from elastic.hooks.forward_gate import ForwardGate
from elastic.memory import weight_layout
from elastic.runtime import installation
from elastic.runtime.runtime import Runtime
from support.architectures import build, prompt
from support.child_process import in_fork
from support.wrapped_model import layers

WAIT_S = 30.0


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**prompt()).logits


def interrupt(model: Any, error: type[BaseException]) -> None:
    """Have a forward pass end in the middle of a layer, without the hooks that torch calls for an `Exception`."""

    def fail(*_: Any) -> None:
        hook.remove()
        raise error

    hook = layers(model)[1].mlp.register_forward_hook(fail)
    with torch.no_grad():
        model(**prompt())


def in_thread(work: Callable[[], Any]) -> Any:
    """Return what a thread returns, which must not hang."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive(), "it hangs"
    return results[0] if results else None


def test_after_an_interrupt_in_a_forward_pass_actions_go_on_at_once(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    expected, rt = logits(model), model.elastic
    with pytest.raises(KeyboardInterrupt):
        interrupt(model, KeyboardInterrupt)
    assert rt.release(1).status == "applied"
    with pytest.raises(KeyboardInterrupt):
        interrupt(model, KeyboardInterrupt)
    assert in_thread(lambda: rt.restore(1)).status == "applied", "another thread's"
    assert torch.equal(logits(model), expected)
    with pytest.raises(KeyboardInterrupt):
        interrupt(model, KeyboardInterrupt)
    rt.check()
    elastic.unwrap(model)
    assert torch.equal(logits(model), expected)


def test_an_interrupted_pass_of_one_root_is_no_part_of_the_next_ones(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    with pytest.raises(KeyboardInterrupt):
        interrupt(model, KeyboardInterrupt)
    with torch.no_grad():
        model.model(**prompt())  # another root, whose key the interrupted pass had not as its outermost
    assert in_thread(lambda: model.elastic.release(1)).status == "applied"


def test_a_thread_that_ended_inside_a_forward_pass_keeps_no_action(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    expected = logits(model)
    with pytest.raises(SystemExit):
        in_thread_raising(lambda: interrupt(model, SystemExit))
    assert in_thread(lambda: model.elastic.release(1)).status == "applied"
    assert torch.equal(logits(model), expected)


def test_an_interrupt_while_a_pass_waits_for_a_commit_leaves_the_gate_as_it_was() -> None:
    said = in_fork("""
        import signal, threading, time
        from elastic.hooks.forward_gate import ForwardGate
        signal.signal(signal.SIGINT, signal.default_int_handler)
        gate, committing, go_on = ForwardGate(), threading.Event(), threading.Event()
        def commit():
            with gate.exclusive():
                committing.set()
                go_on.wait()
        def interrupt():
            while not gate._queue:
                time.sleep(0.001)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        writer = threading.Thread(target=commit)
        writer.start()
        committing.wait()
        threading.Thread(target=interrupt).start()
        try:
            gate.enter(1)
        except KeyboardInterrupt:
            print(gate.inside, len(gate._queue), len(gate._readers))
        go_on.set()
        writer.join()
        print(gate.enter(1), len(gate._readers), gate.leave(1), len(gate._readers))
        with gate.exclusive():
            print("commits")
    """)
    assert said.splitlines() == ["False 0 0", "True 1 True 0", "commits"]


def test_a_pass_is_not_taken_for_over_while_it_runs() -> None:
    """A commit looks again and again, and waits for a pass that is in no hook for long."""
    gate, entered, go_on, order = ForwardGate(), threading.Event(), threading.Event(), []
    looked = threading.Event()
    gate.LOOK_S = 0.001  # type: ignore[misc]
    forget = gate._forget_died

    def look() -> None:
        forget()
        looked.set()

    gate._forget_died = look  # type: ignore[method-assign]

    def forward() -> None:
        import sys

        gate.enter(1, sys._getframe())
        entered.set()
        assert go_on.wait(WAIT_S)
        order.append("forward")
        gate.leave(1)

    def commit() -> None:
        with gate.exclusive():
            order.append("commit")

    threads = [threading.Thread(target=work, daemon=True) for work in (forward, commit)]
    threads[0].start()
    assert entered.wait(WAIT_S)
    threads[1].start()
    assert looked.wait(WAIT_S)
    go_on.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert order == ["forward", "commit"]


def test_an_interrupt_while_a_layer_is_streamed_spoils_no_later_pass(
    wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrapped(build("llama-gqa"))
    expected, shown = logits(model), weight_layout.ParameterLayout.show
    model.elastic.release([0, 1])

    def fail(*_: Any) -> Any:
        monkeypatch.setattr(weight_layout.ParameterLayout, "show", shown)
        raise KeyboardInterrupt

    monkeypatch.setattr(weight_layout.ParameterLayout, "show", fail)
    with pytest.raises(KeyboardInterrupt):
        logits(model)
    for _ in range(2):
        assert torch.equal(logits(model), expected)


def test_a_cancelled_action_is_not_done_and_those_behind_it_are(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    rt, holding, go_on = model.elastic, threading.Event(), threading.Event()

    def hold() -> None:
        holding.set()
        assert go_on.wait(WAIT_S)

    held = rt._executor.call(hold)
    assert holding.wait(WAIT_S)
    cancelled, behind = rt.release(0, wait=False), rt.release(1, wait=False)
    assert cancelled.cancel()
    go_on.set()
    held.result(WAIT_S)
    assert [change.status for change in behind.result(WAIT_S)] == ["applied"]
    assert [form == "absent" for form in rt.form()] == [False, True, False]
    assert not rt.busy

    async def awaited() -> Any:
        return await asyncio.wrap_future(rt.restore(wait=False))

    assert [change.status for change in asyncio.run(awaited())] == ["applied"]


def test_a_call_that_comes_behind_unwrap_is_refused(wrapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped(build("llama-gqa"))
    rt, submit = model.elastic, model.elastic._executor.submit

    def late(*args: Any) -> Any:
        elastic.unwrap(model)
        return submit(*args)

    monkeypatch.setattr(rt._executor, "submit", late)
    with pytest.raises(StateError, match="unwrapped"):
        in_thread_raising(lambda: rt.release(0))


def in_thread_raising(work: Callable[[], Any]) -> None:
    """Raise what a thread raises, which must not hang."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    in_thread(run)
    if errors:
        raise errors[0]


def test_an_interrupted_wrap_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    model, threads = build("llama-gqa"), threading.enumerate()
    expected, start = logits(model), Runtime.start

    def interrupted(self: Any, **options: Any) -> None:
        start(self, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Runtime, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        elastic.wrap(model, policy="balanced", variants=["int8"])
    left = {thread.name for thread in threading.enumerate() if thread not in threads}
    assert not left & {"elastic-runtime", "elastic-controller"}
    assert torch.equal(logits(model), expected)


def test_one_thread_wraps_or_unwraps_a_model_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, errors = build("llama-gqa"), []
    expected, install = logits(model), installation.install

    def both(*args: Any) -> None:
        with pytest.raises(StateError, match="another thread"):
            in_thread_raising(lambda: elastic.wrap(model))
        errors.append("wrap")
        install(*args)

    monkeypatch.setattr(installation, "install", both)
    elastic.wrap(model)
    taking_off = installation.Installation.take_off

    def off(self: Any) -> None:
        with pytest.raises(StateError, match="another thread"):
            in_thread_raising(lambda: elastic.unwrap(model))
        errors.append("unwrap")
        taking_off(self)

    monkeypatch.setattr(installation.Installation, "take_off", off)
    elastic.unwrap(model)
    assert errors == ["wrap", "unwrap"]
    assert torch.equal(logits(model), expected)


def test_a_pass_that_waits_while_the_model_is_unwrapped_goes_on_with_a_plain_model(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    gate, waits, expected, results = model.elastic.gate, threading.Event(), logits(model), []
    thread = threading.Thread(target=lambda: results.append(logits(model)), daemon=True)

    def have_it_wait() -> None:
        thread.start()
        while not gate._queue:
            waits.wait(0.001)

    gate.before_commits.append(have_it_wait)
    elastic.unwrap(model)
    thread.join(WAIT_S)
    assert torch.equal(results[0], expected)


def test_a_cache_that_became_stock_while_a_thread_waited_for_it_is_reordered(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    with torch.no_grad():
        cache = model(**prompt(), use_cache=True).past_key_values
    layer, begun = cache.layers[0], threading.Event()
    expected = layer.keys.clone()

    def crop() -> None:
        begun.set()
        layer.crop(-1)

    with layer.lock:
        thread = threading.Thread(target=crop, daemon=True)
        thread.start()
        assert begun.wait(WAIT_S)
        elastic.unwrap(model)
    thread.join(WAIT_S)
    assert torch.equal(layer.keys, expected[:, :, :-1])


@pytest.mark.parametrize("form", ["absent", "int8"])
def test_weights_that_have_no_address_are_not_shared(wrapped: Any, form: str) -> None:
    model = wrapped(build("llama-gqa"), variants=["int8"])
    model.elastic.release(1) if form == "absent" else model.elastic.swap(1, "int8")
    weight = layers(model)[1].mlp.up_proj.weight
    with pytest.raises(StateError, match="no address"):
        weight.share_memory_()
