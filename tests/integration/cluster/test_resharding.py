"""Instances share every layer and part again while they serve: the plain model's tokens, and none is computed twice.

Ranks of this process over tiny models of several architectures, then processes that are killed and stopped.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from transformers import LlamaConfig

import elastic
from elastic import ConfigError, StateError
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.groups import exchange
from elastic.engines.base import Request
from elastic.engines.executor.model_runner import ModelRunner
from elastic.memory.copy_engine import ThreadCopyEngine
from elastic.memory.weight_buffer import WeightBuffer
from elastic.types import Action, Migrate, Release, Swap
from elastic.weights import layer, parameter_slot
from elastic.weights.shards import layer_cut
from support import architectures
from support.architectures import long_ones
from support.cluster.shared_launcher import SharedLauncher
from support.cluster.small_checkpoint import VOCABULARY, checkpoint, small_model
from support.lossless_variant import HALF, exact
from support.processes import wait_until
from support.serving.generations import Collector, prompts, same_unless_close
from support.wrapped_model import PAGE, small

pytestmark = pytest.mark.slow
ENGINE = {"block_tokens": 8, "max_batch_tokens": 64}


class Served:
    """Ranks over models of one architecture whose layers are cut; `computed` counts tokens of instances' own steps."""

    def __init__(self, name: str, ranks: int, shards: int, budget: int, page_bytes: int) -> None:
        self.plain = architectures.build(name)
        self.models = [architectures.build(name) for _ in range(ranks)]
        for number, model in enumerate(self.models):
            place = replace(small(budget, f"cpu#{number}"), page_bytes=page_bytes)
            elastic.wrap(model, places=place, shards=shards)
        self.names = [f"r{number}" for number in range(ranks)]
        self.fleet = Fleet.of(*self.models, engine=ENGINE, beat_timeout_s=60)
        self.heard, self.computed = Collector(), 0
        self.requests: dict[str, Request] = {}

    def submit(self, lengths: list[int], tokens: int) -> None:
        for prompt in prompts(lengths, architectures.VOCAB, seed=len(self.requests)):
            request = Request(prompt, tokens)
            self.requests[request.id] = request
            self.fleet.submit(request, self.heard)

    def live(self) -> set[str]:
        """Return the requests that have not ended."""
        return self.requests.keys() - self.heard.ends.keys()

    def begin(self, tokens: int) -> None:
        """Wait until each request has so many tokens."""
        for name in self.requests:
            self.heard.wait_for_tokens(name, tokens)

    def finish(self) -> None:
        """Wait for all, and see that each has the plain model's tokens, and that nothing was computed twice."""
        self.heard.wait(list(self.requests))
        for name, request in self.requests.items():
            assert len(self.heard.tokens[name]) == request.max_tokens, self.heard.ends[name]
            assert same_unless_close(self.plain, request.prompt, self.heard.tokens[name])
        assert self.computed == sum(len(each.prompt) + each.max_tokens - 1 for each in self.requests.values())
        assert self.fleet.status().totals.recomputed_tokens == 0
        self.fleet.check()

    def weights(self) -> list[int]:
        """Bytes of the decoder layers' weights of each rank, by its ledger."""
        owners = [model.elastic.status().places[0].owners for model in self.models]
        return [sum(nbytes for name, nbytes in each.items() if name.startswith("layer")) for each in owners]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Served]]:
    """serve(architecture, ranks, shards, budget, page_bytes): started; stopped and unwrapped in the end."""
    made: list[Served] = []
    lock, begin = threading.Lock(), ModelRunner.begin

    def counted(runner: ModelRunner, step: Any, **options: Any) -> Any:
        with lock:
            made[-1].computed += sum(len(chunk.tokens) for chunk in step.chunks)
        return begin(runner, step, **options)

    monkeypatch.setattr(ModelRunner, "begin", counted)

    def start(name: str, ranks: int = 2, shards: int = 2, budget: int = 4 << 20, page_bytes: int = PAGE) -> Served:
        made.append(Served(name, ranks, shards, budget, page_bytes))
        made[-1].fleet.start()
        made[-1].computed = 0
        return made[-1]

    yield start
    for served in made:
        served.fleet.stop(drain=False)
        for model in served.models:
            if not model.elastic.dropped:
                elastic.unwrap(model)


@pytest.mark.parametrize(
    "name",
    [*long_ones("qwen3", "mistral-sliding", "gemma3"), "qwen3-moe", "gemma2", "gpt-oss", "deepseek-v3"],
)
def test_two_instances_share_every_layer_and_part_under_running_requests(
    serve: Callable[..., Served], name: str
) -> None:
    served = serve(name)
    fleet, weights = served.fleet, served.weights()
    served.submit([5, 40, 70, 12], tokens=70)
    served.begin(5)
    done = fleet.reshard(["r0", "r1"], tp=2)
    assert (done.status, done.members, done.tp) == ("applied", ("r0", "r1"), 2), done.why
    left = served.weights()
    assert sum(weights) - sum(left) == done.freed_bytes > 0
    pages = [[layer.pages({part}) for layer in model.elastic.shard_pages] for part, model in enumerate(served.models)]
    assert left == [sum(each) * PAGE for each in pages]
    assert [model.elastic.shards_here for model in served.models] == [
        (frozenset({part}),) * len(fleet.layer_bytes()) for part in range(2)
    ]
    (group,) = fleet.groups()
    assert group.tp == 2
    fleet.check()
    told = {request: len(served.heard.tokens[request]) for request in served.requests}
    for request in served.requests:
        served.heard.wait_for_tokens(request, min(told[request] + 5, 70))  # tokens come while layers are shared
    served.submit([30, 9], tokens=30)
    back = fleet.reshard("r1", tp=1)
    assert back.status == "applied", back.why
    assert back.fetched_bytes >= done.freed_bytes  # pages in which two parts meet had stayed
    assert fleet.groups() == ()
    served.finish()
    assert served.weights() == weights


def test_weights_that_leave_are_neither_read_nor_hashed_nor_copied(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, touched = serve("qwen3"), list[str]()

    def note(where: Any, name: str) -> None:
        real = getattr(where, name)

        def noted(*given: Any, **options: Any) -> Any:
            touched.append(name)
            return real(*given, **options)

        monkeypatch.setattr(where, name, noted)

    for module in (layer, layer_cut, parameter_slot):
        note(module, "digest")
    for kind, name in ((WeightBuffer, "read"), (WeightBuffer, "extend"), (ThreadCopyEngine, "copy")):
        note(kind, name)
    served.submit([5, 40], tokens=60)
    served.begin(5)
    done = served.fleet.reshard(["r0", "r1"], tp=2)
    assert (done.status, done.fetched_bytes) == ("applied", 0), done.why
    assert done.freed_bytes > 0
    assert touched == []
    assert served.fleet.reshard("r0", tp=1).status == "applied"
    assert set(touched) == {"digest", "read", "extend"}
    served.finish()


def test_two_become_four_and_two_again(serve: Callable[..., Served]) -> None:
    served = serve("qwen3", ranks=4, shards=4)
    fleet = served.fleet
    served.submit([5, 40, 70, 12, 9, 33], tokens=40)
    served.begin(3)
    for tp, degrees in ((2, [2, 2]), (4, [4]), (2, [2, 2]), (1, [])):
        assert fleet.reshard(served.names, tp=tp).status == "applied"
        assert [group.tp for group in fleet.groups()] == degrees
        fleet.check()
    served.finish()


def test_ranks_that_share_layers_in_stages_of_a_pipeline(serve: Callable[..., Served]) -> None:
    served = serve("llama-gqa", ranks=4, shards=2)
    fleet, count = served.fleet, len(served.fleet.layer_bytes())
    served.submit([5, 40, 70, 12], tokens=60)
    served.begin(3)
    assert fleet.reshard(served.names, tp=2).status == "applied"
    low, high = range(1), range(1, count)
    dropped = fleet.drop(layers={"r0": high, "r1": high, "r2": low, "r3": low})
    assert dropped.status == "applied", dropped.why
    (group,) = fleet.groups()
    assert {path.holders(0) for path in group.paths.values()} == {("r0", "r1")}
    assert {path.holders(count - 1) for path in group.paths.values()} == {("r2", "r3")}
    served.submit([20, 31], tokens=40)
    fleet.check()
    assert fleet.restore().status == "applied"
    served.finish()


def test_a_prompt_longer_than_a_rank_can_hold_ends_while_short_ones_run(serve: Callable[..., Served]) -> None:
    served = serve("qwen3", budget=300 << 10)
    fleet = served.fleet
    alone = max(instance.load.total_blocks for instance in fleet.status().instances) * ENGINE["block_tokens"]
    served.submit([10, 14, 9], tokens=60)
    assert fleet.reshard(["r0", "r1"], tp=2).status == "applied"
    served.submit([alone + 100], tokens=10)
    *_, long = served.requests
    served.submit([12, 8], tokens=30)
    served.finish()
    assert served.heard.ends[long].finish == "length"
    assert fleet.reshard("r0", tp=1).status == "applied"


def test_ranks_part_under_running_requests_whose_blocks_are_scattered(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight requests grow side by side, so each sector has a block of every one, and six of them leave."""
    served = serve("qwen3", budget=300 << 10)
    fleet, begin = served.fleet, ModelRunner.begin
    assert fleet.reshard(["r0", "r1"], tp=2).status == "applied"

    def slowly(runner: ModelRunner, step: Any, **options: Any) -> Any:
        time.sleep(0.02)
        return begin(runner, step, **options)

    monkeypatch.setattr(ModelRunner, "begin", slowly)
    served.submit([8] * 8, tokens=104)
    served.begin(40)
    stay, leave = list(served.requests)[:2], list(served.requests)[2:]
    for name in leave:
        fleet.cancel(name)
        served.requests.pop(name)
    done = fleet.reshard("r0", tp=1, timeout_s=20)
    assert done.status == "applied", done.why
    assert served.live() == set(stay), "it waited for their end"
    served.heard.wait(stay)
    for name in stay:
        assert same_unless_close(served.plain, served.requests[name].prompt, served.heard.tokens[name])
    fleet.check()


def ups_and_downs(served: Served, count: int) -> None:
    """Change the degree at random until requests have lived through so many changes, while four at least come and go.

    How many tokens come in a change is a matter of the machine: one that outlasts all requests does not count.
    """
    chance, tp, lived = random.Random(count), 1, 0
    for _ in range(2 * count):
        left = [served.requests[name].max_tokens - len(served.heard.tokens[name]) for name in served.live()]
        if max(left, default=0) < 80:
            served.submit([chance.randrange(3, 60)], tokens=120)
        while len(live := served.live()) < 4:
            served.submit([chance.randrange(3, 60)], tokens=chance.randrange(5, 60))
        served.begin(1)
        tp = chance.choice([degree for degree in (1, 2, 4) if degree != tp])
        done = served.fleet.reshard(served.names, tp=tp, layers_per_step=chance.choice([None, 1, 2]), timeout_s=20)
        assert done.status == "applied", done.why
        lived += not served.live().isdisjoint(live)
        if lived == count:
            break
    assert lived == count, "requests ended in most of the changes"
    served.fleet.reshard(served.names, tp=1)
    served.finish()


@pytest.fixture
def by_heads(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Served]:
    """by_heads(kv_heads, page_kib): four ranks over a model of eight query heads."""

    def start(kv_heads: int, page_kib: int) -> Served:
        sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": kv_heads}
        monkeypatch.setitem(architectures.CONFIGS, "heads", lambda: LlamaConfig(**architectures.SMALL | sizes))
        return serve("heads", ranks=4, shards=4, budget=page_kib << 20, page_bytes=page_kib << 10)

    return start


@pytest.mark.parametrize(("kv_heads", "page_kib"), [(1, 64), (2, 16), (8, 4)])
def test_two_ups_and_downs_with_any_heads_and_pages(
    by_heads: Callable[[int, int], Served], kv_heads: int, page_kib: int
) -> None:
    """More ranks than heads of keys and values, too; memory that nobody wrote has NaN, as in all tests."""
    ups_and_downs(by_heads(kv_heads, page_kib), 2)


@pytest.mark.long
@pytest.mark.parametrize("page_kib", [4, 16, 64])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_a_thousand_ups_and_downs_with_any_heads_and_pages(
    by_heads: Callable[[int, int], Served], kv_heads: int, page_kib: int
) -> None:
    """Of all nine together."""
    ups_and_downs(by_heads(kv_heads, page_kib), 112)


@pytest.mark.long
def test_a_thousand_ups_and_downs_at_random(serve: Callable[..., Served]) -> None:
    ups_and_downs(serve("qwen3", ranks=4, shards=4), 1000)


def test_layers_that_were_not_cut_are_not_shared(serve: Callable[..., Served]) -> None:
    served = serve("qwen3", shards=1)
    with pytest.raises(ConfigError, match="not cut"):
        served.fleet.reshard(["r0", "r1"], tp=2)


def test_no_action_takes_full_weights_away_from_who_computes_parts_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for at each flip of a reshard, behind it, and again when the instances have parted."""
    models = [exact(architectures.build("llama-gqa")) for _ in range(2)]
    for number, model in enumerate(models):
        places = [small(4 << 20, f"cpu#{number}{which}") for which in "ab"]
        elastic.wrap(model, places=places, shards=2, variants=[HALF])
    actions: list[Action] = [Swap((0, 1), "half"), Release((0, 1)), Migrate((0, 1), "cpu#1b")]
    heard, requests = Collector(), [Request(prompt, 40) for prompt in prompts([9, 17, 40], architectures.VOCAB)]
    refused: list[str] = []
    with Fleet.of(*models, engine=ENGINE, beat_timeout_s=60) as fleet:

        def try_all() -> None:
            for action in actions:
                with pytest.raises(StateError, match=r"in parts|dropped") as refusal:
                    fleet.apply("r1", action)
                refused.append(str(refusal.value))

        def flip(*given: Any, **options: Any) -> Any:
            try_all()
            done = flip_layers(*given, **options)
            try_all()
            return done

        flip_layers = exchange.flip_layers
        monkeypatch.setattr(exchange, "flip_layers", flip)
        for request in requests:
            fleet.submit(request, heard)
        assert fleet.reshard(["r0", "r1"], tp=2, layers_per_step=1).status == "applied"
        monkeypatch.undo()
        try_all()
        heard.wait([request.id for request in requests])
        assert any("fleet.reshard(names, tp=1)" in each for each in refused)
        assert fleet.reshard(["r0"], tp=1).status == "applied"
        assert fleet.apply("r1", actions[0])[0].status == "applied"
    for model in models:
        elastic.unwrap(model)
    for request in requests:
        assert heard.ends[request.id].finish == "length", heard.ends[request.id]
        assert same_unless_close(models[0], request.prompt, heard.tokens[request.id])


# -- processes


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_shares_layers_dies_or_hangs(launcher: SharedLauncher, how: int) -> None:
    options: dict[str, Any] = {"engine": {"block_tokens": 16, "max_batch_tokens": 128}, "shards": 2}
    options |= {"launch": launcher, "replace": False}
    with Fleet(checkpoint(), ranks=2, places=["cpu=48MiB"], **options) as fleet:
        pids = {rank.name: rank.pid for rank in fleet.status().ranks}
        heard, asked = Collector(), {}
        for prompt in prompts([5, 40, 90, 33], VOCABULARY):
            request = Request(prompt, 80, ignore_eos=True)
            asked[request.id] = prompt
            fleet.submit(request, heard)
        for name in asked:
            heard.wait_for_tokens(name, 3)
        assert fleet.reshard(["r0", "r1"], tp=2).status == "applied"
        told = {name: len(heard.tokens[name]) for name in asked}
        for name in asked:
            heard.wait_for_tokens(name, min(80, told[name] + 3))
        os.kill(pids["r1"], how)
        wait_until(lambda: not fleet.groups(), "the group was not repaired")
        heard.wait(list(asked))
        for name, prompt in asked.items():
            assert heard.ends[name].finish == "length", heard.ends[name]
            assert same_unless_close(small_model(), prompt, heard.tokens[name])
        fleet.check()
