"""What a runtime is asked: the same is refused whatever asks it, in words, and nothing changes by it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from elastic import ConfigError, Drop, Fetch, Migrate, Release, ResizeKV, Restore, Swap
from support.architectures import build

REFUSED = {
    "swap to None": (Swap((1,), None), "variant=None"),  # type: ignore[arg-type]
    "swap to a list": (Swap((1,), ["int4"]), "variant="),  # type: ignore[arg-type]
    "a layer twice": (Swap((1, 1), "int4"), r"layers \[1\] twice"),
    "a layer in two actions": ([Swap((1,), "int4"), Release((1,))], r"layers \[1\] twice"),
    "no layers": (Release(None), "layer None is no decoder layer"),  # type: ignore[arg-type]
    "half a layer": (Migrate((1.5,), "cpu"), "layer 1.5 is no decoder layer"),  # type: ignore[arg-type]
    "True": (Release((True,)), "layer True is no decoder layer"),
    "a limit below zero": (ResizeKV("cpu", -5), "limit_bytes=-5"),
    "half a byte": (ResizeKV("cpu", 1e6), "limit_bytes=1000000.0"),  # type: ignore[arg-type]
    "no number": (ResizeKV("cpu", math.nan), "limit_bytes=nan"),  # type: ignore[arg-type]
    "a limit of True": (ResizeKV("cpu", True), "limit_bytes=True"),
    "text": (ResizeKV("cpu", "4MiB"), "limit_bytes='4MiB'"),  # type: ignore[arg-type]
    "a revision of NaN": (ResizeKV("cpu", 0, math.nan), "revision=nan"),  # type: ignore[arg-type]
    "a revision in text": (ResizeKV("cpu", 0, "x"), "revision='x'"),  # type: ignore[arg-type]
    "no action": ([None], "None"),
}


@pytest.fixture
def rt(wrapped: Any) -> Any:
    return wrapped(build("llama-gqa"), variants=("int4",)).elastic


def state(rt: Any) -> tuple[Any, ...]:
    """Return what actions change; pages that nobody has are created beside them, at any time."""
    status = rt.status()
    return [replace(place, parked_bytes=0) for place in status.places], status.kv, status.residencies


@pytest.mark.parametrize("case", REFUSED)
def test_plan_apply_and_prepare_refuse_the_same(case: str, rt: Any) -> None:
    actions, words = REFUSED[case]
    before = state(rt)
    for call in (rt.plan, rt.apply, rt.prepare):
        with pytest.raises(ConfigError, match=words):
            call(actions)
    assert state(rt) == before
    assert not rt.held


@pytest.mark.parametrize("layers", [1, -2, "model.layers.1", ["model.layers.1"], torch.tensor(1), torch.tensor([1])])
def test_one_layer_can_be_named_in_any_way(layers: Any, rt: Any) -> None:
    assert rt.plan(Swap(layers, "int4"))[0].action == Swap((1,), "int4")
    assert rt.apply(Release(layers))[0].layers == (1,)
    assert rt.restore(layers).layers == rt.swap(layers, "int4").layers == rt.apply([Restore(layers)])[0].layers == (1,)


@pytest.mark.parametrize("layers", [5.0, math.nan, slice(1, 3), [[1]], torch.tensor(1.0)])
@pytest.mark.parametrize("verb", ["release", "restore", "swap", "digests"])
def test_what_names_no_layer_is_refused_in_words(verb: str, layers: Any, rt: Any) -> None:
    more = ("int4",) if verb == "swap" else ()
    with pytest.raises(ConfigError, match="is no decoder layer of this model; use 0 to 2 or a name"):
        getattr(rt, verb)(layers, *more)


@pytest.mark.parametrize(
    "call",
    [
        lambda rt: rt.swap([1], None),
        lambda rt: rt.swap([1], ["int4"]),
        lambda rt: rt.release(None),
        lambda rt: rt.prepare(Release((1,)), id=3),
        lambda rt: rt.prepare(Release((1,)), timeout_s="5"),
        lambda rt: rt.prepare(Release((1,)), timeout_s=math.nan),
        lambda rt: rt.kv.resize("1MiB", revision="x"),
        lambda rt: rt.kv.resize("1MiB", wait="no"),
        lambda rt: rt.release(0, wait=0),
        lambda rt: rt.plan(Release((0,)), dry_run="no"),
        lambda rt: rt.migrate(0, "cpu", kv="no"),
        lambda rt: rt.digests(shards=5),
        lambda rt: rt.digests(0, shards=[1]),
        lambda rt: rt.weights_source(shards=5),
        lambda rt: rt.drop(shards=5),
        lambda rt: rt.restore(shards=5),
        lambda rt: rt.fetch(0, None),
        lambda rt: rt.fetch(0, ["x"]),
        lambda rt: rt.fetch(0, "x"),
        lambda rt: rt.migrate(0, ["cpu"]),
        lambda rt: rt.migrate_kv(0, ["cpu"]),
        lambda rt: rt.replicate(0, ["cpu"]),
        lambda rt: rt.evict(0, ["cpu"]),
        lambda rt: rt.apply(ResizeKV(cast(Any, ["cpu"]), 1 << 20)),
        lambda rt: rt.apply(Swap((0,), "int4", cast(Any, 5))),
        lambda rt: rt.apply(Swap((0,), "int4", cast(Any, "mlp"))),
        lambda rt: rt.apply(Restore((0,), parts=cast(Any, (5,)))),
        lambda rt: rt.apply(Drop((0,), shards=cast(Any, 5))),
        lambda rt: rt.apply(Drop((0,), after_restore=cast(Any, "no"))),
        lambda rt: rt.apply(Fetch((0,), cast(Any, None))),
        lambda rt: rt.commit(["x"]),
        lambda rt: rt.rollback({}),
    ],
)
def test_arguments_of_another_type_are_refused_in_words(call: Callable[[Any], Any], rt: Any) -> None:
    rt.swap([1], "int4")
    with pytest.raises(ConfigError):
        call(rt)
    assert rt.form() == ("float32", "int4", "float32")


def test_lists_in_actions_are_tuples_from_then_on(rt: Any) -> None:
    """What is deferred, or prepared again, is told from others by its fields."""
    (step,) = rt.plan(Swap(cast(Any, [1]), "int4", cast(Any, ["mlp"])))
    assert step.action == Swap((1,), "int4", ("mlp",))
    assert hash(step.action)
