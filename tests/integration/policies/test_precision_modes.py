"""`wrap` with a policy: a controller swaps layers under the load of plain forwards, and goes away with the model."""

from __future__ import annotations

import gc
import textwrap
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t

import elastic
from elastic import SLO, CapacityError, ConfigError, Policy, Restore, StateError, Swap
from elastic.controller.decision import Plan
from elastic.weights.layer import WeightUnit
from support.architectures import build, prompt
from support.child_process import in_fork, wait_for_the_janitor
from support.nvml_agreement import require_agreement
from support.wrapped_model import small, tight

EAGER = Policy(
    pressure_ticks=1, recovery_ticks=1, cooldown_s=0.0, dwell_s=0.0, ema_alpha=1.0, idle_s=0.001, tick_s=0.005
)


def by_hand(wrapped: Any, model: Any, **options: Any) -> Any:
    return wrapped(model, **{"policy": EAGER, "variants": ("int4",), "controller": False, **options}).elastic


def fill(rt: Any, model: Any, share: float) -> list[t.DynamicCache]:
    """Caches that take about this share of the KV capacity."""
    caches = []
    while rt.kv.used_bytes < share * rt.kv.capacity_bytes:
        caches.append(t.DynamicCache(config=model.config))
        model(**prompt(1, 8), past_key_values=caches[-1])
    return caches


def settle(rt: Any) -> None:
    deadline = time.monotonic() + 30
    while rt.busy:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_layers_leave_under_pressure_and_return_after_it(wrapped: Any) -> None:
    model = build("llama-gqa")
    place = tight(model, 240, variants=("int4",))
    rt = by_hand(wrapped, model, places=place, order="last_first", policy=replace(EAGER, dwell_s=99.0))
    assert rt.controller.tick().reason == "all is well"
    before = rt.snapshot()
    assert before.layers == ("float32",) * 3
    caches = fill(rt, model, 0.86)
    plan = rt.controller.tick()
    assert plan.actions == (Swap((2, 1), "int4"),)
    settle(rt)
    after = rt.snapshot()
    assert after.layers == ("float32", "int4", "int4")
    assert after.kv.capacity_bytes > before.kv.capacity_bytes
    assert rt.events()[-1].why.startswith("the KV cache is nearly full (KV ")
    del caches
    gc.collect()
    wait_for_the_janitor()
    rt.controller.tick()
    time.sleep(0.01)
    plan = rt.controller.tick()
    assert plan.actions == (Restore((1, 2)),)
    assert plan.reason == "no requests"
    settle(rt)
    rt.controller.tick()
    assert rt.snapshot().layers == before.layers
    assert rt.snapshot().kv == before.kv
    health = rt.health()
    assert (health.running, health.actions, health.faults) == (False, 2, ())
    rt.check()


def test_the_thread_does_the_same(wrapped: Any) -> None:
    model = build("llama-gqa")
    place = tight(model, 240, variants=("int4",))
    rt = wrapped(model, places=place, policy=EAGER, variants=("int4",), slo=SLO(ttft_s=5)).elastic
    assert rt.health().running
    assert rt.slo == SLO(ttft_s=5)
    deadline = time.monotonic() + 60
    while {type(event.action) for event in rt.events() if event.ok} != {Swap, Restore}:
        caches = fill(rt, model, 0.9)
        time.sleep(0.05)
        del caches
        gc.collect()
        time.sleep(0.05)
        assert time.monotonic() < deadline
    settle(rt)
    elastic.unwrap(model)
    assert not rt.health().running


def test_a_policy_of_ones_own(wrapped: Any) -> None:
    class Mine:
        tick_s = 0.003

        def decide(self, snapshot: Any, state: Any) -> Plan:
            return Plan(() if state else (elastic.Release((1,)),), "because", True)

    model = build("llama-gqa")
    rt = wrapped(model, policy=Mine(), controller=False).elastic
    assert rt.controller.tick_s == 0.003
    rt.controller.tick()
    settle(rt)
    assert rt.controller.tick().actions == ()
    assert rt.snapshot().layers == ("float32", "absent", "float32")
    assert rt.events()[-1].why == "because"


def test_an_action_that_cannot_be_done_is_a_fault_and_the_model_serves_on(wrapped: Any) -> None:
    class Wrong:
        def decide(self, snapshot: Any, state: Any) -> Plan:
            return Plan(() if state else (Swap((77,), "int9"),), "wrong", True)

    model = build("llama-gqa")
    rt = wrapped(model, policy=Wrong(), controller=False).elastic
    rt.controller.tick()
    settle(rt)
    rt.controller.tick()
    (fault,) = rt.health().faults
    assert fault.text.startswith("ConfigError: layer 77")
    model(**prompt(1))


def test_memory_for_streaming_is_the_caches_until_a_layer_is_released(wrapped: Any) -> None:
    model = build("llama-gqa")
    options: dict[str, Any] = {"variants": ["int8"], "policy": "balanced", "controller": False}
    expected = model.generate(**prompt(2), max_new_tokens=5, do_sample=False)
    rt = wrapped(model, tight(model, 40, **options), **options).elastic
    before = rt.kv.maximum_bytes
    assert "staging" in rt.status().places[0].owners, "the reserve for swaps"
    released = rt.release([0]).released_bytes
    assert rt.kv.maximum_bytes == before + released
    assert torch.equal(model.generate(**prompt(2), max_new_tokens=5, do_sample=False), expected)
    rt.release([1, 2])
    rt.restore()
    assert rt.kv.maximum_bytes == before
    rt.kv.resize(0)
    assert rt.kv.maximum_bytes == before


def test_by_hand_the_cache_begins_smaller_by_what_status_shows_as_kept_back_for_a_release(wrapped: Any) -> None:
    found = {}
    for policy in ("manual", "balanced"):
        model = build("llama-gqa")
        rt = wrapped(model, small(8 << 20), variants=["int8"], policy=policy, controller=False).elastic
        found[policy] = rt.kv.maximum_bytes, rt.status().places[0].owners["staging"]
        layer = rt.status().places[0].owners["layer:0"]
        elastic.unwrap(model)
    stage = found["manual"][1] - found["balanced"][1]
    assert stage == layer > 0
    assert found["balanced"][0] - found["manual"][0] == stage


def test_a_release_that_fails_gives_the_stage_back_to_the_cache(wrapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama-gqa")
    options: dict[str, Any] = {"variants": ["int8"], "policy": "balanced", "controller": False}
    rt = wrapped(model, tight(model, 40, **options), **options).elastic
    before, owners = rt.kv.maximum_bytes, rt.status().places[0].owners

    def fail(*_: Any) -> Any:
        raise CapacityError("no host memory", requested_bytes=1, free_bytes=0, total_bytes=0)

    for method in ("keep", "hide"):  # while it prepares, and in its commit
        with monkeypatch.context() as patch:
            patch.setattr(WeightUnit, method, fail)
            with pytest.raises(CapacityError, match="no host memory"):
                rt.release([1])
        rt.check()
        assert rt.kv.maximum_bytes == before
        assert rt.status().places[0].owners == owners
    cache = model(torch.ones(1, 300, dtype=torch.long)).past_key_values
    with pytest.raises(CapacityError, match=r"no room for the prefetch buffer.*lower the KV limit"):
        rt.release([1])
    del cache
    assert rt.release([1]).status == "applied"


def test_manual_has_no_controller(wrapped: Any) -> None:
    threads = threading.active_count()
    rt = wrapped(build("llama-gqa"), slo=SLO(ttft_s=1)).elastic
    assert rt.controller is None
    assert not rt.health().running
    assert rt.snapshot().kv.use == 0.0
    assert threading.active_count() <= threads + 2  # its worker, and the janitor


def test_a_tick_does_not_wait_for_a_commit(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = by_hand(wrapped, model, places=tight(model, 240, variants=("int4",)))
    caches = fill(rt, model, 0.86)
    inside, go = threading.Event(), threading.Event()

    def wait(*args: Any) -> None:
        inside.set()
        go.wait(30)

    handle = model.model.layers[0].register_forward_hook(wait)
    forward = threading.Thread(target=model, kwargs={**prompt(1), "use_cache": False})
    forward.start()
    inside.wait(30)
    assert rt.controller.tick().actions
    assert rt.snapshot().busy
    assert rt.controller.tick().reason == "an action is under way"
    go.set()
    forward.join()
    handle.remove()
    settle(rt)
    assert rt.snapshot().layers[:2] == ("int4", "int4")
    del caches


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "fast"}, "policy='fast' is not known; use one of 'manual', 'accuracy', 'balanced', 'performance'"),
        ({"policy": 3}, "policy=3"),
        ({"policy": "nowhere.toml"}, "cannot be read"),
        ({"policy": "balanced", "variants": ()}, "needs variants"),
        ({"policy": Policy(levels=("int3",))}, "'int3'"),
        (
            {"policy": Policy(levels=("int4", "int8")), "variants": ("int8", "int4")},
            r"levels=\('int4', 'int8'\) go from fine to coarse; 'int8' has .* bytes, 'int4' before it",
        ),
        ({"order": "sideways"}, "order='sideways'"),
        ({"order": "nowhere.json"}, "nowhere.json"),
    ],
)
def test_what_cannot_be_is_refused_and_the_model_is_as_it_was(options: dict[str, Any], message: str) -> None:
    model = build("llama-gqa")
    with pytest.raises(ConfigError, match=message):
        elastic.wrap(model, **{"variants": ("int4",), **options})
    assert not hasattr(model, "elastic")
    assert not model._forward_pre_hooks


def test_a_policy_may_be_a_file(wrapped: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("max_layers = 1\n")
    for path in (file, str(file)):
        model = build("llama-gqa")
        rt = wrapped(model, policy=path, variants=("int8", "int4"), controller=False).elastic
        assert [(step.layer, step.after) for step in rt.controller.policy._path] == [(0, "int8"), (0, "int4")]
        elastic.unwrap(model)


def test_a_snapshot_of_an_unwrapped_model_is_refused_and_its_controller_ends(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, policy="balanced", variants=("int4",)).elastic
    elastic.unwrap(model)
    assert not rt.health().running
    assert rt.controller.tick() is None
    assert rt.health().faults == ()
    with pytest.raises(StateError, match="unwrapped"):
        rt.snapshot()


def test_a_dropped_model_ends_its_controller() -> None:
    """Without the garbage collector: neither the thread nor a fault keeps anything of the model alive."""

    class Fails:
        def decide(self, snapshot: Any, state: Any) -> Plan:
            raise RuntimeError("always")

    gc.collect()
    gc.disable()
    try:
        model = build("llama-gqa")
        weight = weakref.ref(model.model.embed_tokens.weight)
        elastic.wrap(model, places=["cpu=64MiB"], policy=Fails())
        rt = model.elastic
        rt.controller.tick()
        thread = rt.controller._thread
        del model
        gc.enable()
        gc.collect()  # a model is a cycle by itself
        gc.disable()
        thread.join(30)
        assert not thread.is_alive()
        assert weight() is None
        assert rt.health().faults[0].text == "RuntimeError: always"
        wait_for_the_janitor()
    finally:
        gc.enable()


@pytest.mark.cuda
def test_nvml_agrees_with_the_ledger_and_bounds_the_capacity(wrapped: Any) -> None:
    model = build("llama-gqa").to("cuda:0")
    rt = by_hand(wrapped, model, places=[elastic.Place("cuda:0", torch.device("cuda:0"), 1 << 30)])
    model(**{name: tensor.to("cuda:0") for name, tensor in prompt(1).items()})
    snapshot, (place,) = rt.snapshot(), rt.status().places
    require_agreement(snapshot.devices[0], sum(place.owners.values()) + place.idle_bytes + place.parked_bytes)
    assert snapshot.kv.created_bytes is not None
    assert snapshot.kv.used_bytes <= snapshot.kv.created_bytes <= snapshot.kv.capacity_bytes
    rt.controller.tick()
    assert rt.health().faults == ()


CHILD = """
    import gc, sys, threading, time
    import torch
    sys.path[:0] = {paths!r}
    from support.architectures import build, prompt
    import elastic
    torch.set_num_threads(1)
    FAST = elastic.Policy(tick_s=0.0001, pressure_ticks=1, recovery_ticks=1, cooldown_s=0.0, dwell_s=0.0, idle_s=0.001)
    def wrapped(**options):
        model = build("llama-gqa")
        options = {{"policy": FAST, "variants": ("int4",), "places": ["cpu=64MiB"], **options}}
        return elastic.wrap(model, **options)
"""


def child(code: str) -> str:
    paths = [str(Path(__file__).parents[2])]
    return in_fork(textwrap.dedent(CHILD).format(paths=paths) + textwrap.dedent(code)).strip()


def test_unwrap_while_it_ticks_and_acts() -> None:
    out = child("""
        class Restless:
            tick_s = 1e-6
            def decide(self, snapshot, state):
                action = elastic.Restore((0,)) if snapshot.layers[0] != "float32" else elastic.Swap((0,), "int4")
                return Plan(() if snapshot.busy else (action,), "restless")
        from elastic.controller.decision import Plan
        for i in range(8):
            model = wrapped(policy=Restless())
            rt = model.elastic
            stop = threading.Event()
            def generate():
                while not stop.is_set():
                    model(**prompt(1))
            user = threading.Thread(target=generate)
            user.start()
            time.sleep(0.05)
            rt.check()
            elastic.unwrap(model)
            stop.set()
            user.join()
            assert not rt.health().running and not rt.health().faults, rt.health()
        print("done")
    """)
    assert out == "done"


def test_the_interpreter_ends_while_a_wrapped_model_is_controlled() -> None:
    out = child("""
        model = wrapped()
        for _ in range(3):
            model(**prompt(1))
        print(model.elastic.health().running)
    """)
    assert out == "True"


def test_a_forked_child_has_no_controller() -> None:
    out = child("""
        import os, warnings
        warnings.simplefilter("ignore")
        model = wrapped()
        pid = os.fork()
        if not pid:
            rt, refused = model.elastic, 0
            for work in (rt.snapshot, rt.controller.tick, rt.controller.start):
                try:
                    work()
                except elastic.StateError:
                    refused += 1
            os._exit(0 if refused == 3 and not rt.health().running else 1)
        print(os.waitpid(pid, 0)[1], model.elastic.health().running)
        elastic.unwrap(model)
    """)
    assert out == "0 True"
