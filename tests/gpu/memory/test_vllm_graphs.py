"""A step of vLLM's in a CUDA graph, over weights and KV blocks in pages: replayed only while all it reads is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.engines.vllm.assembly import ElasticModel
from elastic.engines.vllm.client.settings import EngineSettings
from elastic.engines.vllm.kv.sectors import KVSectors
from elastic.engines.vllm.kv.worker_channel import WorkerChannel
from elastic.engines.vllm.model.graphs import CapturedGraphs
from elastic.memory.backends.streams import capture_lock
from elastic.memory.pages.background import janitor
from support.architectures import build
from support.vllm_engine.blocks import make_coordinator
from support.vllm_engine.rank import layer_outermost, settle

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("no_violations")]
DEVICE = torch.device("cuda:0")
PER_SECTOR, SECTORS = 4, 8
BLOCKS = PER_SECTOR * SECTORS


class CapturedStep:
    """A step that reads every layer's weights and writes and reads a block of every layer: eager, or a graph."""

    def __init__(self, model: Any, elastic: ElasticModel) -> None:
        self.elastic, self.layers = elastic, model.model.layers
        sectors = KVSectors(
            elastic.kv, layer_outermost("abc", BLOCKS, elastic.kv.pool.page_bytes // PER_SECTOR), BLOCKS
        )
        self.channel = elastic.channel = WorkerChannel(elastic, sectors)
        with sectors.allocation():
            memory = torch.zeros(sectors.nbytes, dtype=torch.int8, device=DEVICE)
        self.blocks = memory.view(3, BLOCKS, -1).view(torch.float32)
        self.coordinator = make_coordinator(BLOCKS)
        self.coordinator.connect([self.channel.handshake()])
        self.inputs = torch.linspace(-1, 1, 32, device=DEVICE)
        self.graph = torch.cuda.CUDAGraph()
        self.keys_initialized = True  # vLLM's dispatcher has graphs to replay
        self.replays = 0

    def compute(self) -> torch.Tensor:
        """Return what the layers make of the inputs, [32], by way of block 1 of each."""
        hidden = self.inputs
        for number, layer in enumerate(self.layers):
            block = self.blocks[number, 1, :32]
            block.copy_(layer.mlp(hidden))
            hidden = hidden + block
        return hidden

    def capture(self) -> None:
        """Capture the step, as vLLM does at its start."""
        janitor.finish()  # pages that are made beside a capture would end it
        janitor.start()
        with capture_lock, torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.output = self.compute()
        runner = SimpleNamespace(cudagraph_dispatcher=self)
        self.elastic.graphs = CapturedGraphs(runner, self.elastic.addresses, self.elastic.gate)
        self.elastic.graphs.note_capture()

    def run(self) -> torch.Tensor:
        """Step as a worker does."""
        self.elastic.begin_forward()
        try:
            if not self.keys_initialized:
                return self.compute().cpu()
            self.graph.replay()
            self.replays += 1
            return self.output.cpu()
        finally:
            self.elastic.end_forward()

    def map_to(self, sectors: int) -> None:
        """Have so many sectors be mapped."""
        self.elastic.kv.resize(sectors * self.channel.sectors.sector_pages * self.elastic.kv.pool.page_bytes)
        settle(self.channel, self.coordinator)
        assert self.channel.sectors.mapped == sectors


@pytest.fixture
def step(simulator: ModuleType) -> Iterator[CapturedStep]:
    model = build("llama-gqa", device="cuda:0")
    made = ElasticModel(
        model,
        EngineSettings(256 << 20, variants=("int8",)),
        DEVICE,
        instance="graphs",
        is_packable=lambda _, parameter: parameter.ndim == 2,
        find_files=str,
    )
    with closing(made):
        yield CapturedStep(model, made)
        torch.cuda.synchronize()


def test_a_graph_is_replayed_while_weights_are_where_they_were_whatever_blocks_come_and_go(step: CapturedStep) -> None:
    rt, expected = step.elastic.runtime, step.compute().cpu()
    step.map_to(2)
    step.capture()
    assert torch.equal(step.run(), expected)
    for sectors in (5, 1, 3):
        step.map_to(sectors)
        step.inputs.mul_(1)  # something is queued
        assert torch.equal(step.run(), expected)
    assert step.replays == 4
    rt.release([0, 2])
    assert torch.equal(step.run(), expected)
    rt.swap([1], "int8")
    assert not torch.equal(step.run(), expected), "computed with packed weights, not by the graph"
    step.map_to(4)  # of what the layers gave up
    assert step.replays == 4
    rt.restore()
    step.inputs.copy_(-step.inputs)
    again = step.run()
    assert step.replays == 5
    assert torch.equal(again, step.compute().cpu())
    assert not torch.equal(again, expected)
