"""The memory of a group goes where requests need it, also when a limit is lowered, and answers stay the same."""

from __future__ import annotations

import pytest

import elastic
from elastic.cluster.fleet.fleet import Fleet
from elastic.engines.base import Output, Request
from elastic.errors import Overloaded
from elastic.types import ResizeKV
from support import architectures
from support.processes import wait_until
from support.serving.generations import Collector, is_continuation, prompts, same_unless_close
from support.wrapped_model import small

pytestmark = pytest.mark.slow
ANSWERS, TOKENS, BUDGET = 40, 60, 384 << 10


def test_a_hot_instance_gets_what_its_idle_partner_does_not_use() -> None:
    models = [architectures.build("qwen3") for _ in range(2)]
    for number, model in enumerate(models):
        elastic.wrap(model, places=small(BUDGET, f"cpu#{number}"))
    layers = len(models[0].model.layers)
    heard: dict[int, list[int]] = {answer: [] for answer in range(ANSWERS)}

    def listen(output: Output) -> None:
        heard[output.index].extend(output.tokens)

    with Fleet.of(*models, engine={"block_tokens": 8, "max_batch_tokens": 64}, beat_timeout_s=60) as fleet:
        fleet.drop(layers={"r0": range(layers // 2, layers), "r1": range(layers // 2)})
        fair = dict(fleet.groups()[0].caps)
        (prompt,) = prompts([30], architectures.VOCAB)
        request = Request(prompt, TOKENS, n=ANSWERS)  # all answers of a request are one instance's
        fleet.submit(request, listen)
        wait_until(lambda: fleet.instance_of(request.id) is not None)
        hot = fleet.instance_of(request.id)
        wait_until(lambda: fleet.groups()[0].caps[hot] > fair[hot] or not fleet.instance_of(request.id))
        caps = fleet.groups()[0].caps
        assert caps[hot] > 0.6 * sum(caps.values()) > 0.6 * 0.9 * sum(fair.values())
        assert min(caps.values()) > 0
        wait_until(lambda: fleet.instance_of(request.id) is None)
        assert fleet.restore().status == "applied"
        fleet.check()
        assert fleet.status().totals.recomputed_tokens == 0
    assert is_continuation(architectures.build("qwen3"), prompt, TOKENS, heard[0])
    assert list(heard.values()) == [heard[0]] * ANSWERS
    for model in models:
        elastic.unwrap(model)


@pytest.mark.parametrize("shares", [True, False])
def test_engines_go_on_when_the_limits_of_their_ranks_are_lowered(shares: bool) -> None:
    """What ranks keep for each other's layers would have all of it, and no engine begin a step."""
    models = [architectures.build("qwen3") for _ in range(2)]
    for number, model in enumerate(models):
        elastic.wrap(model, places=small(BUDGET, f"cpu#{number}"), shards=2 if shares else 1)
    layers, heard = len(models[0].model.layers), Collector()
    requests = [Request(prompt, 30) for prompt in prompts([20] * 6, architectures.VOCAB)]
    with Fleet.of(*models, engine={"block_tokens": 8}, beat_timeout_s=60, hang_timeout_s=60) as fleet:
        if shares:
            fleet.reshard(["r0", "r1"], tp=2)
        else:
            fleet.drop(layers={"r0": range(layers // 2, layers), "r1": range(layers // 2)})
        before = dict(fleet.groups()[0].caps)
        for rank, model in zip(("r0", "r1"), models, strict=True):
            limit = model.elastic.kv.maximum_bytes * 3 // 10
            (resized,) = fleet.apply(rank, ResizeKV(model.elastic.pools[0].name, limit))
            assert resized.status in ("applied", "deferred")
        for request in requests:
            fleet.submit(request, heard)
        heard.wait([request.id for request in requests], 30)
        wait_until(lambda: all(cap < before[home] for home, cap in fleet.groups()[0].caps.items()))  # at a tick
        assert sorted(event.kind for event in fleet.events()).count("lost") == 0
        for model in models:
            (kv,) = model.elastic.status().kv
            assert model.elastic.kv.maximum_bytes > kv.limit_bytes
        assert fleet.restore().status == "applied"
        fleet.check()
        assert fleet.status().totals.recomputed_tokens == 0
    for request in requests:
        assert same_unless_close(architectures.build("qwen3"), request.prompt, heard.tokens[request.id])
    for model in models:
        elastic.unwrap(model)


def test_a_limit_counts_from_the_answer_of_the_action_that_set_it() -> None:
    """A request that came within a beat of it waited for the limit to rise again, for ever, or was refused too late."""
    model, heard = architectures.build("qwen3"), Collector()
    elastic.wrap(model, places=small(BUDGET))
    place = model.elastic.pools[0].name
    requests = [Request(prompt, 4) for prompt in prompts([20] * 3, architectures.VOCAB)]
    with Fleet.of(model, engine={"block_tokens": 8}, beat_timeout_s=60) as fleet:
        for request in requests:
            fleet.apply("r0", ResizeKV(place, 0))
            with pytest.raises(Overloaded, match="while the limits of KV are as they are"):
                fleet.submit(request, heard)
            fleet.apply("r0", ResizeKV(place, None))
            fleet.submit(request, heard)
            heard.wait([request.id], 30)
        assert [end.finish for end in heard.ends.values()] == ["length"] * 3
    elastic.unwrap(model)
