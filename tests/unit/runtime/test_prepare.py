"""Actions that are prepared in one call and committed in another: `Runtime.prepare`, `commit`, `rollback`."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import elastic
from elastic import CapacityError, ConfigError, Migrate, Release, ResizeKV, Restore, StateError, Swap
from elastic.actions.release import ReleaseHandler
from elastic.actions.transactions.held import MOST_HELD
from elastic.types import HOST
from support.architectures import build, prompt
from support.child_process import wait_for_the_janitor
from support.processes import wait_until
from support.wrapped_model import PAGE, assert_same_bits, bits, small, tight

OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


def test_what_is_prepared_changes_nothing_until_its_commit(wrapped: Any) -> None:
    model = build("llama-gqa")
    expected = model.generate(**prompt(), **OPTIONS)
    rt = wrapped(model, small(4 << 20), variants=["int4"]).elastic
    form, capacity = rt.form(), rt.kv.capacity_bytes
    told = rt.prepare([Swap((1,), "int4"), Release((0,))], id="both")
    assert (told.id, len(told.steps), rt.held) == ("both", 2, (told,))
    assert told.moved_bytes > 0
    assert rt.kv.capacity_bytes <= capacity - told.pages * PAGE < capacity
    assert rt.form() == form
    assert torch.equal(model.generate(**prompt(), **OPTIONS), expected)
    assert not rt.events()
    results = rt.commit("both")
    assert [result.layers for result in results] == [(1,), (0,)]
    assert rt.form()[:2] == ("absent", "int4")
    assert rt.held == ()
    assert [(event.ok, event.why) for event in rt.events()] == [(True, "prepared")] * 2
    assert rt.commit("both") == results
    assert len(rt.events()) == 2
    with pytest.raises(StateError, match="'both' was committed; undo it by the opposite"):
        rt.rollback("both")
    with pytest.raises(StateError, match="'both' was committed; prepare again under another id"):
        rt.prepare([Release((0,))], id="both")


def test_a_rollback_gives_everything_back(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, small(4 << 20), variants=["int4"]).elastic
    before, places = bits(model), rt.status().places
    told = rt.prepare(Swap((0, 1, 2), "int4"))
    assert rt.status().places != places
    rt.rollback(told.id)
    rt.rollback(told.id)
    assert rt.kv.capacity_bytes == rt.kv.maximum_bytes
    assert rt.form() == ("float32",) * 3
    assert_same_bits(model, before)
    with pytest.raises(StateError, match=r"was rolled back [(]it was asked for"):
        rt.commit(told.id)
    assert [event.outcome for event in rt.events()] == ["rolled back: it was asked for"]


def test_what_nobody_commits_is_rolled_back_by_itself(wrapped: Any) -> None:
    rt = wrapped(build("llama-gqa"), small(4 << 20), variants=["int4"]).elastic
    told = rt.prepare(Swap((0,), "int4"), timeout_s=0.05)
    wait_until(lambda: bool(rt.events()), "nothing else was asked of the runtime")
    with pytest.raises(StateError, match="nobody committed it in time"):
        rt.commit(told.id)
    assert rt.held == ()
    assert rt.swap(0, "int4").status == "applied"


def test_listeners_hear_of_a_job_when_it_is_none_any_more(wrapped: Any) -> None:
    rt, working = wrapped(build("llama-gqa"), small(4 << 20), variants=["int4"]).elastic, list[bool]()
    rt.job_listeners.append(lambda: working.append(rt.working))
    rt.swap(0, "int4")
    assert working == [False], "before whoever asked for it goes on"


def test_a_listener_that_fails_takes_no_result_from_who_waits_for_it(wrapped: Any) -> None:
    rt = wrapped(build("llama-gqa"), small(4 << 20), variants=["int4"]).elastic
    rt.job_listeners.append(lambda: 1 / 0)
    assert rt.swap(0, "int4").status == "applied"
    assert rt.swap(1, "int4").status == "applied"


def test_held_layers_are_nobody_elses(wrapped: Any) -> None:
    rt = wrapped(build("llama-gqa"), small(4 << 20), variants=["int4"]).elastic
    rt.prepare([Swap((0,), "int4"), ResizeKV("cpu", 1 << 20)], id="mine")
    for action, words in ((Release((0, 1)), "layer 0"), (ResizeKV("cpu", 1 << 19), "the KV limit of cpu")):
        with pytest.raises(StateError, match=rf"{words}: held by .* 'mine' for at most .*rollback\('mine'\) first"):
            rt.apply([action])
        with pytest.raises(StateError, match="'mine'"):
            rt.prepare(action)
    assert rt.release(1).layers == (1,)
    rt.commit("mine")
    assert rt.form() == ("int4", "absent", "float32")
    assert rt.kv.limit_bytes == 1 << 20
    assert rt.release(0).layers == (0,)


def test_a_failed_preparation_holds_nothing(wrapped: Any) -> None:
    rt = wrapped(build("llama-gqa"), small(4 << 20), variants=["int4"]).elastic
    wait_for_the_janitor()  # pages of the staging reserve are created ahead
    places = rt.status().places
    with pytest.raises(ConfigError, match="int5"):
        rt.prepare([Swap((0,), "int4"), Swap((1,), "int5")], id="a")
    with pytest.raises(ConfigError, match="id='a' is no transaction"):
        rt.commit("a")
    assert rt.status().places == places
    for actions, options, words in (
        ([], {}, "nothing to prepare"),
        ([Release((0,))], {"timeout_s": 0}, "timeout_s=0 must be above 0"),
        ([Release((0,))], {"timeout_s": float("nan")}, "timeout_s=nan"),
        ([Release((0,))], {"id": ""}, "id='' must have"),
        ([Release((0,)), Swap((0,), "int4")], {}, "twice"),
    ):
        with pytest.raises(ConfigError, match=words):
            rt.prepare(actions, **options)
    assert rt.held == ()


def test_a_preparation_that_is_repeated_is_the_same(wrapped: Any) -> None:
    rt = wrapped(build("llama-gqa")).elastic
    told = rt.prepare(Release((0,)), id="once")
    assert rt.prepare(Release((0,)), id="once") == told
    with pytest.raises(ConfigError, match="'once' is held for other actions"):
        rt.prepare(Release((1,)), id="once")


def test_at_most_so_many_are_held(wrapped: Any) -> None:
    rt = wrapped(build("llama-gqa")).elastic
    for i in range(MOST_HELD):
        rt.prepare(Restore(()), id=f"t{i}")
    with pytest.raises(StateError, match=f"{MOST_HELD} transactions are held, such as 't0'"):
        rt.prepare(Restore(()))
    rt.rollback("t0")
    rt.prepare(Restore(()))


def test_layers_without_pages_are_refused_not_deferred(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, tight(model, 14), kv_layout="token_major").elastic
    rt.release([0, 1, 2])
    cache = model(**prompt(length=250)).past_key_values
    with pytest.raises(CapacityError, match=r"layers \[1, 2\] find no pages now, so that nothing was prepared"):
        rt.prepare(Restore((0, 1, 2)))
    assert rt.form() == ("absent",) * 3
    assert rt.kv.capacity_bytes == rt.kv.maximum_bytes
    model(torch.tensor([[5]]), past_key_values=cache)
    del cache
    gc.collect()
    wait_for_the_janitor()
    rt.commit(rt.prepare(Restore((0, 1, 2))).id)
    assert rt.form() == ("float32",) * 3


def test_a_layer_that_waits_for_pages_does_not_return_while_it_is_held(wrapped: Any) -> None:
    model = build("llama-gqa")
    expected = model(**prompt()).logits
    rt = wrapped(model, tight(model, 14, variants=["int4"]), kv_layout="token_major", variants=["int4"]).elastic
    rt.swap([0, 1, 2], "int4")
    cache = model(**prompt(length=250)).past_key_values
    waiting = rt.restore().deferred
    assert len(waiting) > 1
    rt.prepare(Release(waiting[:1]), id="held")
    del cache
    gc.collect()
    wait_for_the_janitor()
    rt.apply(())  # after the retry that the end of the cache asked for
    assert rt.form()[waiting[0]] == "int4"
    assert all(rt.form()[layer] == "float32" for layer in waiting[1:])
    rt.rollback("held")
    rt.apply(())
    assert rt.form() == ("float32",) * 3, "it goes on waiting when it is no longer held"
    assert torch.equal(model(**prompt()).logits, expected)


def test_a_buffer_waits_for_the_release_that_is_held(wrapped: Any) -> None:
    model = build("llama-gqa")
    expected = model(**prompt()).logits
    rt = wrapped(model).elastic
    for streamer in rt.weights.streamers.values():
        streamer.least = 0  # as under a policy
    rt.restore(rt.release([0, 1]).layers)
    assert not any(streamer.buffers for streamer in rt.weights.streamers.values())
    rt.prepare(Release((0,)), id="held")
    rt.release(1)
    rt.restore(1)
    assert [len(streamer.buffers) for streamer in rt.weights.streamers.values()] == [1]
    rt.commit("held")
    assert torch.equal(model(**prompt()).logits, expected)
    rt.restore(0)
    assert not any(streamer.buffers for streamer in rt.weights.streamers.values())


def test_weights_that_are_written_meanwhile_are_not_overwritten(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, small(4 << 20), variants=["int4"]).elastic
    rt.prepare(Swap((0,), "int4"), id="held")
    parameter = next(p for name, p in model.named_parameters() if "layers.0." in name and p.ndim == 2)
    with torch.no_grad():
        parameter.add_(1)
    written = parameter.clone()
    with pytest.raises(StateError, match="were written while they were on their way"):
        rt.commit("held")
    with pytest.raises(StateError, match="could not be committed"):
        rt.commit("held")
    assert torch.equal(parameter, written)
    assert rt.kv.capacity_bytes == rt.kv.maximum_bytes


def test_what_fails_behind_the_switch_is_not_told_as_rolled_back(wrapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rt = wrapped(build("llama-gqa"), small(4 << 20)).elastic
    rt.prepare(Release((0,)), id="held")
    finish = ReleaseHandler.finish

    def fail(handler: ReleaseHandler, prepared: Any) -> Any:
        finish(handler, prepared)
        raise RuntimeError("the driver refuses")

    monkeypatch.setattr(ReleaseHandler, "finish", fail)
    with pytest.raises(RuntimeError, match="the driver refuses"):
        rt.commit("held")
    assert rt.form()[0] == "absent"
    with pytest.raises(StateError, match="'held' was committed, but then failed: the driver refuses"):
        rt.commit("held")
    with pytest.raises(StateError, match="'held' was committed; undo it by the opposite"):
        rt.rollback("held")


def test_a_generation_goes_on_over_a_held_migration(wrapped: Any) -> None:
    model = build("llama-gqa")
    expected = model.generate(**prompt(), **OPTIONS)
    rt = wrapped(model, [small(4 << 20, "cpu#a"), small(4 << 20, "cpu#b")]).elastic
    cache = elastic.ElasticCache(model)
    tokens = prompt()["input_ids"]
    logits = model(tokens, past_key_values=cache).logits
    rt.prepare([Migrate((0, 1), "cpu#b"), elastic.MigrateKV((0, 1), "cpu#b")], id="held")
    while tokens.shape[1] < expected.shape[1]:
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
        if tokens.shape[1] == prompt()["input_ids"].shape[1] + 4:
            rt.commit("held")
        logits = model(tokens[:, -1:], past_key_values=cache).logits
    assert torch.equal(tokens, expected)
    assert [where[0].place for where in rt.status().residencies.values()] == ["cpu#b", "cpu#b", "cpu#a"]


def test_the_end_of_the_model_rolls_back_what_is_held() -> None:
    model = build("llama-gqa")
    before = bits(model)
    rt = elastic.wrap(model, places=small(4 << 20), variants=["int4"]).elastic
    rt.prepare(Swap((0, 1), "int4"))
    rt.prepare(Release((2,)))
    elastic.unwrap(model)
    assert rt.held == ()
    assert [event.outcome for event in rt.events()] == ["rolled back: the model was unwrapped"] * 2
    assert_same_bits(model, before)
    with pytest.raises(StateError, match="unwrapped"):
        rt.commit("any")


def test_nothing_is_awaited_inside_a_forward_pass(wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model).elastic
    errors = []

    def ask(*args: Any) -> None:
        for call in (lambda: rt.prepare(Release((0,))), lambda: rt.commit("x"), lambda: rt.rollback("x")):
            try:
                call()
            except StateError as error:
                errors.append(str(error))

    hook = model.model.norm.register_forward_hook(ask)
    model(**prompt())
    hook.remove()
    assert len(errors) == 3
    assert all("inside a forward pass" in error for error in errors)
    assert all(where[0].place != HOST for where in rt.status().residencies.values())
