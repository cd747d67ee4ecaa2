"""Layers change their rank by each way there is: over the network, stalled, without regard to what computes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM

import elastic
from elastic.assets import MODEL_DIR
from elastic.cluster.control.handshake import make_key_file
from elastic.cluster.control.stage_questions import PauseSteps
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.moves import Mover
from elastic.cluster.launch.join import JoinLauncher
from elastic.cluster.peers.memory.reader import RankMemoryReader
from elastic.engines.base import Request
from elastic.engines.continuous.ranks.layer_exchange import LayerExchange
from elastic.errors import RankLost, StateError
from elastic.memory.backends import rank_memory
from elastic.memory.backends.memfd import MemfdBackend
from elastic.memory.rate_limit import YieldingPace
from support import architectures
from support.child_process import Forked
from support.serving.generations import Collector, is_continuation, prompts, same_unless_close
from support.wrapped_model import small

pytestmark = pytest.mark.slow
ENGINE = {"block_tokens": 8, "max_batch_tokens": 64}
ARCHITECTURE, TOKENS = "qwen3", 150
PARTS = {"r0": range(1, 3), "r1": range(1)}


class Served:
    """Two ranks of this process that serve, and the plain model."""

    def __init__(self, bulk: Literal["sockets", "nixl"]) -> None:
        self.plain = architectures.build(ARCHITECTURE)
        self.models = [architectures.build(ARCHITECTURE) for _ in range(2)]
        for number, model in enumerate(self.models):
            elastic.wrap(model, places=small(4 << 20, f"cpu#{number}"))
        self.fleet = Fleet.of(*self.models, engine=ENGINE, beat_timeout_s=60, bulk=bulk)
        self.heard = Collector()
        self.asked: dict[str, tuple[int, ...]] = {}

    def submit(self) -> None:
        for prompt in prompts([5, 40, 70, 12], architectures.VOCAB, seed=len(self.asked)):
            request = Request(prompt, TOKENS)
            self.asked[request.id] = prompt
            self.fleet.submit(request, self.heard)
        for name in self.asked:
            self.heard.wait_for_tokens(name, 5)

    def finish(self) -> None:
        self.heard.wait(list(self.asked))
        assert self.heard.tokens.keys() == self.asked.keys()
        for name, prompt in self.asked.items():
            assert is_continuation(self.plain, prompt, TOKENS, self.heard.tokens[name]), name
        self.fleet.check()
        assert self.fleet.status().totals.recomputed_tokens == 0


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    one = Served(getattr(request, "param", "sockets"))
    one.fleet.start()
    yield one
    one.fleet.stop(drain=False)
    for model in one.models:
        if not model.elastic.dropped:
            elastic.unwrap(model)


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that were read over the network; memory files are of another host."""
    read, counted = RankMemoryReader.read, list[int]()

    def count(reader: RankMemoryReader, address: int, pieces: Any) -> None:
        counted.append(sum(nbytes for _, nbytes in pieces))
        read(reader, address, pieces)

    monkeypatch.setattr(RankMemoryReader, "read", count)
    monkeypatch.setattr(rank_memory, "host_name", lambda: "another host")
    return counted


@pytest.mark.parametrize("served", ["sockets", "nixl"], indirect=True)
def test_layers_are_exchanged_over_the_network(
    served: Served, read_bytes: list[int], request: pytest.FixtureRequest
) -> None:
    if "nixl" in request.node.name:
        pytest.importorskip("nixl_cu12")
    served.submit()
    dropped = served.fleet.drop(layers=PARTS)
    assert (dropped.status, dropped.moved_bytes) == ("applied", sum(read_bytes))
    served.submit()
    before = sum(read_bytes)
    restored = served.fleet.restore()
    assert restored.status == "applied"
    assert restored.fetched_bytes > 0
    assert restored.moved_bytes + restored.fetched_bytes == sum(read_bytes) - before
    served.finish()


def test_a_copy_that_fails_over_the_network_leaves_the_group_serving(
    served: Served, read_bytes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    served.submit()
    with monkeypatch.context() as patch:
        patch.setattr(RankMemoryReader, "read", fail)
        dropped = served.fleet.drop(layers=PARTS)
    assert (dropped.status, dropped.flips) == ("deferred", 0)
    assert "cable" in dropped.why
    assert served.fleet.drop(layers=PARTS).status == "applied"
    assert read_bytes
    assert served.fleet.restore().status == "applied"
    served.finish()


def fail(*_: object) -> None:
    raise StateError("the cable is broken")


def test_instances_go_on_or_stop_while_layers_change_their_rank(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the number of steps that the engine which gets a layer has begun at each of its copies."""
    copy, steps = LayerExchange.copy, defaultdict[str, set[int]](set)

    def look(exchange: LayerExchange, *args: Any, **options: Any) -> int:
        steps[exchange._home.rank].add(exchange._loop.scheduler.steps)
        return copy(exchange, *args, **options)

    monkeypatch.setattr(LayerExchange, "copy", look)
    exchanges: tuple[Literal["live", "stall"], ...] = ("live", "stall")
    for exchange in exchanges:
        served.submit()
        for change in (partial(served.fleet.drop, layers=PARTS), served.fleet.restore):
            steps.clear()
            done = change(exchange=exchange, layers_per_step=1)
            assert (done.status, done.flips) == ("applied", 3)
            assert len(steps) == 2
            assert (max(map(len, steps.values())) == 1) is (exchange == "stall")
    served.finish()


def test_copies_let_what_computes_pass_if_they_are_told_to(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    copying, asked = YieldingPace.copying, list[YieldingPace]()

    def count(pace: YieldingPace, nbytes: int) -> AbstractContextManager[None]:
        asked.append(pace)
        return copying(pace, nbytes)

    monkeypatch.setattr(YieldingPace, "copying", count)
    served.submit()
    for coordinated in (True, False):
        for change in (partial(served.fleet.drop, layers=PARTS), served.fleet.restore):
            asked.clear()
            assert change(coordinated=coordinated).status == "applied"
            assert len(set(asked)) == (2 if coordinated else 0)
    served.finish()


def test_a_request_whose_source_is_lost_under_its_last_copy_goes_on_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank finds a memory file of another here: what was not copied is computed again."""
    monkeypatch.setattr(MemfdBackend, "shared_file", lambda backend: None)
    served = Served("sockets")
    fleet, receive_rest, lost = served.fleet, Mover._receive_rest, list[str]()

    def gone(reader: RankMemoryReader, address: int, pieces: Any) -> None:
        raise RankLost("its connection has ended", rank=reader.memory.rank)

    def lose(mover: Mover, move: Any, kv: Any) -> None:
        lost.append(move.source.name)
        move.source.client.kill("by the test")
        monkeypatch.setattr(RankMemoryReader, "read", gone)
        receive_rest(mover, move, kv)

    monkeypatch.setattr(Mover, "_receive_rest", lose)
    with fleet:
        served.submit()
        name = list(served.asked)[-1]
        source = fleet.instance_of(name)
        assert source is not None, "it has ended"
        fleet._groups.ranks.ask(source, PauseSteps())  # so that it lives until it is moved
        with suppress(StateError):  # unless all was copied before
            fleet.move(name, next(rank.name for rank in fleet.status().ranks if rank.name != source))
        assert lost == [source]
        served.heard.wait(list(served.asked))
        for request, prompt in served.asked.items():
            assert is_continuation(served.plain, prompt, TOKENS, served.heard.tokens[request])
        fleet.check()
    for model in served.models:
        elastic.unwrap(model)


FAR = """
import faulthandler, os, sys
from elastic.memory.backends import rank_memory, shared_file

faulthandler.cancel_dump_traceback_later()  # its thread would be missing in the fork
number = 1 if os.fork() else 0
name = f"{{shared_file.host_name().split('/')[0]}}/n{{number}}"
shared_file.host_name = rank_memory.host_name = lambda: name
rank_memory.OpenFile = None
from elastic.cluster.rank import rank

rank.host_name = lambda: name
from elastic.cli.main import main

sys.exit(main([*{arguments}, "--name", f"far{{number}}", "--place", f"cpu#{{number}}=24MiB"]))
"""
"""Two ranks in process namespaces of their own: nobody finds their memory files."""


def test_processes_that_find_no_memory_file_of_each_other_exchange_requests_and_layers(tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    key_file, heard, asked = make_key_file(tmp_path / "key"), Collector(), dict[str, tuple[int, ...]]()
    with ExitStack() as stack:
        launcher = JoinLauncher(key_file, start_timeout_s=120)
        stack.callback(launcher.close)
        fleet = Fleet(str(MODEL_DIR), ranks=2, launch=launcher, replace=False, beat_timeout_s=60)
        where = f"{launcher.address[0]}:{launcher.address[1]}"
        arguments = ["rank", str(MODEL_DIR), "--join", where, "--key-file", str(key_file)]
        stack.enter_context(closing(Forked(FAR.format(arguments=arguments))))
        stack.callback(fleet.stop, drain=False)
        fleet.start()
        names = [rank.name for rank in fleet.status().ranks]
        for prompt in prompts([20, 33, 9, 48], 512, seed=3):
            request = Request(prompt, 400, ignore_eos=True)
            asked[request.id] = prompt
            fleet.submit(request, heard)
        for name in asked:
            heard.wait_for_tokens(name, 5)
        for name in asked:
            moved = fleet.move(name, next(rank for rank in names if rank != fleet.instance_of(name)))
            assert moved.recomputed_tokens == 0
        assert all(sum(wire.read_bytes for wire in fleet.look(rank).wires) > 0 for rank in names)
        half = len(fleet.layer_bytes()) // 2
        dropped = fleet.drop(layers={names[0]: range(half), names[1]: range(half, 2 * half)})
        assert (dropped.status, dropped.flips) == ("applied", 2 * half)
        restored = fleet.restore()
        assert restored.status == "applied"
        assert 0 < restored.fetched_bytes <= dropped.freed_bytes
        heard.wait(list(asked))
        for name, prompt in asked.items():
            assert heard.ends[name].finish == "length", heard.ends[name]
            assert same_unless_close(plain, prompt, heard.tokens[name])
        fleet.check()
        assert fleet.status().totals.recomputed_tokens == 0
