"""The KV cache of vLLM's layers over one reserved range, mapped by sectors of blocks.

vLLM places all layers in one buffer: layer l of block b begins at `offset + l * layer_stride + b * block_stride`. Where
layers are outermost each has a region of its own; where blocks are, all share one. A sector is the fewest consecutive
blocks whose bytes are whole pages in every region; only whole sectors are mapped, the lowest first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from elastic.errors import BackendUnavailable, ConfigError, IntegrityError, StateError
from elastic.kvcache.storage.pool import OWNER, KVPool
from elastic.kvcache.storage.usage import SectorUsage
from elastic.memory.backends.streams import finish_queued_work, new_stream, note_current_stream, on_stream
from elastic.memory.pages.background import janitor
from elastic.memory.pages.virtual_range import VirtualRange, map_all, unmap_all

ONE_CONNECTOR = "vLLM has one KV connector in a process; stop the elastic engine in this one first"


class TensorPlacement(Protocol):
    """vLLM's `KVCacheTensor`. Bytes."""

    size: int
    layers: Sequence[str]
    layer_stride: int
    block_stride: int
    offset: int


@dataclass(frozen=True, order=True)
class Region:
    """Blocks side by side. Bytes."""

    offset: int
    """Of block 0."""
    block_bytes: int


def regions_of(tensors: Sequence[TensorPlacement]) -> tuple[Region, ...]:
    """List the regions of a KV cache; groups of layers that use the same bytes share them."""
    regions: set[Region] = set()
    for tensor in tensors:
        if tensor.layer_stride >= tensor.block_stride:
            starts = (tensor.offset + layer * tensor.layer_stride for layer in range(len(tensor.layers)))
            regions.update(Region(start, tensor.block_stride) for start in starts)
        else:
            regions.add(Region(tensor.offset - tensor.offset % tensor.block_stride, tensor.block_stride))
    return tuple(sorted(regions))


def blocks_per_sector(block_bytes: Sequence[int], page_bytes: int) -> int:
    """Count the fewest blocks that are whole pages in regions with blocks of these sizes."""
    return math.lcm(*(math.lcm(size, page_bytes) // size for size in block_bytes))


class KVSectors:
    """Sectors of vLLM's KV cache at one rank. Guarded by the lock of its KV pool."""

    def __init__(self, kv: KVPool, tensors: Sequence[TensorPlacement], blocks: int) -> None:
        if not tensors:
            raise ConfigError(
                "the model has no KV cache (an encoder alone), and elastic vLLM trades weights for KV blocks; run it "
                "in vLLM as it is"
            )
        page = kv.pool.page_bytes
        self.kv = kv
        self.regions = regions_of(tensors)
        self.block_bytes = sum(region.block_bytes for region in self.regions)
        """Of one block in all layers."""
        self.blocks_per_sector = blocks_per_sector([r.block_bytes for r in self.regions], page)
        self.count = blocks // self.blocks_per_sector
        self.nbytes = tensors[0].size
        _require_whole_pages(self.regions, self.nbytes, page, self.count)
        self.mapped = 0
        """Sectors with lower numbers are mapped."""
        self._pages = [self.blocks_per_sector * region.block_bytes // page for region in self.regions]
        self.sector_pages = sum(self._pages)
        self._closed = self._allocated = False
        self._stream = new_stream(kv.device) if kv.device.type == "cuda" else None  # not behind steps under way
        # none is idle or to be trimmed: vLLM's scheduler gives blocks up before; what it promised requests is mapped
        self._usage = SectorUsage(used=lambda: self.mapped * self.sector_pages, check=self.check)
        readable = kv.device.type == "cpu"  # so that printing a tensor over it does not crash
        self.range = VirtualRange(kv.pool, -(-self.nbytes // page), readable_gaps=readable)
        try:
            self._storage = self.range.storage(0, self.nbytes, partial(janitor.submit, self.range.close))
            kv.join(self._usage)
        except BaseException:
            self.range.close()
            raise

    def map(self) -> bool:
        """Map one sector more, with zeros in it; return whether caches may have as much.

        They may not where weights took pages since it was ordered. Raises `CapacityError`, and nothing has changed.
        """
        with self.kv.lock:
            if self._closed or self.kv.usage.used + self.sector_pages > self.kv.limits.maximum:
                return False
            pages = self.kv.pool.allocate(OWNER, self.sector_pages)
            taken = iter(pages)
            parts = [(slot, [next(taken) for _ in range(count)]) for slot, count in self._slots(self.mapped)]
            try:
                map_all((self.range, slot, part) for slot, part in parts)
            except BaseException:
                self.kv.pool.free(pages)
                raise
            self._clear(self.mapped)
            self.mapped += 1
            return True

    def unmap_to(self, sectors: int) -> None:
        """Unmap the sectors from this number on; no request has blocks there, and no kernel reads them any more."""
        note_current_stream(self.kv.device)
        finish_queued_work(self.kv.device)
        with self.kv.lock:
            while self.mapped > sectors:
                slots = self._slots(self.mapped - 1)
                self.kv.pool.free(unmap_all((self.range, slot, count) for slot, count in slots))
                self.mapped -= 1
            self.kv.settle()

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy blocks, (from, to), in all layers; no step is under way, and both are mapped."""
        memory = self._storage.tensor(torch.int8)
        for source, target in copies:
            for region in self.regions:
                begin, end = (region.offset + block * region.block_bytes for block in (source, target))
                memory[end : end + region.block_bytes] = memory[begin : begin + region.block_bytes]

    def close(self) -> None:
        """Give all pages back; the addresses follow with vLLM's last tensor over them. Can be called twice."""
        with self.kv.lock:
            self._closed = True
        self.unmap_to(0)
        self.kv.leave(self._usage)
        self._storage.drop()

    @contextmanager
    def allocation(self) -> Iterator[None]:
        """Answer vLLM's one `torch.zeros` for its KV cache with this memory.

        Raises `BackendUnavailable` for other calls, `StateError` for those of a second engine.
        """
        if self._allocated:
            raise StateError(ONE_CONNECTOR)
        answer = _AnswerZeros(self.nbytes, self._storage.tensor(torch.int8))
        with answer:
            yield
        if answer.given != 1:
            raise BackendUnavailable(
                f"vLLM asked {answer.given} times for {self.nbytes} bytes of KV cache, not once; this version of vLLM "
                "allocates it in another way than elastic knows"
            )
        self._allocated = True

    def check(self) -> None:
        """Recount; raises `IntegrityError`."""
        if len(self.range.slots) != self.mapped * self.sector_pages:
            raise IntegrityError(f"{len(self.range.slots)} pages are shown, {self.mapped} sectors mapped")

    def _slots(self, sector: int) -> list[tuple[int, int]]:
        """List the (first slot, pages) of a sector in each region."""
        page = self.kv.pool.page_bytes
        return [(r.offset // page + sector * count, count) for r, count in zip(self.regions, self._pages, strict=True)]

    def _clear(self, sector: int) -> None:
        """Have a new sector be zero: some kernels multiply what is behind the last token by zero, whatever it is.

        It is on return, for any stream. Steps under way are not waited for.
        """
        page, memory = self.kv.pool.page_bytes, self._storage.tensor(torch.int8)
        with on_stream(self._stream):
            for slot, count in self._slots(sector):
                memory[slot * page : (slot + count) * page].zero_()
        if self._stream is not None:
            self._stream.synchronize()


class _AnswerZeros(TorchFunctionMode):
    """Answers `torch.zeros(nbytes, dtype=torch.int8)` with a given tensor."""

    def __init__(self, nbytes: int, memory: torch.Tensor) -> None:
        super().__init__()
        self._nbytes = nbytes
        self._memory = memory
        self.given = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and args == (self._nbytes,) and kwargs.get("dtype") is torch.int8:
            self.given += 1
            return self._memory
        return func(*args, **kwargs)


def _require_whole_pages(regions: Sequence[Region], nbytes: int, page_bytes: int, sectors: int) -> None:
    """Raise `ConfigError` where regions do not begin with a page, or there is not even one sector."""
    unaligned = [region.offset for region in regions if region.offset % page_bytes]
    if unaligned or not sectors:
        raise ConfigError(
            f"a KV cache of {nbytes:,} bytes cannot be cut into pages of {page_bytes:,} bytes (regions begin at "
            f"{unaligned[:4] or 0}, {sectors} sectors): raise the budget, or leave num_gpu_blocks_override unset"
        )
