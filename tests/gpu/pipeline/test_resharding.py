"""A fleet of ranks on GPUs whose degree of tensor parallelism changes while it serves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

import elastic
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.peers.memory import device as devices_of_ranks
from elastic.engines.base import Request
from support import architectures
from support.pipeline.wide_model import GPU_PAGE, LAYERS, SHARDS, wide
from support.serving.generations import Collector, prompts, same_unless_close

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("no_violations")]
TWO_DEVICES = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="there is one CUDA device")
ON_ONE_AND_TWO = pytest.mark.parametrize("devices", [(0,), pytest.param((0, 1), marks=TWO_DEVICES)], ids=["one", "two"])
PROMPTS = prompts([5, 40, 17, 12], architectures.VOCAB)
MATRIX_PAGES = 3 * SHARDS * LAYERS
"""Of a rank's matrices that are cut."""


@contextmanager
def fleet_of(ranks: int, devices: Sequence[int]) -> Iterator[tuple[Fleet, list[Any]]]:
    """Ranks on these devices in turn, started; stopped behind it."""
    models = []
    for number in range(ranks):
        device = torch.device("cuda", devices[number % len(devices)])
        models.append(wide(str(device)))
        elastic.wrap(models[-1], places=[elastic.Place(f"{device}#{number}", device, 256 << 20)], shards=SHARDS)
    fleet = Fleet.of(*models, engine={"block_tokens": 8192, "max_batch_tokens": 64}, beat_timeout_s=60)
    fleet.start()
    try:
        yield fleet, models
    finally:
        fleet.stop(drain=False)
        for model in models:
            elastic.unwrap(model)


def begin(fleet: Fleet, heard: Collector, tokens: int, names: str = "r") -> list[str]:
    for number, prompt in enumerate(PROMPTS):
        fleet.submit(Request(prompt, tokens, id=f"{names}{number}"), heard)
    return [f"{names}{number}" for number in range(len(PROMPTS))]


def end(heard: Collector, names: Sequence[str], tokens: int) -> None:
    """See that each request has the plain model's tokens, nearly equal ones apart."""
    heard.wait(names)
    model = wide()
    for name, prompt in zip(names, PROMPTS, strict=True):
        assert len(heard.tokens[name]) == tokens, heard.ends[name]
        assert same_unless_close(model, prompt, heard.tokens[name])


@ON_ONE_AND_TWO
@pytest.mark.parametrize("layers_per_step", [1, None])
def test_two_instances_share_every_layer_and_part_under_running_requests(
    devices: tuple[int, ...], layers_per_step: int | None
) -> None:
    with fleet_of(2, devices) as (fleet, models):
        heard = Collector()
        names = begin(fleet, heard, 60)
        for name in names:
            heard.wait_for_tokens(name, 2)
        done = fleet.reshard(["r0", "r1"], tp=2, layers_per_step=layers_per_step)
        assert (done.status, done.why, done.tp) == ("applied", "", 2)
        assert done.freed_bytes == MATRIX_PAGES * GPU_PAGE  # half of the parts, at two ranks
        half = SHARDS // 2
        for model, gone in zip(models, (range(half, SHARDS), range(half)), strict=True):
            expected = tuple(layer * SHARDS + part for layer in range(LAYERS) for part in gone)
            assert model.elastic.dropped_shards == expected
        fleet.check()
        beside = begin(fleet, heard, 8, "beside")
        end(heard, beside, 8)
        back = fleet.reshard("r0", tp=1, layers_per_step=layers_per_step)
        assert (back.status, back.why, back.fetched_bytes) == ("applied", "", done.freed_bytes)
        assert [model.elastic.dropped_shards for model in models] == [(), ()]
        end(heard, names, 60)
        assert fleet.status().totals.recomputed_tokens == 0
        fleet.check()


@ON_ONE_AND_TWO
def test_keys_values_and_weights_go_from_device_to_device(devices: tuple[int, ...], simulator: ModuleType) -> None:
    with fleet_of(2, devices) as (fleet, _):
        heard = Collector()
        names = begin(fleet, heard, 60)
        for name in names:
            heard.wait_for_tokens(name, 2)
        before = simulator.count("host_bytes")
        done = fleet.reshard(["r0", "r1"], tp=2)
        back = fleet.reshard("r0", tp=1)
        passed_host = simulator.count("host_bytes") - before
        assert [(each.status, each.why) for each in (done, back)] == [("applied", "")] * 2
        wires = [wire for rank in ("r0", "r1") for wire in fleet.look(rank).wires]
        moved = done.moved_bytes + back.moved_bytes + back.fetched_bytes
        assert sum(wire.copied_bytes for wire in wires) == moved
        assert sum(wire.read_bytes for wire in wires) == 0
        assert passed_host < moved // 10, "what steps need meanwhile"
        end(heard, names, 60)


def test_without_buffers_keys_and_values_come_by_way_of_page_locked_memory(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So copies of them are as fast as the bus, and not staged by the driver while a lock is held."""
    monkeypatch.setattr(devices_of_ranks, "_made_for", lambda pool: None)
    with fleet_of(2, (0,)) as (fleet, _):
        heard = Collector()
        names = begin(fleet, heard, 60)
        for name in names:
            heard.wait_for_tokens(name, 2)
        before = simulator.count("pageable_h2d_bytes")
        done = fleet.reshard(["r0", "r1"], tp=2)
        pageable = simulator.count("pageable_h2d_bytes") - before
        assert fleet.reshard("r0", tp=1).status == "applied"
        assert (done.status, done.why) == ("applied", "")
        assert pageable < done.moved_bytes // 10
        end(heard, names, 60)


@ON_ONE_AND_TWO
def test_four_instances_go_up_and_down_the_degrees(devices: tuple[int, ...]) -> None:
    with fleet_of(4, devices) as (fleet, models):
        heard, ranks = Collector(), [f"r{number}" for number in range(4)]
        names = begin(fleet, heard, 80)
        for turn, tp in enumerate((2, 4, 2, 1)):
            heard.wait_for_tokens(names[0], 4 * (turn + 1))
            done = fleet.reshard(ranks, tp=tp)
            assert (done.status, done.why) == ("applied", "")
            here = [sum(map(len, model.elastic.shards_here)) for model in models]
            assert here == [SHARDS * LAYERS // tp] * 4
            fleet.check()
        end(heard, names, 80)
        assert fleet.status().totals.recomputed_tokens == 0
        assert fleet.groups() == ()


@ON_ONE_AND_TWO
def test_pairs_that_share_layers_drop_some_and_take_them_back_as_pairs(devices: tuple[int, ...]) -> None:
    with fleet_of(4, devices) as (fleet, models):
        heard, ranks = Collector(), [f"r{number}" for number in range(4)]
        names = begin(fleet, heard, 80)
        for name in names:
            heard.wait_for_tokens(name, 2)
        assert fleet.reshard(ranks, tp=2).status == "applied"
        dropped = fleet.drop(layers={"r0": [1], "r1": [1], "r2": [0], "r3": [0]})
        assert (dropped.status, dropped.why) == ("applied", "")
        assert dropped.freed_bytes >= 2 * MATRIX_PAGES // LAYERS * GPU_PAGE, "a layer of each pair"
        (group,) = fleet.groups()
        assert [path.holders(1) for path in group.paths.values()] == [("r2", "r3")] * 4
        assert [set(model.elastic.dropped_shards) & {4, 5, 6, 7} for model in models[:2]] == [{4, 5, 6, 7}] * 2
        fleet.check()
        heard.wait_for_tokens(names[0], min(80, len(heard.tokens[names[0]]) + 4))
        restored = fleet.restore(sharing=True)
        assert (restored.status, restored.why) == ("applied", "")
        assert [(group.members, group.tp) for group in fleet.groups()] == [(("r0", "r1"), 2), (("r2", "r3"), 2)]
        fleet.check()
        assert fleet.reshard(ranks, tp=1).status == "applied"
        assert [model.elastic.dropped_shards for model in models] == [()] * 4
        end(heard, names, 80)
        assert fleet.status().totals.recomputed_tokens == 0
        assert fleet.groups() == ()
