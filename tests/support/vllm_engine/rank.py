"""What a rank has beside its KV cache, without vLLM: where layers lie in one buffer, and what orders are for."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic.controller.sensors.request_metrics import RequestMetrics
from elastic.engines.vllm.agreement import RankAgreement
from elastic.engines.vllm.kv.coordinator import CapacityCoordinator
from elastic.engines.vllm.kv.orders import StepReport
from elastic.engines.vllm.kv.prefixes import Weights
from elastic.engines.vllm.kv.sectors import KVSectors
from elastic.engines.vllm.kv.worker_channel import WorkerChannel
from elastic.hooks.forward_gate import ForwardGate
from elastic.kvcache.storage.pool import KVPool
from elastic.memory.pages.background import janitor


@dataclass
class Placement:
    """vLLM's `KVCacheTensor`."""

    size: int
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int = 0


def layer_outermost(layers: Sequence[str], blocks: int, block_bytes: int) -> list[Placement]:
    """Each layer has a region of its own."""
    stride = blocks * block_bytes
    return [Placement(len(layers) * stride, list(layers), stride, block_bytes)]


@dataclass
class StubModel:
    """What a channel needs of an elastic model."""

    kv: KVPool
    counters: RequestMetrics = field(default_factory=RequestMetrics)
    actions: RankAgreement = field(default_factory=RankAgreement)
    written: int = 0
    """How often layers got other weights."""
    rank: int = 0
    gate: ForwardGate = field(default_factory=ForwardGate)
    waiting: bool = False
    working: bool = False
    channel: WorkerChannel | None = None

    def weights(self) -> Weights:
        """Name them by how often they were written."""
        return self.written, b""

    def close(self) -> None:
        """Nothing to give back."""


def make_channel(kv: KVPool, tensors: Sequence[Placement], blocks: int) -> tuple[WorkerChannel, StubModel]:
    """Make a rank's end, with as many sectors mapped as its limit allows."""
    model = StubModel(kv)
    model.channel = WorkerChannel(model, KVSectors(kv, tensors, blocks))
    return model.channel, model


def finish_background() -> None:
    """Wait until what was to be done beside the steps is done."""
    done = threading.Event()
    janitor.submit(done.set)
    assert done.wait(30)


def settle(channel: WorkerChannel, coordinator: CapacityCoordinator) -> None:
    """Have a rank come to what its limit allows, by steps that compute nothing."""
    for _ in range(4):
        channel.before_step(coordinator.next_orders())
        finish_background()
        coordinator.receive(channel.report() or StepReport({}))
