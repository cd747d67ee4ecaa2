"""Index tensors of a batch that streams of several places use: none reads what another has not written yet."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from elastic.engines.executor.attention_metadata import MetadataBuilder
from elastic.engines.executor.block_layout import BlockLayout, BlockShape
from elastic.engines.executor.input_batch import BatchBlockTable, BatchTokens, Ints
from elastic.engines.executor.paged_cache import PagedCache
from elastic.kvcache.storage.paged import BlockMemory
from elastic.kvcache.storage.pool import KVPool
from elastic.kvcache.storage.sector_space import BlockGroup
from elastic.memory.backends.cuda import CudaBackend
from elastic.memory.backends.streams import new_stream, on_stream
from elastic.memory.pages.page_pool import PagePool

pytestmark = pytest.mark.cuda
DEVICE = torch.device("cuda:0")
LAYOUT = BlockLayout(BlockShape(8, 2, 8), "head_centric")


def test_parts_of_a_batch_are_described_on_streams_of_their_own(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By two threads: the other one's turn comes as the first waits for how many tokens are seen."""
    table = BatchBlockTable(8, None)
    for row in range(4):
        table.begin(row)
        table.extend(row, np.array([2 * row, 2 * row + 1]))
    builder = MetadataBuilder(LAYOUT, table, DEVICE, torch.float32)
    batch, masks = BatchTokens(np.arange(4), np.full(4, 9), np.ones(4, np.int64)), []
    streams, copy = [new_stream(DEVICE), new_stream(DEVICE)], builder._to_device

    def build(part: int) -> None:
        with on_stream(streams[part]):
            some = slice(2 * part, 2 * part + 2)
            masks.append(
                builder.build(BatchTokens(batch.rows[some], batch.starts[some], batch.counts[some])).decodes[0].mask
            )

    def build_other_before_copy(array: Ints) -> torch.Tensor:
        if array.tolist() == [10, 10]:
            monkeypatch.setattr(builder, "_to_device", copy)
            build(1)
        return copy(array)

    monkeypatch.setattr(builder, "_to_device", build_other_before_copy)
    build(0)
    assert simulator.violations() == []
    torch.cuda.synchronize(DEVICE)
    assert [mask[:, 0, 0].isinf().sum(1).tolist() for mask in masks] == [[6, 6], [6, 6]]


def test_heads_are_chosen_on_one_stream_and_used_on_another(simulator: ModuleType) -> None:
    backend = CudaBackend(DEVICE)
    pool = PagePool("cuda:0#test", backend, 8 * backend.page_bytes, ready_pages=0)
    kv = KVPool(pool, 8 * backend.page_bytes, idle_share=1.0, ready_share=0)
    memory = BlockMemory(kv, [BlockGroup((0,), LAYOUT.block_elements * 4)])
    cache = PagedCache(memory, [BatchBlockTable(8, None)], LAYOUT, torch.float32)
    used = []
    for stream in (new_stream(DEVICE), new_stream(DEVICE)):
        with on_stream(stream):
            parts = cache.choose(0, None, 1, 6).parts
            used.append(parts.places + parts.first_blocks)
    assert simulator.violations() == []
    torch.cuda.synchronize(DEVICE)
    assert [places.tolist() for places in used] == [[[0], [1]]] * 2
    del used, parts
    cache.close()
    memory.close()
