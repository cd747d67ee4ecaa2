"""`wrap(policy="scale")`: what is measured, what a snapshot says of places, and the policy beside that of a mode."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as t

import elastic
from elastic import ConfigError, Scale
from elastic.controller.loop import Controller
from elastic.controller.policies.arbiter import Arbiter
from elastic.controller.policies.scaling import ScalingPolicy
from elastic.controller.snapshot import MemoryStats, PlaceReading, RequestStats, Snapshot
from elastic.planning.assumed_speeds import assume
from elastic.planning.measured_cost import Calibration, LinearLatency, MeasuredCostModel
from elastic.planning.placement import ResourceDemand
from elastic.runtime import layer_benchmark
from elastic.runtime.layer_benchmark import measure
from elastic.weights.decoder import find_decoder
from support.architectures import CONFIGS, build, prompt
from support.wrapped_model import bits, small, tight

PLACES = [small(64 << 20, "cpu#a"), small(64 << 20, "cpu#b")]


def test_layers_that_hand_each_other_keys_and_values_are_not_measured() -> None:
    """It is not known which rows these have: the layers have no replicas."""
    with pytest.raises(ConfigError, match=r"not computed at several places: .* shared_kv_states, a \w+Dict"):
        measure(find_decoder(build("gemma4")), PLACES, rows=(2,))


@pytest.mark.parametrize("architecture", sorted(CONFIGS.keys() - {"gemma4"}))
def test_a_layer_of_any_architecture_can_be_measured(architecture: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(layer_benchmark, "REPEATS", 1)
    model = build(architecture)
    before, hooks = bits(model), sum(len(m._forward_pre_hooks) for m in model.modules())
    found = measure(find_decoder(model), PLACES, rows=(2,))
    assert set(found.layers) == {"cpu#a", "cpu#b"}
    assert found.layers["cpu#a"](2) > 0
    assert found.link("cpu#b", "cpu#a")(100) > 0
    assert found.layer("cpu#b", 2)(2) > 0
    assert [len(lines) for lines in found.beside.values()] == [1]
    assert found.handing_s > 0
    assert all(torch.equal(before[name], now) for name, now in bits(model).items())
    assert sum(len(m._forward_pre_hooks) for m in model.modules()) == hooks


def test_what_is_assumed() -> None:
    places = [elastic.Place.parse(text) for text in ("cuda:0#a", "cuda:0#b", "cuda:1")]
    found = assume(places, 10**9, 5 * 10**8)
    near, far = found.link("cuda:0#a", "cuda:0#b"), found.link("cuda:1", "cuda:0#a")
    assert near(10**6) < far(10**6)
    assert found.layer("cuda:0#a", 2)(1) == 2 * found.layer("cuda:0#a", 1)(1)
    assert found.layer("cuda:0#a", 3)(1) == pytest.approx(3 * found.layer("cuda:0#a", 1)(1))  # they take turns


def test_a_snapshot_says_where_layers_are(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, PLACES, policy="scale", controller=False).elastic
    assert isinstance(rt.controller.policy, ScalingPolicy)
    seen = rt.snapshot()
    assert seen.residencies == (("cpu#a",),) * 3
    assert [place.name for place in seen.places] == ["cpu#a", "cpu#b"]
    assert seen.places[1].free_bytes == seen.places[1].total_bytes
    rt.migrate(1, "cpu#b")
    rt.migrate("model.layers.2.mlp", "cpu#b")
    seen = rt.snapshot()
    assert seen.residencies == (("cpu#a",), ("cpu#b",), ("cpu#a",))
    assert [event.id for event in seen.events] == [0, 1, 2]  # weights, their KV cache, a module
    plan = rt.controller.tick()
    assert plan.actions == ()
    assert rt.health().faults == ()
    model(**prompt(2))


def test_several_policies_are_under_one_arbiter(wrapped: Any) -> None:
    model = build("llama-gqa")
    policy = (elastic.Policy.named("balanced"), Scale(tick_s=0.05))
    rt = wrapped(model, PLACES, policy=policy, variants=("int4",), controller=False).elastic
    assert isinstance(rt.controller.policy, Arbiter)
    assert rt.controller.tick_s == 0.05
    assert rt.controller.tick().actions == ()
    assert rt.health().faults == ()


@pytest.mark.parametrize("policy", [("balanced", "manual"), (), ("balanced", "scale"), "scales"])
def test_policies_that_cannot_be(policy: Any) -> None:
    """The third for want of variants."""
    with pytest.raises(ConfigError, match="policy="):
        elastic.wrap(build("llama-gqa"), places=PLACES, policy=policy)


@pytest.mark.parametrize(
    "fields", [{"t_up": 2.0}, {"delta": 0}, {"dwell_s": -1}, {"tick_s": 0}, {"margin": 0.9}, {"kv_high": "x"}]
)
def test_settings_that_cannot_be(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        Scale(**fields)


EAGER = Scale(pressure_ticks=1, vacancy_ticks=1, cooldown_s=0.0, dwell_s=0.0, t_up=0.0, least_gain=0.0)


def until_done(rt: Any) -> None:
    deadline = time.monotonic() + 30
    while rt.busy:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_layers_leave_a_place_whose_kv_cache_is_full(wrapped: Any) -> None:
    model = build("llama-gqa")
    expected = model(**prompt(2)).logits
    page = 4096
    here = tight(model, 60)
    places = [elastic.Place("cpu#a", here.device, here.budget_bytes, page), small(64 << 20, "cpu#b")]
    rt = wrapped(model, places, policy=replace(EAGER, kv_high=0.5), controller=False).elastic
    before = rt.snapshot().places[0].kv_capacity_bytes
    caches = []
    while rt.snapshot().places[0].kv_used_bytes < 0.55 * before:
        caches.append(t.DynamicCache(config=model.config))
        model(**prompt(1, 8), past_key_values=caches[-1])
    plan = rt.controller.tick()
    assert isinstance(plan.actions[0], elastic.Migrate), plan
    until_done(rt)
    assert rt.events()[-1].ok
    assert rt.events()[-1].why.startswith("the KV cache of cpu#a is nearly full: migration")
    after = rt.snapshot()
    assert ("cpu#b",) in after.residencies
    assert after.places[0].kv_capacity_bytes > before
    assert torch.equal(model(**prompt(2)).logits, expected)


def test_what_cannot_be_done_is_a_fault_and_not_repeated_at_once() -> None:
    class Refuses:
        def apply(self, actions: Any, why: str) -> Any:
            future: Future[Any] = Future()
            future.set_exception(elastic.StateError("not under this engine"))
            asked.append(actions[0])
            return future

    asked: list[Any] = []
    clock = iter(range(1000))
    policy = ScalingPolicy(
        replace(EAGER, dwell_s=5.0), [ResourceDemand(100)] * 3, lambda rows: MeasuredCostModel(known, rows, 1, 1)
    )
    known = Calibration({"a": LinearLatency(1.0, 1.0), "b": LinearLatency(1.0, 1.0)})
    places = (PlaceReading("a", 1000, 700), PlaceReading("b", 1000, 1000))

    def sense() -> Snapshot:
        traffic = RequestStats(running=8, arrived=9)
        forms, here = ("float32",) * 3, (("a",),) * 3
        return Snapshot(next(clock), traffic, MemoryStats(0, 1, 1), forms, residencies=here, places=places)

    controller = Controller(sense, policy, Refuses().apply)
    for _ in range(30):
        controller.tick()
    assert {type(action) for action in asked} == {elastic.Replicate}
    assert len(asked) < 8
    assert controller.health().faults[-1].text == "StateError: not under this engine"
