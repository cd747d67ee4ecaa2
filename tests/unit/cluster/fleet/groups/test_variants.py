"""Layers that are in a variant return to their full weights before ranks share or drop them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic import Swap
from elastic.cluster.control.messages import Apply
from elastic.cluster.fleet.fleet import Fleet
from elastic.engines.base import Request
from elastic.types import Change, Restore
from support import architectures
from support.cluster.fake_group import LAYERS, GroupRank
from support.cluster.fake_rank import FakeLauncher
from support.lossless_variant import HALF, exact
from support.serving.generations import continuation, prompts, serve
from support.wrapped_model import small


def test_they_are_restored_first_and_a_dry_run_says_so(wrapped: Any) -> None:
    options: dict[str, Any] = {"variants": [HALF], "shards": 2, "policy": "manual"}
    models = [wrapped(exact(architectures.build("qwen3")), small(6 << 20, f"cpu#{i}"), **options) for i in range(2)]
    prompt = prompts([20], architectures.VOCAB)[0]
    expected = continuation(exact(architectures.build("qwen3")), prompt, 8)
    with Fleet.of(*models, engine={"block_tokens": 8, "max_batch_tokens": 64}, beat_timeout_s=60) as fleet:
        plain = fleet.reshard(["r0", "r1"], tp=2, dry_run=True)
        assert plain.restored == {}
        fleet.apply("r0", Swap((1, 2), "half"))
        assert models[0].elastic.form()[1:] == ("half", "half")
        planned = {"reshard": fleet.reshard(["r0", "r1"], tp=2, dry_run=True), "drop": fleet.drop(1, dry_run=True)}
        for done in planned.values():
            assert done.restored == {"r0": (1, 2)}
        price = planned["reshard"].price
        assert price is not None
        assert plain.price is not None
        assert price.wire_bytes > plain.price.wire_bytes
        shared = fleet.reshard(["r0", "r1"], tp=2)
        assert (shared.status, shared.restored, shared.freed_bytes) == ("applied", {"r0": (1, 2)}, plain.freed_bytes)
        assert "half" not in models[0].elastic.form()
        heard = serve(fleet, [request := Request(prompt, 8)])
        assert heard.tokens[request.id] == expected
        assert fleet.restore().status == "applied"
        fleet.apply("r1", Swap((0,), "half"))
        dropped = fleet.drop(layers={"r0": [2], "r1": [0]})
        assert (dropped.status, dropped.restored) == ("applied", {"r1": (0,)})
        assert fleet.restore().status == "applied"
        fleet.check()


def test_layers_that_cannot_be_dropped_either_way_stay_in_their_variant(wrapped: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    options: dict[str, Any] = {"variants": [HALF], "shards": 2, "policy": "manual"}
    models = [
        wrapped(
            peft.get_peft_model(architectures.build("llama-gqa"), config).eval().requires_grad_(False),
            small(6 << 20, f"cpu#{i}"),
            **options,
        )
        for i in range(2)
    ]
    with Fleet.of(*models, engine={"block_tokens": 8, "max_batch_tokens": 64}, beat_timeout_s=60) as fleet:
        fleet.apply("r0", Swap((1, 2), "half"))
        for dry_run in (True, False):
            done = fleet.drop(layers={"r0": [1, 2], "r1": []}, dry_run=dry_run)
            assert (done.status, done.restored) == ("deferred", {})
            assert "rank 'r0' cannot drop its weights" in done.why
            assert "merge adapters" in done.why
        assert models[0].elastic.form()[1:] == ("half", "half")


@pytest.mark.parametrize("comes", [True, False])
def test_nothing_changes_where_live_requests_keep_their_pages(comes: bool) -> None:
    world: dict[str, GroupRank] = {}
    launcher: Any = FakeLauncher(lambda spec: GroupRank(spec.name, world, 4, 4))
    fleet = Fleet("no model", ranks=2, launch=launcher, beat_timeout_s=1e6, hang_timeout_s=1e6, replace=False)
    fleet.start()
    fleet._policies.stop()
    r0, asked = world["r0"], []
    room, apply = r0.on_measure_room, r0.on_apply
    swapped = {3: 1}

    def restore(question: Apply) -> Any:
        if question.actions != (Restore((3,)),):
            return apply(question)
        asked.append(question)
        if comes:
            swapped.clear()
        return (Change("deferred", (), (3,), 0, 0, 0),)

    r0.on_measure_room = lambda question: replace(room(question), in_variant=dict(swapped))  # type: ignore[method-assign]
    r0.on_apply = restore  # type: ignore[method-assign]
    done = fleet.reshard(["r0", "r1"], tp=2, timeout_s=0.2)
    assert len(asked) == 1
    if comes:
        assert (done.status, done.restored) == ("applied", {"r0": (3,)})
        assert len(r0.resident) == 2 * LAYERS
    else:
        assert (done.status, done.restored) == ("deferred", {})
        assert "layers (3,) of rank 'r0' wait for pages" in done.why
        assert fleet.groups() == ()
    fleet.stop(drain=False)
