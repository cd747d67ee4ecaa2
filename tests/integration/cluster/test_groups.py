"""Instances drop layers that they hold twice and take them back while they serve: the plain model's tokens, each once.

Ranks of this process over tiny models of several architectures, then processes that are killed.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import random
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import elastic
from elastic import CapacityError, ConfigError, StateError
from elastic.cluster.control.stage_questions import PauseSteps, ResumeSteps
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.groups.results import Dropped
from elastic.engines.base import Request
from elastic.types import ResizeKV, Restore, WeightsSource
from support import architectures
from support.architectures import long_ones
from support.child_process import in_fork
from support.cluster.shared_launcher import SharedLauncher
from support.cluster.small_checkpoint import VOCABULARY, checkpoint, small_model
from support.processes import open_files, wait_until
from support.serving.generations import Collector, is_continuation, prompts, same_unless_close
from support.wrapped_model import PAGE, small, tight

pytestmark = pytest.mark.slow
ENGINE = {"block_tokens": 8, "max_batch_tokens": 64}
TOKENS = 60


class Served:
    """Two or three ranks over models of one architecture; it counts what each layer's attention computes."""

    def __init__(self, name: str, ranks: int, budget: int, checkpoint: Path | None = None) -> None:
        self.plain = architectures.build(name)
        self.models = [architectures.build(name) for _ in range(ranks)]
        self.computed: Counter[int] = Counter()
        self._lock = threading.Lock()
        for number, model in enumerate(self.models):
            elastic.wrap(model, places=small(budget, f"cpu#{number}"), checkpoint=checkpoint)
            for layer, module in enumerate(model.model.layers):
                module.self_attn.register_forward_pre_hook(partial(self._count, layer), with_kwargs=True)
        self.fleet = Fleet.of(*self.models, engine=ENGINE, beat_timeout_s=60)
        self.layers = len(self.models[0].model.layers)
        self.heard = Collector()
        self.requests: dict[str, Request] = {}
        self.seeds = itertools.count()

    def _count(self, layer: int, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        with self._lock:
            self.computed[layer] += hidden.shape[1]

    def submit(self, lengths: list[int], tokens: int = TOKENS) -> None:
        for prompt in prompts(lengths, architectures.VOCAB, seed=next(self.seeds)):
            request = Request(prompt, tokens)
            self.requests[request.id] = request
            self.fleet.submit(request, self.heard)

    def limit(self, rank: str, pages: int | None) -> None:
        """Have a rank's KV cache have so many pages; None: all that there are."""
        place = self.fleet.look(rank).status.places[0].name
        self.fleet.apply(rank, ResizeKV(place, None if pages is None else pages * PAGE))

    def begin(self, tokens: int) -> None:
        """Wait until each request has so many tokens."""
        for name in self.requests:
            self.heard.wait_for_tokens(name, tokens)

    def finish(self) -> None:
        """Wait for all, and see that each has the plain model's tokens, and that nothing was computed twice."""
        self.heard.wait(list(self.requests))
        self.have_the_plain_models_tokens()
        once = sum(len(request.prompt) + request.max_tokens - 1 for request in self.requests.values())
        assert dict(self.computed) == dict.fromkeys(range(self.layers), once)
        self.fleet.check()

    def have_the_plain_models_tokens(self) -> None:
        """See that each that has ended has them."""
        for name, request in self.requests.items():
            got = self.heard.tokens[name]
            assert is_continuation(self.plain, request.prompt, request.max_tokens, got), self.heard.ends[name]

    def live(self) -> list[str]:
        """List the requests that have not ended."""
        return [name for name in self.requests if name not in self.heard.ends]

    def rest(self) -> None:
        """Have all be as in the beginning, with every request ended as it should; then forget these."""
        assert self.fleet.restore().status == "applied"
        self.finish()
        assert self.fleet.groups() == ()
        assert self.fleet.status().totals.recomputed_tokens == 0
        self.requests, self.heard = {}, Collector()
        self.computed.clear()

    def halves(self) -> dict[str, range]:
        """What each of two ranks drops so that both have half of the layers."""
        half = self.layers // 2
        return {"r0": range(half, self.layers), "r1": range(half)}


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """serve(architecture, ranks, budget, checkpoint): started; stopped and unwrapped in the end."""
    made: list[Served] = []

    def start(name: str, ranks: int = 2, budget: int = 4 << 20, checkpoint: Path | None = None) -> Served:
        served = Served(name, ranks, budget, checkpoint)
        made.append(served)
        served.fleet.start()
        served.computed.clear()  # of what engines try at first
        return served

    yield start
    for served in made:
        served.fleet.stop(drain=False)
        for model in served.models:
            if not model.elastic.dropped:
                elastic.unwrap(model)


@pytest.mark.parametrize("name", [*long_ones("qwen3", "mistral-sliding"), "qwen3-moe", "gemma3"])
def test_layers_are_dropped_and_come_back_under_running_requests(serve: Callable[..., Served], name: str) -> None:
    served = serve(name)
    fleet, weights = served.fleet, [place_bytes(model, "layer") for model in served.models]
    served.submit([5, 40, 70, 12], tokens=120)
    served.begin(5)
    dropped = fleet.drop(layers=served.halves())
    assert dropped.status == "applied"
    assert dropped.moved_bytes > 0
    left = [place_bytes(model, "layer") for model in served.models]
    assert sum(weights) - sum(left) == dropped.freed_bytes == sum(fleet.layer_bytes())
    assert [model.elastic.dropped for model in served.models] == [tuple(d) for d in served.halves().values()]
    fleet.check()
    told = {request: len(served.heard.tokens[request]) for request in served.requests}
    for request in served.requests:
        served.heard.wait_for_tokens(request, min(told[request] + 5, 120))  # tokens come while the group lives
    assert min(told.values()) < 115
    served.submit([30, 9])
    restored = fleet.restore()
    assert (restored.status, restored.flips) == ("applied", dropped.flips)
    assert fleet.groups() == ()
    served.finish()
    assert [place_bytes(model, "layer") for model in served.models] == weights
    assert fleet.status().totals.recomputed_tokens == 0


def test_a_dry_run_says_the_bytes_that_go_and_moves_none(serve: Callable[..., Served]) -> None:
    served = serve("qwen3")
    fleet, ranks = served.fleet, served.fleet._groups.ranks
    served.submit([40, 40], tokens=20)  # all that they will need is there from their first step on
    served.begin(1)
    ranks.ask_all(dict.fromkeys(["r0", "r1"], PauseSteps()))
    for verb in (partial(fleet.drop, layers=served.halves()), fleet.restore):
        weights = sum(place_bytes(model, "layer") for model in served.models)
        before = [(model.elastic.dropped, place_bytes(model, "")) for model in served.models], fleet.groups()
        planned = verb(dry_run=True)
        offers = {offer.kind for offer in fleet.plan("4KiB")}
        assert offers >= ({"restore"} if fleet.groups() else {"drop", "add"})
        assert ([(model.elastic.dropped, place_bytes(model, "")) for model in served.models], fleet.groups()) == before
        done = verb()
        assert (planned.status, done.status) == ("planned", "applied")
        assert (done.flips, done.moved_bytes) == (planned.flips, planned.moved_bytes)
        assert done.moved_bytes > 0
        freed_bytes = planned.freed_bytes if isinstance(planned, Dropped) else 0
        came = sum(place_bytes(model, "layer") for model in served.models) - weights
        assert came == planned.fetched_bytes - freed_bytes == -planned.price.relieved_bytes
        assert done.fetched_bytes <= planned.fetched_bytes < done.fetched_bytes + served.layers * PAGE + 1
    ranks.ask_all(dict.fromkeys(["r0", "r1"], ResumeSteps()))
    served.finish()


def place_bytes(model: Any, owner: str) -> int:
    owners = model.elastic.status().places[0].owners
    return sum(nbytes for name, nbytes in owners.items() if name.startswith(owner))


def test_dropped_weights_leave_the_ledgers_and_the_memory_of_the_process() -> None:
    """What no request needs of the cache goes back to the system then; no view, skeleton or host copy keeps it."""
    code = """
    import contextlib, gc, os, re
    from transformers import AutoModelForCausalLM
    import elastic
    from elastic.cluster.fleet.fleet import Fleet

    def resident():  # what a page table shows of the memory files or not
        gc.collect()
        for model in models:
            model.elastic.kv.trim()
        status = open("/proc/self/status").read()
        others = sum(int(re.search(rf"^{kind}:\\s+(\\d+)", status, re.M)[1]) << 10 for kind in ("RssAnon", "RssFile"))
        return others + memory_files()

    def memory_files():
        nbytes = {}  # one may be open several times
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:cpu#"):
                    told = os.stat(f"/proc/self/fd/{descriptor}")
                    nbytes[told.st_ino] = 512 * told.st_blocks
        return sum(nbytes.values())

    def weights(model):
        owners = model.elastic.status().places[0].owners
        return sum(nbytes for owner, nbytes in owners.items() if owner.startswith("layer"))

    checkpoint = os.environ["CHECKPOINT"]
    models = [AutoModelForCausalLM.from_pretrained(checkpoint).eval() for _ in range(2)]
    for number, model in enumerate(models):
        elastic.wrap(model, places=f"cpu#{number}=48MiB", checkpoint=checkpoint)
    with Fleet.of(*models, engine={"block_tokens": 16, "max_batch_tokens": 64}, beat_timeout_s=60) as fleet:
        half, count = len(fleet.layer_bytes()) // 2, len(fleet.layer_bytes())
        for _ in range(3):  # the first ones allocate what stays
            before, had = resident(), [weights(model) for model in models]
            dropped = fleet.drop(layers={"r0": range(half, count), "r1": range(half)})
            fell = before - resident()
            ledgers = sum(had) - sum(weights(model) for model in models)
            fleet.check()
            print(dropped.freed_bytes, ledgers, fell)
            fleet.restore()
    """
    *_, freed, ledgers, fell = map(int, in_fork(code, CHECKPOINT=checkpoint()).split())
    assert freed == ledgers > 0
    assert abs(fell - freed) <= 2 * 2 * (64 << 10)  # two pages for each rank


def test_several_drops_and_restores_in_a_row(serve: Callable[..., Served]) -> None:
    served = serve("qwen3")
    fleet, layer = served.fleet, served.fleet.layer_bytes()[0]
    for number in range(2):
        served.submit([20, 33, 7], tokens=60)
        served.begin(3)
        first = fleet.drop(layer)
        second = fleet.drop(layer)
        assert (first.status, second.status) == ("applied", "applied")
        assert first.freed_bytes == second.freed_bytes == layer
        assert fleet.restore("r0").status == "applied", number
        assert fleet.groups() == ()
    served.finish()


def change_at_random(served: Served, count: int, chance: random.Random) -> None:
    """Have layers change their rank, leave and return so often, while requests come and go."""
    fleet, weights = served.fleet, sum(served.fleet.layer_bytes())

    def two() -> list[str]:
        return chance.sample(["r0", "r1", "r2"], 2)

    def by_hand() -> None:
        (first, second), cut = two(), chance.randrange(1, served.layers)
        fleet.drop(layers={first: range(cut, served.layers), second: range(cut)})

    verbs: list[Callable[[], object]] = [
        lambda: fleet.drop(int(chance.uniform(0.1, 2) * weights), whole=chance.random() < 0.5),
        by_hand,
        lambda: fleet.restore(chance.choice([None, *two()])),
        lambda: fleet.split(two()[0]),
        lambda: fleet.merge(*two()),
        lambda: fleet.migrate(two()[0], [chance.randrange(served.layers)], two()[0]),
        lambda: fleet.replicate(two()[0], [chance.randrange(served.layers)], two()[0]),
        lambda: fleet.evict(two()[0]),
    ]
    for _ in range(count):
        while len(served.live()) < 4:
            served.submit([chance.randrange(3, 60)], tokens=chance.randrange(5, 80))
        with suppress(ConfigError, StateError, CapacityError):  # what is not there cannot change
            chance.choice(verbs)()
    served.rest()


def held_by_process() -> tuple[int, int, int]:
    """Count what leaks show in: open files, threads, and the bytes that are resident, but for those of places.

    A listener's pool makes threads up to its most, whenever more come at once than before: they are not counted. Nor is
    what was freed and the allocator keeps: it goes back to the system first.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    anonymous = int(re.search(r"^RssAnon:\s+(\d+)", status, re.M)[1]) << 10  # type: ignore[index]
    pooled = sum(thread.name.startswith("elastic-handshake") for thread in threading.enumerate())
    return len(open_files(os.getpid())), threading.active_count() - pooled, anonymous


def test_ten_changes_at_random(serve: Callable[..., Served]) -> None:
    change_at_random(serve("qwen3", ranks=3), 10, random.Random(1))


@pytest.mark.long
def test_ten_thousand_changes_leak_nothing(serve: Callable[..., Served]) -> None:
    served, chance = serve("qwen3", ranks=3), random.Random(2)
    change_at_random(served, 500, chance)  # which open what stays open
    files, threads, resident = held_by_process()
    for _ in range(19):
        change_at_random(served, 500, chance)
    files_now, threads_now, resident_now = held_by_process()
    assert files_now - files <= 2 * 3, "both ends of a connection between each two ranks"
    assert threads_now <= threads
    assert resident_now - resident < 16 << 20, "less than two kilobytes for each change"


def test_what_was_dropped_is_room_for_requests_that_wait(serve: Callable[..., Served]) -> None:
    served = serve("qwen3", budget=300 * PAGE)
    fleet = served.fleet
    before = total_blocks(fleet)
    served.submit([60] * 12, tokens=100)
    dropped = fleet.drop(2 * fleet.layer_bytes()[0])
    assert dropped.status == "applied"
    wait_until(lambda: total_blocks(fleet) > before, "no instance has more room")
    served.finish()
    assert fleet.restore().status == "applied"
    wait_until(lambda: total_blocks(fleet) == before, "the room did not go back")


def total_blocks(fleet: Fleet) -> int:
    return sum(instance.load.total_blocks for instance in fleet.status().instances)


def test_three_ranks_become_a_pipeline_of_three(serve: Callable[..., Served]) -> None:
    served = serve("qwen3", ranks=3)
    served.submit([5, 40, 70, 12, 9, 30], tokens=70)
    served.begin(5)
    dropped = served.fleet.drop(2 * sum(served.fleet.layer_bytes()))
    assert dropped.status == "applied"
    (group,) = served.fleet.groups()
    assert sorted(len(layers) for layers in group.keeps.values()) == [1, 1, 1]
    served.submit([11, 22, 33])
    assert served.fleet.restore().status == "applied"
    served.finish()


def test_weights_of_a_lost_rank_come_back_from_one_that_has_them(serve: Callable[..., Served]) -> None:
    """These models were loaded from no checkpoint: a rank that nobody gives its layers to cannot go on alone."""
    served = serve("llama-gqa", ranks=3)
    served.submit([5, 40, 90, 33, 64, 20])
    served.begin(5)
    served.fleet.drop(layers=served.halves())
    served.fleet._dispatcher.instances["r1"].client.kill("by the test")
    served.heard.wait(list(served.requests))
    served.have_the_plain_models_tokens()
    wait_until(lambda: not served.fleet.groups(), "the group was not repaired")
    (recovered,) = [event for event in served.fleet.events() if event.kind == "recovered"]
    assert recovered.rank == "r0,r1"
    assert served.models[0].elastic.dropped_shards == ()
    assert {rank.name for rank in served.fleet.status().ranks if rank.serves} == {"r0", "r2"}
    served.fleet.check()
    lost, other = served.models[1].elastic, served.models[2].elastic
    lost.fetch(lost.dropped, other.weights_source(lost.dropped))  # so that it can be unwrapped


def no_layers(source: WeightsSource) -> WeightsSource:
    return replace(source, layers=())


def other_pages(source: WeightsSource) -> WeightsSource:
    return replace(source, layers=tuple(replace(each, pages=each.pages[::-1]) for each in source.layers))


@pytest.mark.parametrize("spoil", [no_layers, other_pages])
def test_weights_that_a_rank_does_not_give_come_from_the_checkpoint(
    serve: Callable[..., Served], spoil: Callable[[WeightsSource], WeightsSource], tmp_path: Path, monkeypatch: Any
) -> None:
    architectures.build("llama-gqa").save_pretrained(tmp_path)
    served = serve("llama-gqa", ranks=3, checkpoint=tmp_path)
    other = served.models[2].elastic
    told = other.weights_source
    monkeypatch.setattr(other, "weights_source", lambda **which: spoil(told(**which)))
    served.submit([5, 40, 90, 33, 64, 20])
    served.begin(5)
    served.fleet.drop(layers=served.halves())
    served.fleet._dispatcher.instances["r1"].client.kill("by the test")
    served.heard.wait(list(served.requests))
    served.have_the_plain_models_tokens()
    wait_until(lambda: not served.fleet.groups(), "the group was not repaired")
    assert served.models[0].elastic.dropped_shards == ()
    assert {rank.name for rank in served.fleet.status().ranks if rank.serves} == {"r0", "r2"}
    lost = served.models[1].elastic
    lost.restore(lost.dropped)  # so that it can be unwrapped


def test_layers_of_one_instance_go_to_another_rank_and_come_back(serve: Callable[..., Served]) -> None:
    served = serve("llama-gqa")
    served.submit([5, 40, 70, 12], tokens=120)
    served.begin(5)
    moved = served.fleet.migrate("r0", [1], "r1")
    assert (moved.status, moved.flips) == ("applied", 1)
    served.submit([20], tokens=120)
    *_, request = served.requests
    served.heard.wait_for_tokens(request, 3)
    (target,) = {"r0", "r1"} - {served.fleet.instance_of(request)}
    with pytest.raises(StateError, match="restore them first"):
        served.fleet.move(request, target)
    assert served.fleet.split("r1").status == "applied"
    served.finish()


def test_an_instance_with_all_of_its_layers_again_has_its_whole_cache(serve: Callable[..., Served]) -> None:
    """The rank that had some of them kept room for little, and ended when it was told of more."""
    served = serve("llama-gqa")
    served.limit("r1", 16)
    moved = [served.fleet.migrate("r0", [1], rank).status for rank in ("r1", "r0")]
    served.limit("r1", None)
    served.submit([70] * 12, tokens=100)
    served.begin(40)
    moved.append(served.fleet.migrate("r0", [1], "r1").status)
    assert moved == ["applied"] * 3
    served.rest()
    assert not [event for event in served.fleet.events() if event.kind in ("lost", "recovered")]


def test_weights_that_were_restored_by_hand_are_no_lost_room(serve: Callable[..., Served], tmp_path: Path) -> None:
    model = architectures.build("llama-gqa")
    model.save_pretrained(tmp_path)
    served = serve("llama-gqa", budget=tight(model, 16).budget_bytes, checkpoint=tmp_path)
    for rank in ("r0", "r1"):
        served.limit(rank, 12)
    served.fleet.drop(layers=served.halves())
    assert served.fleet.apply("r0", Restore(tuple(served.halves()["r0"])))[0].status == "applied"
    assert served.fleet.restore().status == "applied"
    served.submit([40, 30])
    served.rest()


def test_a_request_of_instances_that_have_parted_moves_with_its_keys_and_values(serve: Callable[..., Served]) -> None:
    served = serve("qwen3")
    served.submit([40, 70], tokens=100)
    served.begin(5)
    served.fleet.drop(layers=served.halves())
    assert served.fleet.restore().status == "applied"
    served.submit([50], tokens=160)
    *_, request = served.requests
    served.heard.wait_for_tokens(request, 40)
    (target,) = {"r0", "r1"} - {served.fleet.instance_of(request)}
    moved = served.fleet.move(request, target)
    assert moved.recomputed_tokens == 0
    assert moved.moved_bytes > 0
    served.finish()


def test_models_have_all_of_their_layers_when_a_fleet_ends_in_order(serve: Callable[..., Served]) -> None:
    served = serve("qwen3")
    served.submit([40, 70])
    served.fleet.drop(layers=served.halves())
    served.fleet.stop()
    assert all(served.heard.ends[name].finish == "length" for name in served.requests)
    assert [model.elastic.dropped for model in served.models] == [(), ()]


def test_a_rank_that_leaves_takes_its_layers_back_first(serve: Callable[..., Served]) -> None:
    served = serve("qwen3")
    served.submit([5, 40, 70, 12])
    served.begin(5)
    served.fleet.drop(layers=served.halves())
    served.fleet.remove("r1")
    assert served.fleet.groups() == ()
    served.heard.wait(list(served.requests))
    served.have_the_plain_models_tokens()


def test_ranks_with_other_forms_of_cache_make_no_group() -> None:
    models = [architectures.build("qwen3") for _ in range(2)]
    for number, model in enumerate(models):
        elastic.wrap(model, places=small(4 << 20, f"cpu#{number}"))
    fleet = Fleet.of(*models, engine=ENGINE, beat_timeout_s=60)
    pairs = zip(fleet._specs, (8, 16), strict=True)
    fleet._specs = [replace(spec, engine={**ENGINE, "block_tokens": tokens}) for spec, tokens in pairs]
    with fleet:
        with pytest.raises(ConfigError, match="other forms of KV cache"):
            fleet.merge("r0", "r1")
        assert fleet.groups() == ()
    for model in models:
        elastic.unwrap(model)


# -- processes


PROMPTS = prompts([5, 40, 90, 200, 33, 64], VOCABULARY)


def test_processes_drop_take_back_and_survive_the_death_of_one(launcher: SharedLauncher) -> None:
    engine = {"block_tokens": 16, "max_batch_tokens": 128}
    options: dict[str, Any] = {"launch": launcher, "engine": engine, "replace": False}
    with Fleet(checkpoint(), ranks=2, places=["cpu=48MiB"], **options) as fleet:
        layers = len(fleet.layer_bytes())
        halves = {"r0": range(layers // 2, layers), "r1": range(layers // 2)}
        pids = {rank.name: rank.pid for rank in fleet.status().ranks}
        assert len({os.getpid(), *pids.values()}) == 3
        heard, asked = Collector(), {}
        for prompt in PROMPTS:
            request = Request(prompt, 150, ignore_eos=True)
            asked[request.id] = prompt
            fleet.submit(request, heard)
        for name in asked:
            heard.wait_for_tokens(name, 5)
        assert fleet.drop(layers=halves).status == "applied"
        assert fleet.restore().status == "applied"
        assert fleet.drop(layers=halves).status == "applied"
        fleet.check()
        for prompt in PROMPTS:
            request = Request(prompt, 100, ignore_eos=True)
            asked[request.id] = prompt
            fleet.submit(request, heard)
        for name in asked:
            heard.wait_for_tokens(name, 5)
        wires = {name: fleet.look(name).wires for name in pids}
        for name, (wire,) in wires.items():
            assert {name, wire.rank} == {"r0", "r1"}
            assert wire.sent_bytes > 0 < wire.received_bytes
        os.kill(pids["r1"], signal.SIGKILL)
        wait_until(lambda: not fleet.groups(), "the group was not repaired")
        heard.wait(list(asked))
        assert fleet.status().totals.recomputed_tokens == 0
        for name, prompt in asked.items():
            assert heard.ends[name].finish == "length", heard.ends[name]
            assert same_unless_close(small_model(), prompt, heard.tokens[name])
        fleet.check()
        (recovered,) = [event for event in fleet.events() if event.kind == "recovered"]
        assert recovered.recomputed_tokens == 0


@pytest.mark.parametrize("staging", [True, False])
def test_full_instances_drop_or_refuse_with_everything_as_before(serve: Callable[..., Served], staging: bool) -> None:
    served = serve("qwen3", budget=340 << 10)
    fleet = served.fleet
    if staging:
        fleet.keep_staging()
    served.submit([30, 60, 25, 41, 50, 70, 33, 44, 12, 61], tokens=90)
    served.heard.wait_for_tokens(next(iter(served.requests)), 2)
    dropped = fleet.drop(layers=served.halves(), timeout_s=0.2)
    assert dropped.status in ("applied", "deferred")
    assert dropped.status == "applied" or not staging, dropped.why
    if dropped.status == "deferred":
        assert fleet.groups() == ()
        assert all(not model.elastic.dropped for model in served.models)
    fleet.check()
    served.finish()
    fleet.restore()
    assert fleet.status().totals.recomputed_tokens == 0
