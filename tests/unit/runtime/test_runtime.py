"""Actions: all or nothing, between two forward passes, recorded; and what a caller may do from where."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TextStreamer

import elastic
from elastic import CapacityError, ConfigError, ResizeKV, StateError
from elastic.actions.transactions import transaction
from elastic.hooks import forward_gate
from elastic.memory.backends import streams
from support.architectures import build, prompt
from support.child_process import in_child, in_fork, wait_for_the_janitor

MIB = 1 << 20


def test_a_resize_is_recorded_with_its_price(wrapped: Any) -> None:
    rt = wrapped(build("llama-gqa")).elastic
    result = rt.kv.resize("8MiB")
    assert (result.status, result.limit_bytes, rt.kv.capacity_bytes) == ("applied", 8 * MIB, 8 * MIB)
    (event,) = rt.events()
    assert event.action == ResizeKV("cpu", 8 * MIB)
    assert (event.ok, event.outcome, event.why) == (True, "applied", "by hand")
    assert min(event.prepare_ms, event.wait_ms, event.pause_ms) >= 0
    assert rt.status().events == 1


def test_the_pause_of_an_action_counts_what_is_told_before_it_commits(
    wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rt, late_s = wrapped(build("llama-gqa")).elastic, [0.0]
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + late_s[0], monotonic=time.monotonic)
    for module in (forward_gate, transaction):  # what waits by the clock elsewhere does not see it
        monkeypatch.setattr(module, "time", clock)
    rt.gate.before_commits.append(lambda: late_s.__setitem__(0, 3600.0))
    rt.kv.resize("8MiB")
    (event,) = rt.events()
    assert event.pause_ms >= 3600e3 > event.wait_ms


def test_a_dry_run_says_what_would_happen_and_does_nothing(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    rt = model.elastic
    model.generate(**prompt(), max_new_tokens=4, pad_token_id=0)
    wait_for_the_janitor()
    before = rt.status()
    idle = before.kv[0].idle_bytes
    assert idle
    (step,) = rt.plan(ResizeKV("cpu", 0), dry_run=True)
    assert rt.status() == before
    assert not rt.events()
    result = rt.kv.resize(0)
    assert (step.status, step.released_pages * 4096) == (result.status, result.released_bytes)
    assert (step.moved_bytes, step.transient_pages) == (0, 0)
    rt.plan([ResizeKV("cpu", MIB)], dry_run=False)
    assert rt.kv.limit_bytes == MIB
    (step,) = rt.plan(ResizeKV("cpu", 2 * MIB))
    assert step.pause_ms == rt.events()[-1].pause_ms


def test_what_cannot_be_done_changes_nothing_and_is_recorded(wrapped: Any) -> None:
    rt = wrapped(build("llama-gqa")).elastic
    with pytest.raises(CapacityError, match="above the maximum") as error:
        rt.kv.resize("64MiB")
    assert error.value.total_bytes == rt.kv.maximum_bytes
    with pytest.raises(ConfigError, match="kv size='plenty'"):
        rt.kv.resize("plenty")
    with pytest.raises(ConfigError, match=r"'cuda:7' has no KV cache.*cpu"):
        rt.kv.resize("1MiB", place="cuda:7")
    assert rt.kv.limit_bytes == rt.kv.maximum_bytes
    assert [event.ok for event in rt.events()] == [False, False]


def test_actions_of_one_call_happen_all_or_none(wrapped: Any) -> None:
    rt = wrapped(build("llama-gqa")).elastic
    before = rt.status().kv[0].limit_bytes
    pool = rt.kv.memory.pools[0]
    commit = pool.resize
    calls: list[int | None] = []

    def second_fails(limit: int | None, revision: int | None = None) -> Any:
        calls.append(limit)
        if len(calls) == 2:
            raise CapacityError("injected", requested_bytes=0, free_bytes=0, total_bytes=0)
        return commit(limit, revision)

    pool.resize = second_fails
    with pytest.raises(CapacityError, match="injected"):
        rt.apply([ResizeKV("cpu", MIB), ResizeKV("cpu", 2 * MIB)])
    assert calls == [MIB, 2 * MIB, None]  # the maximum, as before
    assert rt.status().kv[0].limit_bytes == before
    assert [e.ok for e in rt.events()] == [False, False]


def test_an_action_that_fails_behind_its_commit_is_recorded(wrapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rt = wrapped(build("llama-gqa")).elastic

    def fail(prepared: Any) -> None:
        raise StateError("the driver refuses")

    monkeypatch.setattr(rt._executor.runner.handlers[ResizeKV], "finish", fail)
    with pytest.raises(StateError, match="the driver refuses"):
        rt.kv.resize("1MiB")
    (event,) = rt.events()
    assert (event.ok, event.outcome, rt.kv.limit_bytes) == (False, "the driver refuses", 1 << 20)


def test_a_commit_is_done_once(wrapped: Any) -> None:
    rt = wrapped(build("llama-gqa")).elastic
    mechanism = rt._executor.runner.handlers[ResizeKV]
    prepared = mechanism.prepare(ResizeKV("cpu", MIB))
    mechanism.commit(prepared)
    mechanism.commit(prepared)
    assert rt.status().kv[0].revision == 1
    mechanism.rollback(prepared)
    assert rt.kv.limit_bytes == rt.kv.maximum_bytes


def test_an_exhausted_budget_in_mid_generation_leaves_the_model_usable(wrapped: Any) -> None:
    model = build("llama-gqa")
    expected = model.generate(**prompt(3), max_new_tokens=40, do_sample=False, pad_token_id=0)
    place = elastic.Place("cpu", torch.device("cpu"), 400_000, page_bytes=4096)
    wrapped(model, places=place, kv_layout="token_major")
    with pytest.raises(CapacityError, match="limit") as error:
        model.generate(**prompt(3), max_new_tokens=450, do_sample=False, pad_token_id=0)
    assert error.value.requested_bytes > error.value.free_bytes
    del error
    assert torch.equal(model.generate(**prompt(3), max_new_tokens=40, do_sample=False, pad_token_id=0), expected)


def test_a_failed_forward_leaves_the_cache_as_it_was(wrapped: Any) -> None:
    model = build("llama-gqa")
    wrapped(model)
    cache = elastic.ElasticCache(model)
    model(**prompt(), past_key_values=cache)
    kept = [layer.keys.clone() for layer in cache.layers]
    expected = model.lm_head.forward

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no head")

    model.lm_head.forward = broken
    with pytest.raises(RuntimeError, match="no head"):
        model(torch.tensor([[5]]), past_key_values=cache)
    model.lm_head.forward = expected
    assert not model.elastic.gate.inside
    assert [layer.get_seq_length() for layer in cache.layers] == [24] * 3
    assert all(torch.equal(layer.keys, before) for layer, before in zip(cache.layers, kept, strict=True))
    model(torch.tensor([[5]]), past_key_values=cache)
    assert cache.get_seq_length() == 25


def test_a_streamer_may_resize_and_wait(wrapped: Any, assets: Any) -> None:
    model, tokenizer = assets
    ids = tokenizer("import os\n", return_tensors="pt")
    expected = model.generate(**ids, max_new_tokens=30, do_sample=False)
    wrapped(model)
    rt = model.elastic

    class Resizer(TextStreamer):
        turn = 0

        def put(self, value: torch.Tensor) -> None:
            Resizer.turn += 1
            rt.kv.resize(rt.kv.maximum_bytes if Resizer.turn % 2 else 0)

        def end(self) -> None: ...

    out = model.generate(**ids, max_new_tokens=30, do_sample=False, streamer=Resizer(tokenizer))
    assert torch.equal(out, expected)
    outcomes = [event.outcome for event in rt.events() if event.why == "by hand"]
    assert set(outcomes) == {"applied", "deferred"}
    assert len(outcomes) == Resizer.turn


def test_inside_a_forward_an_action_is_asked_for_and_not_awaited(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    rt, asked = model.elastic, []

    def inside(module: Any, args: Any) -> None:
        with pytest.raises(StateError, match="wait=False"):
            rt.kv.resize("1MiB")
        with pytest.raises(StateError, match="inside one of its forward"):
            elastic.unwrap(model)
        asked.append(rt.kv.resize("1MiB", wait=False))

    handle = model.model.norm.register_forward_pre_hook(inside)
    model(**prompt())
    handle.remove()
    future: Future[Any] = asked[0]
    assert future.result(timeout=60)[0].limit_bytes == MIB


def test_after_unwrap_the_runtime_says_so(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    rt = model.elastic
    elastic.unwrap(model)
    for call in (rt.check, lambda: rt.kv.resize("1MiB"), lambda: rt.plan(ResizeKV("cpu", 1))):
        with pytest.raises(StateError, match="unwrapped"):
            call()
    rt.close()
    assert rt.status().kv[0].limit_bytes == 0


def test_status_is_frozen(wrapped: Any) -> None:
    status = wrapped(build("llama-gqa")).elastic.status()
    with pytest.raises(AttributeError):
        status.layers = 3


def test_two_threads_generate_with_one_model(wrapped: Any) -> None:
    model = build("llama-gqa")
    prompts = [prompt(1 + i % 2, 20 + i)["input_ids"] for i in range(4)]
    expected = [model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0) for ids in prompts]
    wrapped(model)
    got: list[torch.Tensor | None] = [None] * 4

    def work(i: int) -> None:
        got[i] = model.generate(prompts[i], max_new_tokens=20, do_sample=False, pad_token_id=0)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True) if a is not None)
    assert None not in got


WRAP = """
    import os, sys, torch
    sys.path.insert(0, {tests!r})
    from support.architectures import build, prompt
    import elastic
    torch.set_num_threads(1)
    model = build("llama-gqa")
    expected = model(**prompt()).logits
    elastic.wrap(model, places="cpu=64MiB")
    cache = model(**prompt()).past_key_values
"""


def child(code: str) -> str:
    return in_fork(WRAP.format(tests=str(Path(__file__).parents[2])) + code)


@pytest.mark.slow
def test_the_interpreter_exits_with_a_wrapped_model() -> None:
    assert child("    print('bye')").strip() == "bye"


@pytest.mark.slow
def test_a_thread_that_python_waits_for_at_its_end_generates_to_the_end() -> None:
    out = in_child(
        WRAP.format(tests=str(Path(__file__).parents[2]))
        + """
    import threading
    model.elastic.release([0])
    def generate():
        threading.main_thread().join()  # its end is when executors take no more
        print(model.generate(**prompt(), max_new_tokens=4, do_sample=False).shape[1] - prompt()["input_ids"].shape[1])
    threading.Thread(target=generate).start()
    """
    )
    assert out.strip() == "4"


@pytest.mark.slow
def test_a_daemon_thread_that_generates_ends_before_the_interpreter() -> None:
    """It would abort it from inside torch. A handler that is older than ours is called after it, and waits."""
    out = in_fork(
        "import atexit\natexit.register(lambda: (thread.join(60), print('ended:', not thread.is_alive())))\n"
        + dedent(WRAP.format(tests=str(Path(__file__).parents[2])))
        + dedent("""
    import threading
    begun = threading.Event()
    def generate():
        while True:
            model.generate(**prompt(), max_new_tokens=4, pad_token_id=0)
            begun.set()
    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    begun.wait()
    atexit.register(lambda: print(model.generate(**prompt(), max_new_tokens=4, pad_token_id=0).shape[0]))
    """)
    )
    assert out.split("\n")[-2:] == ["ended: True", ""]


@pytest.mark.slow
def test_a_forked_child_cannot_touch_the_parents_pages() -> None:
    out = child("""
    pid = os.fork()
    if not pid:
        try:
            model(**prompt())
        except elastic.StateError as error:
            print("child:", "forked" in str(error), flush=True)
        try:
            model.elastic.kv.resize(0)
        except elastic.StateError as error:
            print("child:", "forked" in str(error), flush=True)
        try:
            elastic.unwrap(model)
        except elastic.StateError as error:
            print("child:", "load and wrap it again in the child" in str(error), flush=True)
        os._exit(0)
    print("parent:", os.waitpid(pid, 0)[1], flush=True)
    model.elastic.check()
    print("parent:", torch.equal(model(**prompt()).logits, expected), cache.get_seq_length(), flush=True)
    model.elastic.release([0, 1])
    print("parent:", torch.equal(model(**prompt()).logits, expected), flush=True)
    elastic.unwrap(model)
    """)
    assert out.split("\n")[:-1] == ["child: True"] * 3 + ["parent: 0", "parent: True 24", "parent: True"]


@pytest.mark.slow
def test_a_pickled_model_is_a_plain_model() -> None:
    out = child("""
    import pickle
    model.elastic.release(0)
    print(torch.equal(pickle.loads(pickle.dumps(model))(**prompt()).logits, expected))
    """)
    assert out.strip() == "True"


RECEIVER = """
    import os, sys
    import torch.multiprocessing as mp
    sys.path.insert(0, {tests!r})
    from support.spawn_target import compare
    ours, theirs = mp.Pipe()
    answers = mp.SimpleQueue()
    if not os.fork():
        compare(*theirs.recv(), answers)
        os._exit(0)
"""
SENT = """
    print("child:", *answers.get())
    try:
        model(**prompt())
    except elastic.StateError as error:
        print("parent:", "unwrap(model) and wrap it again" in str(error))
    elastic.unwrap(model)
    elastic.wrap(model, places="cpu=64MiB")
    print("parent:", torch.equal(model(**prompt()).logits, expected))
    elastic.unwrap(model)
"""
COMPARED = ["child: True True True", "parent: True", "parent: True"]


@pytest.mark.slow
def test_another_process_gets_a_plain_model_and_the_parent_is_told_what_that_did() -> None:
    """torch moves the storages that it sends into shared memory: out of the pages."""
    code = "model.elastic.release(0); ours.send((model, prompt(), expected))"
    tests = str(Path(__file__).parents[2])
    out = in_fork(f"{dedent(RECEIVER + WRAP).format(tests=tests)}\n{code}\n{dedent(SENT)}")
    assert out.split("\n")[:-1] == COMPARED


@pytest.mark.long
def test_a_spawned_child_gets_one_too() -> None:
    out = child(
        """
    import torch.multiprocessing as mp
    from support.spawn_target import compare
    model.elastic.release(0)
    context = mp.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=compare, args=(model, prompt(), expected, answers))
    process.start()
    """
        + SENT
    )
    assert out.split("\n")[:-1] == COMPARED


@pytest.mark.slow
def test_the_interpreter_exits_while_the_memory_of_a_dropped_model_is_given_back() -> None:
    out = child("""
    elastic.wrap(build("llama-gqa"), places="cpu#dropped=64MiB")
    from elastic.memory import places
    from elastic.memory.pages import background as janitor
    import atexit, gc
    gc.collect()
    atexit.unregister(janitor.janitor.finish)
    atexit.register(lambda: print("given back:", "cpu#dropped" not in places._open))
    atexit.register(janitor.janitor.finish)
    """)
    assert out.strip() == "given back: True"


@pytest.mark.slow
def test_the_interpreter_exits_while_layers_are_released_and_streamed() -> None:
    out = child("""
    import threading
    model.elastic.release([0, 1, 2])
    work = lambda: model.generate(**prompt(), max_new_tokens=10**4, pad_token_id=0)
    threading.Thread(target=work, daemon=True).start()
    view = model.model.layers[0].mlp.up_proj.weight.detach()
    model(**prompt())
    print("bye")
    """)
    assert out.strip() == "bye"


def test_a_thread_that_captures_a_graph_is_refused_actions(wrapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rt = wrapped(build("llama-gqa")).elastic
    with monkeypatch.context() as patched:
        patched.setattr(streams, "capturing", lambda: True)
        for action in (lambda: rt.release([0]), lambda: rt.kv.resize("max"), lambda: rt.release([0], wait=False)):
            with pytest.raises(StateError, match="captures a CUDA graph"):
                action()
    assert rt.release([0]).status == "applied"


def test_a_policy_that_hangs_is_left_behind_when_its_model_is_unwrapped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inside, go, decided = threading.Event(), threading.Event(), threading.Event()

    class Hangs:
        def decide(self, snapshot: Any, state: Any) -> elastic.Plan:
            inside.set()
            go.wait(60)
            decided.set()
            return elastic.Plan((elastic.Swap((0,), "int8"),), "too late")

    model = build("llama-gqa")
    before = [parameter.dtype for parameter in model.parameters()]
    rt = elastic.wrap(model, places=["cpu=64MiB"], variants=["int8"], policy=Hangs()).elastic
    assert rt.controller is not None
    monkeypatch.setattr(rt.controller, "stop", partial(rt.controller.stop, 0.1))
    inside.wait()
    with caplog.at_level(logging.WARNING, "elastic.controller.loop"):
        elastic.unwrap(model)
    assert "left behind; its sensors or Hangs hang" in caplog.text
    thread = rt.controller._thread
    assert thread is not None
    go.set()
    decided.wait()
    thread.join(30)
    assert not thread.is_alive()
    assert [parameter.dtype for parameter in model.parameters()] == before
    assert rt.health().faults == ()
