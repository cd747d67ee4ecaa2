"""vLLM's KV cache and weights on a GPU, without vLLM: what its steps have queued is over before pages go or come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from types import ModuleType

import pytest
import torch

from elastic.engines.vllm.assembly import ElasticModel
from elastic.engines.vllm.client.settings import EngineSettings
from elastic.engines.vllm.kv.coordinator import CapacityCoordinator
from elastic.engines.vllm.kv.orders import StepOrders
from elastic.engines.vllm.kv.worker_channel import WorkerChannel
from elastic.kvcache.storage.pool import KVPool
from elastic.memory.backends import streams
from elastic.memory.backends.cuda import CudaBackend
from elastic.memory.pages.background import janitor
from elastic.memory.pages.page_pool import PagePool
from support.architectures import build, prompt
from support.vllm_engine.blocks import make_coordinator
from support.vllm_engine.rank import finish_background, layer_outermost, make_channel, settle

pytestmark = pytest.mark.cuda
DEVICE = torch.device("cuda:0")
PER_SECTOR, SECTORS = 4, 8
BLOCKS = PER_SECTOR * SECTORS


@dataclass
class Rank:
    """Its memory, and what a step sees of it: int8 [layers, blocks, bytes of a block]."""

    kv: KVPool
    channel: WorkerChannel
    coordinator: CapacityCoordinator
    blocks: torch.Tensor = field(repr=False)  # most of it is not mapped

    def follow(self, sectors: int) -> None:
        """Have it map or unmap as far as the limit says, which is of so many sectors."""
        self.kv.resize(sectors * self.channel.sectors.sector_pages * self.kv.pool.page_bytes)
        settle(self.channel, self.coordinator)
        assert self.channel.sectors.mapped == sectors


@pytest.fixture
def rank(simulator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    monkeypatch.setattr(streams, "_used", {})  # torch deals out the same 32 again and again
    janitor.start()
    backend = CudaBackend(DEVICE)
    pool = PagePool("cuda:0#vllm", backend, 64 * backend.page_bytes, ready_pages=0)
    kv = KVPool(pool, 60 * pool.page_bytes)
    kv.resize(4 * pool.page_bytes)
    channel, _ = make_channel(kv, layer_outermost("ab", BLOCKS, pool.page_bytes // PER_SECTOR), BLOCKS)
    with channel.sectors.allocation():
        memory = torch.zeros(channel.sectors.nbytes, dtype=torch.int8, device=DEVICE)
    coordinator = make_coordinator(BLOCKS)
    coordinator.connect([channel.handshake()])
    assert channel.sectors.mapped == 2
    yield Rank(kv, channel, coordinator, memory.view(2, BLOCKS, -1))
    del memory
    torch.cuda.synchronize()
    channel.sectors.unmap_to(0)
    channel.close()
    kv.close()
    pool.close()


@pytest.mark.parametrize("side", [False, True])
def test_blocks_are_unmapped_when_the_steps_that_use_them_are_over(rank: Rank, side: bool) -> None:
    """Steps that compute on the default stream, or on one of their own: the orders come on that."""
    withdrawn = rank.blocks[:, PER_SECTOR : 2 * PER_SECTOR]
    with torch.cuda.stream(torch.cuda.Stream(DEVICE) if side else torch.cuda.default_stream(DEVICE)):
        total = withdrawn.fill_(3).sum()
        rank.follow(1)
        assert int(total) == 3 * withdrawn.numel()


def test_a_new_block_is_zero_for_a_step_on_any_stream_and_then_the_steps(rank: Rank) -> None:
    """It is cleared on the stream of the thread that maps it, of which the stream of the steps does not know."""
    rank.follow(4)
    new = rank.blocks[:, 2 * PER_SECTOR : 4 * PER_SECTOR]
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
        found = new.count_nonzero()
        total = new[:, :3].fill_(5).sum()
        assert int(found) == 0
        assert int(total) == 5 * new[:, :3].numel()


def test_blocks_are_mapped_while_steps_are_under_way(rank: Rank, simulator: ModuleType) -> None:
    """Neither for the device nor for the stream of a step does anybody wait, which may be the default one."""
    simulator.schedule("lazy")
    rank.channel.before_step(StepOrders())
    total = rank.blocks[:, :1].fill_(2).sum()
    step, before = torch.cuda.current_stream(DEVICE).record_event(), simulator.count("device_sync")
    rank.channel.before_step(StepOrders(sequence=1, sectors=3))
    finish_background()
    assert rank.channel.sectors.mapped == 3
    assert simulator.count("device_sync") == before
    assert not step.query()
    assert int(total) == 2 * rank.blocks[:, :1].numel()


def test_weights_leave_when_the_steps_that_read_them_are_over(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stream the engine computes its steps on, of which nothing but `begin_forward` tells."""
    monkeypatch.setattr(streams, "_used", {})
    plain, inputs = build("llama-gqa", device="cuda:0"), prompt(2, device="cuda:0")
    expected, model = plain(**inputs).logits, build("llama-gqa", device="cuda:0")
    settings = EngineSettings(1 << 30)
    made = ElasticModel(
        model, settings, torch.device("cuda"), instance="a", is_packable=lambda *_: False, find_files=str
    )
    torch.cuda.synchronize()
    with closing(made) as elastic, torch.cuda.stream(torch.cuda.Stream(DEVICE)):
        elastic.begin_forward()
        logits = model(**inputs).logits
        elastic.end_forward()
        elastic.runtime.release([0, 1, 2])
        assert torch.equal(logits.cpu(), expected.cpu())
        elastic.begin_forward()
        streamed = model(**inputs).logits
        elastic.end_forward()
        elastic.runtime.restore()
        assert torch.equal(streamed.cpu(), expected.cpu())
