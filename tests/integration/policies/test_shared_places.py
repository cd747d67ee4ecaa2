"""Two wrapped models in a group, ticked by hand: they lend each other places, guests leave, and return."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t

import elastic
from elastic import Evict, Replicate, Scale
from elastic.planning.measured_cost import Calibration, LinearLatency
from support.architectures import build, prompt
from support.child_process import in_fork, wait_for_the_janitor
from support.wrapped_model import PAGE, assert_same_bits, bits, small

EAGER = Scale(
    pressure_ticks=1, vacancy_ticks=1, cooldown_s=0.0, dwell_s=0.0, t_up=0.0, least_gain=0.0, margin=0.02, group="pair"
)
NAMES = ("cpu#a", "cpu#b")
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def known_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured: what is decided is the same on every machine."""
    known = Calibration(dict.fromkeys(NAMES, LinearLatency(1.0, 1.0)), {NAMES: LinearLatency(0.01, 0.0)})
    monkeypatch.setattr(sys.modules["elastic.wrap"], "measure", lambda *_: known)


def owned(model: Any) -> int:
    """Bytes that a wrapped model takes before it has a KV cache."""
    elastic.wrap(model, places=small(64 << 20, "cpu#probe"))
    place = model.elastic.status().places[0]
    elastic.unwrap(model)
    return sum(place.owners.values())


class Pair:
    """Two models, each at home in one of two places that have room for the layers of both and some KV pages."""

    def __init__(self, first: str, second: str, kv_pages: int, **options: Any) -> None:
        self.models = [build(first), build(second)]
        self.bits = [bits(model) for model in self.models]
        self.expected = [model.generate(**prompt(3), **GREEDY) for model in self.models]
        total = sum(map(owned, self.models)) + kv_pages * PAGE
        places = [small(total, name) for name in NAMES]
        for model, here in zip(self.models, (places, places[::-1]), strict=True):
            elastic.wrap(model, places=here, **{"policy": EAGER, "controller": False, **options})
        self.caches: list[list[t.DynamicCache]] = [[], []]

    @property
    def runtimes(self) -> list[Any]:
        return [model.elastic for model in self.models]

    def tick(self, which: int) -> Any:
        rt = self.runtimes[which]
        plan = rt.controller.tick()
        assert plan is not None, rt.health().faults
        deadline = time.monotonic() + 60
        while rt.busy:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        for each in self.runtimes:
            each.check()
        return plan

    def ask(self, which: int, requests: int = 1, tokens: int = 8) -> None:
        """More requests, that stay."""
        for _ in range(requests):
            cache = t.DynamicCache(config=self.models[which].config)
            self.models[which](**prompt(1, tokens), past_key_values=cache)
            self.caches[which].append(cache)

    def end(self, which: int, left: int = 0) -> None:
        del self.caches[which][left:]
        gc.collect()
        wait_for_the_janitor()

    def guests(self, which: int) -> list[int]:
        """Layers that a model has at the place of the other."""
        residencies = self.runtimes[which].snapshot().residencies
        return [layer for layer, places in enumerate(residencies) if len(places) > 1]

    def same_tokens(self) -> None:
        for model, tokens in zip(self.models, self.expected, strict=True):
            assert torch.equal(model.generate(**prompt(3), **GREEDY), tokens)

    def close(self) -> None:
        self.caches.clear()
        for model, before in zip(self.models, self.bits, strict=True):
            if getattr(model, "elastic", None) is not None:
                elastic.unwrap(model)
            assert_same_bits(model, before)
            assert not hasattr(model, "elastic")


@pytest.fixture
def pairs() -> Iterator[Any]:
    made: list[Pair] = []

    def make(*args: Any, **options: Any) -> Pair:
        made.append(Pair(*args, **options))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


def lend(pair: Pair) -> None:
    """Some load on both, and time to look: each has all its layers at the other's place."""
    for which in (0, 1):
        pair.ask(which, 8)
    for _ in range(6):
        for which in (0, 1):
            pair.tick(which)


def test_models_lend_each_other_places_and_guests_leave_first(pairs: Any) -> None:
    pair = pairs("llama-gqa", "gpt2", kv_pages=300)
    lend(pair)
    layers = [rt.status().layers for rt in pair.runtimes]
    assert [pair.guests(0), pair.guests(1)] == [list(range(n)) for n in layers]
    pair.same_tokens()

    while True:  # load comes to the first model
        kv = pair.runtimes[0].snapshot().places[0]
        if kv.kv_used_bytes >= EAGER.kv_high * kv.kv_capacity_bytes:
            break
        pair.ask(0, tokens=40)
    plan = pair.tick(0)
    assert plan.actions == ()
    assert plan.reason == "the KV cache of cpu#a is nearly full: guests leave first"
    before = pair.runtimes[0].kv.capacity_bytes
    plan = pair.tick(1)
    assert {type(action) for action in plan.actions} == {Evict}
    assert pair.runtimes[1].events()[-1].ok
    assert pair.runtimes[1].events()[-1].why.startswith("another model of the group needs the room")
    assert pair.runtimes[0].kv.capacity_bytes > before
    assert len(pair.guests(1)) < layers[1]
    pair.same_tokens()

    pair.end(0, left=8)  # it ends: they return
    for _ in range(4):
        pair.tick(0)
        pair.tick(1)
    assert pair.guests(1) == list(range(layers[1]))
    assert not any(isinstance(event.action, elastic.Migrate | elastic.Release) for event in pair.runtimes[0].events())
    pair.same_tokens()


def test_a_decision_is_one_whole_plan(pairs: Any) -> None:
    """Layers at their places and their KV cache, in one commit."""
    pair = pairs("llama-gqa", "llama-gqa", kv_pages=500)
    pair.ask(0, 8)
    for _ in range(3):
        pair.tick(0)
    (event,) = pair.runtimes[0].events()
    assert event.action == Replicate((0, 1, 2), "cpu#b")


def test_a_model_that_was_unwrapped_is_no_member_any_more(pairs: Any) -> None:
    pair = pairs("llama-gqa", "llama-gqa", kv_pages=500)
    lend(pair)
    group, names = pair.runtimes[0].controller.policy.group, [rt.controller.policy.name for rt in pair.runtimes]
    assert sorted(group.states) == names
    elastic.unwrap(pair.models[1])
    assert sorted(group.states) == names[:1]
    rt = pair.models[0].elastic
    assert rt.controller.tick() is not None
    rt.check()


def test_a_model_that_died_is_no_member_any_more(pairs: Any) -> None:
    pair = pairs("llama-gqa", "llama-gqa", kv_pages=500)
    lend(pair)
    group, name = pair.runtimes[0].controller.policy.group, pair.runtimes[0].controller.policy.name
    pair.caches[1].clear()
    del pair.models[1], pair.bits[1], pair.expected[1]
    gc.collect()
    wait_for_the_janitor()
    assert sorted(group.states) == [name]
    assert pair.tick(0) is not None


def test_a_fault_in_one_runtime_does_not_stop_the_others(pairs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pairs("llama-gqa", "llama-gqa", kv_pages=500)
    lend(pair)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no sensor")

    monkeypatch.setattr(pair.runtimes[1].monitor, "read", broken)
    assert pair.runtimes[1].controller.tick() is None
    assert pair.runtimes[1].health().faults[-1].text == "RuntimeError: no sensor"
    assert pair.tick(0) is not None
    assert pair.runtimes[0].health().faults == ()


def test_groups_and_policies(wrapped: Any) -> None:
    places = [small(64 << 20, name) for name in NAMES]
    two = (EAGER, replace(EAGER, group="other"))
    with pytest.raises(elastic.ConfigError, match="groups"):
        wrapped(build("llama-gqa"), places, policy=two)
    with pytest.raises(elastic.ConfigError, match="group"):
        Scale(group=7)  # type: ignore[arg-type]
    both = wrapped(build("llama-gqa"), places, policy=("balanced", EAGER), variants=("int8",), controller=False).elastic
    assert type(both.controller.policy.policy).__name__ == "Arbiter"
    assert both.controller.tick() is not None


CHILD = """
import sys, time
sys.path[:0] = {paths!r}
import torch, transformers as t
from support.architectures import build, prompt
from support.wrapped_model import small
import elastic
from elastic.planning.measured_cost import Calibration, LinearLatency

torch.set_num_threads(1)
torch.set_grad_enabled(False)
options = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
known = Calibration(dict.fromkeys(("cpu#a", "cpu#b"), LinearLatency(1.0, 1.0)))
sys.modules["elastic.wrap"].measure = lambda *_: known
models = [build("llama-gqa"), build("llama-gqa")]
expected = [model.generate(**prompt(3), **options) for model in models]
places = [small(16 << 20, "cpu#a"), small(16 << 20, "cpu#b")]
policy = elastic.Scale(tick_s=0.01, pressure_ticks=1, vacancy_ticks=1, cooldown_s=0.0, dwell_s=0.0, t_up=0.0, group="x")
for model, here in zip(models, (places, places[::-1])):
    elastic.wrap(model, places=here, policy=policy)
caches = [(model, t.DynamicCache(config=model.config)) for model in models for _ in range(8)]
for model, cache in caches:
    model(**prompt(1, 8), past_key_values=cache)
deadline = time.monotonic() + 60
while not all(model.elastic.replicated for model in models):
    assert time.monotonic() < deadline, [model.elastic.health() for model in models]
    for model, tokens in zip(models, expected):
        assert torch.equal(model.generate(**prompt(3), **options), tokens)
elastic.unwrap(models[1])
models[0].elastic.check()
assert models[0].elastic.health().faults == ()
assert models[0].elastic.health().running
assert torch.equal(models[0].generate(**prompt(3), **options), expected[0])
elastic.unwrap(models[0])
print("lent")
"""


def test_on_threads_of_their_own() -> None:
    """Both controllers at once, with generations, until both lend; then one is unwrapped in the middle of it."""
    paths = [str(Path(__file__).parents[2]), *sys.path]
    assert in_fork(CHILD.format(paths=paths)) == "lent\n"
