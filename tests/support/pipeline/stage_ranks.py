"""Ranks of this process, each a copy of a model on a thread of its own, with queues between them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch

import elastic
from elastic.engines.continuous.compatibility import kv_format
from elastic.engines.core.step import ScheduledChunk
from elastic.engines.executor.batch_runner import BatchRunner
from elastic.engines.executor.layer_groups import block_groups
from elastic.engines.pipeline.forward import StageForward
from elastic.engines.pipeline.path import LayerPath
from elastic.engines.pipeline.transport import Transport
from elastic.engines.pipeline.turn import Turn
from elastic.kvcache.storage.paged import BlockMemory
from elastic.planning.sharding.numbers import by_layer
from support import architectures
from support.pipeline.queue_transport import QueueExchange
from support.serving.generations import SERVED
from support.wrapped_model import layers, small

BLOCK = 8


class Rank:
    """A copy of a model, its turn, and blocks for two sequences of up to 96 tokens."""

    def __init__(
        self,
        name: str,
        rank: str,
        exchange: QueueExchange,
        stack: ExitStack,
        shards: int = 1,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self.model = architectures.build(name, dtype, device=device)
        self.device = self.model.device
        elastic.wrap(self.model, places=place_of(self.device, rank), shards=shards)
        stack.callback(elastic.unwrap, self.model)
        self.rank, self.turn, self.shards = rank, Turn(), shards
        self.transport_of: Callable[[str], Transport] = partial(exchange.transport, rank)
        """Its transport for the instance of a home."""
        self.forward = StageForward(self.model, self.turn)
        stack.callback(self.forward.close)
        if name in SERVED:
            self.make_cache(stack)
        self.computed: list[int] = []
        for index, layer in enumerate(layers(self.model)):
            first = next(layer.children())
            stack.callback(first.register_forward_pre_hook(partial(self.note, index)).remove)

    def note(self, layer: int, *called: Any) -> None:
        self.computed.append(layer)

    def make_cache(self, stack: ExitStack) -> None:
        form = kv_format(self.model, BLOCK, "head_centric", "auto")
        (kv,) = self.model.elastic.kv.memory.shares()
        memory = BlockMemory(kv, block_groups(form))
        stack.callback(memory.close)
        self.memory = memory
        self.runner = BatchRunner(self.model, memory, form)
        self.cache = self.runner.cache
        stack.callback(self.runner.cache.close)
        for sequence in ("x", "y"):
            self.runner.add(sequence)
        self.blocks = []
        for group, table in enumerate(self.runner.tables):
            size, blocks = memory.blocks_per_sector(group), list[int]()
            while len(blocks) < 24:
                sector = memory.allocate(group)
                blocks += range(sector * size, (sector + 1) * size)
            for row in range(2):
                table.extend(row, np.array(blocks[row * 12 : row * 12 + -(-min(96, table.window or 96) // BLOCK)]))
            self.blocks.append(np.array(blocks))
        self.clear()

    def clear(self) -> None:
        for group, blocks in enumerate(self.blocks):
            self.cache.clear(group, blocks)

    def keep(self, parts: Sequence[int]) -> None:
        """Have blocks of some parts of layers alone, by their numbers over all layers."""
        self.memory.remove_layers(set(self.memory.layers) - set(parts))
        self.cache.refresh()

    def inputs(self, chunks: Sequence[ScheduledChunk]) -> dict[str, Any]:
        return self.runner.inputs([chunk._replace(blocks=((),) * len(self.blocks)) for chunk in chunks])

    def run(self, path: LayerPath, step: int, inputs: dict[str, Any]) -> Any:
        return self.forward.run(path.plan(self.rank), self.transport_of(path.home), step, inputs)


class Ranks:
    """Some ranks of the same model, each with a thread."""

    def __init__(
        self,
        name: str,
        ranks: str,
        stack: ExitStack,
        shards: int = 1,
        dtype: torch.dtype = torch.float32,
        devices: Sequence[str] = ("cpu",),
    ) -> None:
        """The ranks are on these devices in turn."""
        self.exchange = QueueExchange()
        on = dict(zip(ranks, itertools.cycle(devices), strict=False))
        self.ranks = {rank: Rank(name, rank, self.exchange, stack, shards, dtype, on[rank]) for rank in ranks}
        self.layers = self.ranks["a"].model.config.num_hidden_layers
        self.shards = shards
        self._threads = {rank: stack.enter_context(ThreadPoolExecutor(1)) for rank in ranks}

    def path(self, ranks: str) -> LayerPath:
        """A way for three layers, for any number of them; with shards, as in "aabb/abab/cccc"."""
        given = ranks.split("/") if "/" in ranks else [rank * self.shards for rank in ranks]
        chosen = (given[layer * len(given) // self.layers] for layer in range(self.layers))
        return LayerPath("a", tuple("".join(chosen)), shards=self.shards)

    def begin(self, path: LayerPath, step: int, inputs: Callable[[Rank], dict[str, Any]]) -> dict[str, Future[Any]]:
        return {rank: self.begin_at(rank, path, step, inputs) for rank in (path.home, *path.helpers)}

    def begin_at(self, rank: str, path: LayerPath, step: int, inputs: Callable[[Rank], dict[str, Any]]) -> Future[Any]:
        return self._threads[rank].submit(self.ranks[rank].run, path, step, inputs(self.ranks[rank]))

    def on_thread(self, rank: str, ask: Callable[[], Any]) -> Any:
        return self._threads[rank].submit(ask).result(10)

    def logits(self, path: LayerPath, step: int, inputs: Callable[[Rank], dict[str, Any]]) -> torch.Tensor:
        outputs = {rank: future.result(60) for rank, future in self.begin(path, step, inputs).items()}
        for name, rank in self.ranks.items():
            assert rank.computed == [*by_layer(path.shards_of(name), self.shards)]
            rank.computed.clear()
        home = outputs.pop("a")
        assert set(outputs.values()) <= {None}
        return home.logits


def place_of(device: torch.device, rank: str) -> elastic.Place:
    """A place of no other rank. Pages of a GPU have the size that its driver wants."""
    if device.type == "cpu":
        return small(16 << 20, f"cpu#{rank}")
    return elastic.Place(f"{device}#{rank}", device, 256 << 20)


def whole_text(*rank: Rank) -> dict[str, Any]:
    device = rank[0].device if rank else "cpu"
    return {"input_ids": architectures.prompt(length=40, device=device)["input_ids"], "use_cache": False}
