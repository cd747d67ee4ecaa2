"""vLLM's placements of layers in one buffer, cut into sectors; and a rank that maps them as it is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from elastic import BackendUnavailable, CapacityError, ConfigError, StateError
from elastic.engines.vllm.kv.admission import GroupDemand, PromiseLedger
from elastic.engines.vllm.kv.orders import (
    RankState,
    RequestEvent,
    StepOrders,
    StepReport,
    StepTokens,
    find_orders,
    refuse_connector,
)
from elastic.engines.vllm.kv.sectors import KVSectors, Region, blocks_per_sector, regions_of
from elastic.engines.vllm.kv.worker_channel import WorkerChannel
from elastic.kvcache.storage.budget import WeightsShare
from elastic.kvcache.storage.pool import KVPool
from elastic.memory.backends.memfd import MemfdBackend
from elastic.memory.pages.background import janitor
from elastic.memory.pages.page_pool import PagePool
from support.vllm_engine import rank
from support.vllm_engine.blocks import make_coordinator
from support.vllm_engine.rank import Placement, StubModel, finish_background, layer_outermost, settle

PAGE = 4096
BLOCK = 3 * 1024  # of one layer: 4 blocks are 3 pages
LAYERS = 2
BLOCKS = 40
SECTOR_PAGES = 6


@pytest.fixture
def pool() -> Iterator[PagePool]:
    janitor.start()
    pool = PagePool("cpu", MemfdBackend(PAGE), 64 * PAGE, ready_pages=0)
    yield pool
    pool.close()


def make_channel(pool: PagePool, limit_pages: int) -> tuple[WorkerChannel, StubModel]:
    kv = KVPool(pool, 60 * PAGE)
    kv.resize(limit_pages * PAGE)
    return rank.make_channel(kv, layer_outermost("ab", BLOCKS, BLOCK), BLOCKS)


def test_regions_are_found_in_every_layout() -> None:
    assert regions_of(layer_outermost("ab", BLOCKS, BLOCK)) == (Region(0, BLOCK), Region(BLOCKS * BLOCK, BLOCK))
    block_outermost = [Placement(1, ["a", "b"], 64, 256), Placement(1, ["c"], 128, 256, offset=128)]
    assert regions_of(block_outermost) == (Region(0, 256),)
    overlaid = [Placement(1, ["a"], 4096, 64), Placement(1, ["b"], 4096, 64)]
    assert regions_of(overlaid) == (Region(0, 64),), "groups use the same bytes"
    assert blocks_per_sector([BLOCK, 1024], PAGE) == 4
    assert blocks_per_sector([5 * PAGE], PAGE) == 1


def test_vllms_one_allocation_gets_our_memory(pool: PagePool) -> None:
    channel, _ = make_channel(pool, 12)
    sectors = channel.sectors
    with pytest.raises(BackendUnavailable, match="0 times"), sectors.allocation():
        pass
    with sectors.allocation():
        assert torch.zeros(8, dtype=torch.int8).sum() == 0, "others get their own"
        memory = torch.zeros(sectors.nbytes, dtype=torch.int8, device="cpu")
    memory[: 8 * BLOCK] = 7
    assert memory.data_ptr() == sectors.range.address
    with pytest.raises(StateError, match="one KV connector in a process"), sectors.allocation():
        pass


def test_a_sector_is_mapped_in_every_layer_and_clean(pool: PagePool) -> None:
    channel, model = make_channel(pool, 12)
    sectors = channel.sectors
    assert (sectors.blocks_per_sector, sectors.sector_pages, sectors.mapped) == (4, SECTOR_PAGES, 2)
    memory = sectors._storage.tensor(torch.int8)
    memory[: 8 * BLOCK] = 7
    memory[BLOCKS * BLOCK : (BLOCKS + 8) * BLOCK] = 9
    sectors.unmap_to(1)
    assert pool.pages_of("kv") == SECTOR_PAGES
    sectors.map()
    second = memory[4 * BLOCK : 8 * BLOCK], memory[(BLOCKS + 4) * BLOCK : (BLOCKS + 8) * BLOCK]
    assert not any(part.any() for part in second)
    assert memory[0] == 7
    model.kv.check()
    del memory, second


def test_blocks_are_copied_in_every_layer(pool: PagePool) -> None:
    channel, _ = make_channel(pool, 12)
    with channel.sectors.allocation():
        memory = torch.zeros(channel.sectors.nbytes, dtype=torch.int8)
    layers = memory.view(LAYERS, BLOCKS, BLOCK)[:, :8]
    layers[:] = torch.arange(16, dtype=torch.int8).view(2, 8, 1)
    channel.sectors.copy_blocks([(7, 1), (4, 2)])
    assert layers[:, :, -1].tolist() == [[0, 7, 4, *range(3, 8)], [8, 15, 12, *range(11, 16)]]
    assert torch.equal(layers.amin(-1), layers.amax(-1)), "whole blocks"
    del memory, layers


def test_a_rank_that_is_closed_gives_pages_back_and_addresses_with_the_last_tensor(pool: PagePool) -> None:
    channel, model = make_channel(pool, 12)
    with channel.sectors.allocation():
        memory = torch.zeros(channel.sectors.nbytes, dtype=torch.int8)
    channel.close()
    channel.close()
    model.kv.check()
    assert pool.pages_of("kv") == 0
    assert not channel.sectors.map()
    assert (channel.report(), channel.sectors.range._closed) == (None, False)
    assert memory[0] == 0, "vLLM may still print it"
    del memory
    finish_background()
    assert channel.sectors.range._closed


def test_memory_that_is_no_whole_pages_is_refused(pool: PagePool) -> None:
    kv = KVPool(pool, 60 * PAGE)
    with pytest.raises(ConfigError, match="raise the budget"):
        KVSectors(kv, [Placement(LAYERS * 41 * BLOCK, ["a", "b"], 41 * BLOCK, BLOCK)], 41)


def test_a_model_without_a_kv_cache_is_refused(pool: PagePool) -> None:
    with pytest.raises(ConfigError, match="no KV cache"):
        KVSectors(KVPool(pool, 60 * PAGE), [], 1)


def test_a_rank_follows_its_limit_by_orders_alone(pool: PagePool) -> None:
    channel, model = make_channel(pool, 12)
    coordinator = make_coordinator(BLOCKS)
    coordinator.connect([channel.handshake()])
    for limit, sectors in ((30, 5), (7, 1), (60, 10), (13, 2)):
        model.kv.resize(limit * PAGE)
        settle(channel, coordinator)
        assert channel.sectors.mapped == sectors
        assert coordinator.capacity.usable == sectors * 4 - 1
        model.kv.check()
    assert model.kv.engine_usage is not None
    assert model.kv.engine_usage() == (0, 7 * 2 * BLOCK)


def test_what_is_mapped_and_not_used_is_idle(pool: PagePool) -> None:
    channel, model = make_channel(pool, 30)
    channel.before_step(StepOrders(sequence=0, sectors=5, used_blocks=3, capacity_blocks=19))
    status = model.kv.status()
    assert (status.used_bytes, status.used_bytes + status.idle_bytes) == (3 * LAYERS * BLOCK, 30 * PAGE)
    channel.before_step(StepOrders(sequence=0, sectors=5, used_blocks=0, capacity_blocks=19))
    assert model.kv.status().idle_bytes == pool.pages_of("kv") * PAGE


def test_weights_get_pages_back_when_sectors_are_unmapped(pool: PagePool) -> None:
    channel, model = make_channel(pool, 60)
    share = WeightsShare(model.kv)
    came_free = []
    pool.listeners.append(lambda: came_free.append(pool.free_pages))
    assert not share.take_from_cache(30)
    share.hold_back(30)
    coordinator = make_coordinator(BLOCKS)
    coordinator.connect([channel.handshake()])
    channel.before_step(coordinator.next_orders())
    assert came_free[-1] >= 30
    assert share.take_from_cache(30)
    share.hold_back(0)


def test_pages_that_cannot_be_had_end_the_growth_but_not_the_service(pool: PagePool) -> None:
    channel, model = make_channel(pool, 12)
    model.kv.resize(60 * PAGE)
    others = pool.allocate("other", pool.free_pages - SECTOR_PAGES)
    channel.before_step(StepOrders(sequence=1, sectors=9))
    finish_background()
    report = channel.report()
    assert report is not None
    state = report.ranks[0]
    assert (state.sequence, state.mapped, state.target) == (1, 3, 3)
    with pytest.raises(CapacityError):
        channel.sectors.map()
    pool.free(others)
    model.kv.check()


def test_no_sector_is_mapped_in_pages_that_weights_took_since_it_was_ordered(pool: PagePool) -> None:
    """They would lack them, and a restore fail."""
    channel, model = make_channel(pool, 12)
    model.kv.resize(60 * PAGE)
    assert WeightsShare(model.kv).take_from_cache(30)
    channel.before_step(StepOrders(sequence=1, sectors=9))
    finish_background()
    assert channel.sectors.mapped == 30 // SECTOR_PAGES
    assert not channel._state().unsettled
    pool.free(pool.allocate("layer", 30))
    model.kv.check()


def test_pages_that_could_not_be_had_are_asked_for_again_without_a_step(
    pool: PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine without requests in the caller's process takes none."""
    later: list[Callable[[], object]] = []
    timer = SimpleNamespace(start=lambda: None)
    monkeypatch.setattr(threading, "Timer", lambda seconds, call: later.append(call) or timer)
    channel, model = make_channel(pool, 12)
    model.kv.resize(60 * PAGE)
    others = pool.allocate("other", pool.free_pages)
    channel.before_step(StepOrders(sequence=1, sectors=9))
    finish_background()
    assert channel._state().unsettled
    told: list[RankState] = []
    channel.on_change = lambda: told.append(channel._state())
    pool.free(others)
    (retry,) = later
    retry()
    finish_background()
    assert [(state.mapped, state.target, state.unsettled) for state in told] == [(2, 10, False)]


def test_pages_that_cannot_be_had_are_asked_for_once_in_a_while_and_told_of_once(
    pool: PagePool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    later: list[Callable[[], object]] = []
    timer = SimpleNamespace(start=lambda: None)
    monkeypatch.setattr(threading, "Timer", lambda seconds, call: later.append(call) or timer)

    def no_memory(pages: object) -> None:
        raise CapacityError("no mappings are left", requested_bytes=1, free_bytes=0, total_bytes=0)

    monkeypatch.setattr(pool.backend, "create", no_memory)
    channel, model = make_channel(pool, 12)
    assert (channel.sectors.mapped, "no mappings are left" in channel.handshake().error) == (0, True)
    for sequence in (1, 2, 3):
        channel.before_step(StepOrders(sequence=sequence, sectors=2))
        finish_background()
        assert channel._state().sequence == sequence
    assert len(later) == 1
    later.pop()()
    channel.before_step(StepOrders(sequence=4, sectors=2))
    finish_background()
    assert (len(later), len(caplog.records)) == (1, 1)
    monkeypatch.undo()
    later.pop()()
    channel.before_step(StepOrders(sequence=5, sectors=2))
    finish_background()
    assert (channel.sectors.mapped, channel.handshake().error, later) == (2, "", [])
    model.kv.check()


def test_a_request_alone_gets_what_it_needs_beyond_the_limit(pool: PagePool) -> None:
    channel, model = make_channel(pool, SECTOR_PAGES)
    promises = PromiseLedger([GroupDemand(1)], longest=20)
    coordinator = make_coordinator(BLOCKS, promises)
    coordinator.connect([channel.handshake()])
    assert not promises.may_enter("long", 20, coordinator.room)
    for _ in range(3):
        channel.before_step(coordinator.next_orders())
        finish_background()
        coordinator.receive(channel.report() or StepReport({}))
    assert promises.may_enter("long", 20, coordinator.room)
    promises.enter("long", 20)
    assert not promises.may_enter("another", 1, coordinator.room)
    promises.leave("long")
    promises.leave("another")
    channel.before_step(coordinator.next_orders())
    assert channel.sectors.mapped == 1
    assert model.kv.usage.used == SECTOR_PAGES


def test_what_happened_to_requests_reaches_the_counters(pool: PagePool) -> None:
    channel, model = make_channel(pool, 12)
    told = (
        RequestEvent("arrived", "a", 5, 0.0),
        RequestEvent("scheduled", "a", 0, 1.0),
        StepTokens({"a": 1}, 2.0),
        StepTokens({"a": 1}, 3.0),
        RequestEvent("preempted", "a", 0, 4.0),
        RequestEvent("completed", "a", 0, 5.0),
    )
    channel.before_step(StepOrders(requests=told))
    stats = model.counters.read(6.0)
    assert (stats.arrived, stats.completed, stats.prompt_tokens, stats.generated_tokens) == (1, 1, 5, 2)
    assert stats.preemptions == 1
    assert stats.ttft_s.count == 1


def test_orders_are_found_among_those_of_several_connectors() -> None:
    @dataclass
    class Several:
        metadata: tuple[object, ...]

    orders = StepOrders(sequence=3)
    assert find_orders(Several((object(), orders))) is orders
    assert find_orders(Several((object(),))) is None
    assert find_orders(None) is None


@pytest.mark.parametrize("name", ["NixlConnector", "MooncakeConnector"])
def test_connectors_that_register_all_memory_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} registers all KV memory"):
        refuse_connector({"kv_connector": name})
    inner = {"connectors": [{"kv_connector": "OffloadingConnector"}, {"kv_connector": name}]}
    with pytest.raises(ConfigError, match="registers"):
        refuse_connector({"kv_connector": "MultiConnector", "kv_connector_extra_config": inner})
    refuse_connector({"kv_connector": "OffloadingConnector"})
