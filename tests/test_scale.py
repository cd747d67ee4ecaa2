"""`wrap(policy="scale")`: what is measured, what a snapshot says of places, and the policy beside that of a mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import CONFIGS, build, prompt
from helpers import bits, small

import elastic
from elastic import ConfigError, Scale, calibration
from elastic.calibration import assume, measure
from elastic.controller.arbiter import Arbiter
from elastic.controller.scale import ScalePolicy
from elastic.hooks.structure import find_decoder

PLACES = [small(64 << 20, "cpu#a"), small(64 << 20, "cpu#b")]


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_layer_of_any_architecture_can_be_measured(architecture: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(calibration, "REPEATS", 1)
    model = build(architecture)
    before, hooks = bits(model), sum(len(m._forward_pre_hooks) for m in model.modules())
    found = measure(find_decoder(model), PLACES, rows=(2,))
    assert set(found.layers) == {"cpu#a", "cpu#b"}
    assert found.layers["cpu#a"](2) > 0
    assert found.link("cpu#b", "cpu#a")(100) > 0
    assert found.beside >= 1
    assert all(torch.equal(before[name], now) for name, now in bits(model).items())
    assert sum(len(m._forward_pre_hooks) for m in model.modules()) == hooks


def test_what_is_assumed() -> None:
    places = [elastic.Place.parse(text) for text in ("cuda:0#a", "cuda:0#b", "cuda:1")]
    found = assume(places, 10**9, 5 * 10**8)
    near, far = found.link("cuda:0#a", "cuda:0#b"), found.link("cuda:1", "cuda:0#a")
    assert near(10**6) < far(10**6)
    assert found.beside == 2.0
    assert assume(places[1:], 10**9, 5 * 10**8).beside == 1.0


def test_a_snapshot_says_where_layers_are(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, PLACES, policy="scale", controller=False).elastic
    assert isinstance(rt.controller.policy, ScalePolicy)
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
