"""The rows `kv` and `weights` of `reshard.py`: what one rank does by itself when its layers are shared, and when not.

`kv` is on memory alone, as much as a cache of 90 % use has. `base` is the paper's first form: blocks by tokens, so the
half of the heads that stays is scattered, the other is gathered to be sent, and what stays is moved together to free
pages. Here each part of the heads has pages of its own: those of the part that leaves are sent as they lie, and given
back; nothing else is touched. `weights` is on the Llama of 40M parameters: the shards that leave are unmapped, those
that come back are read from another process's memory, here another model's; `partial swap`: what stays is copied to
fresh pages, and all of the old ones are unmapped (the paper's base).
"""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import Kept, paired, ratio
from serving import summary
from transformers import AutoModelForCausalLM

import elastic

PAGE = 64 << 10
SHARDS, DEGREE = 4, 2
USE = 0.9
TOKENS, HEADS, DIM = 32, 8, 64
"""Of a block."""


class Pages:
    """Anonymous memory whose pages can be given back."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, -(-nbytes // PAGE) * PAGE)
        self.floats = torch.frombuffer(self._map, dtype=torch.float32)

    def give_back(self) -> None:
        """Unmap its pages; the addresses stay."""
        self._map.madvise(mmap.MADV_DONTNEED)


def kv(_: Path, rounds: int, quick: bool, kept: Kept) -> dict[str, Any]:
    blocks = int(USE * (200 if quick else 2000))
    shape = (blocks, TOKENS, 2, HEADS, DIM)
    nbytes = 4 * blocks * TOKENS * 2 * HEADS * DIM
    whole, kept, wire = Pages(nbytes), Pages(nbytes // DEGREE), torch.empty(nbytes // 4 // DEGREE)
    parts = [Pages(nbytes // DEGREE) for _ in range(DEGREE)]
    for memory in (whole, *parts):
        memory.floats.fill_(1.0)
    by_tokens = whole.floats[: nbytes // 4].view(shape)
    half, rest = HEADS // DEGREE, HEADS - HEADS // DEGREE

    def keep_by_tokens() -> None:
        kept.floats[: nbytes // 4 // DEGREE].view(blocks, TOKENS, 2, half, DIM).copy_(by_tokens[..., :half, :])
        whole.give_back()

    def send_by_tokens() -> None:
        wire.view(blocks, TOKENS, 2, rest, DIM).copy_(by_tokens[..., half:, :])

    def send_part() -> None:
        wire.copy_(parts[1].floats[: wire.numel()])

    def through_host() -> None:
        host.copy_(whole.floats[: host.numel()])
        whole.floats[: host.numel()].copy_(host)

    host = torch.empty(nbytes // 4)
    works = {
        "base, local": keep_by_tokens,
        "base, wire": send_by_tokens,
        "parts, wire": send_part,
        "through host and back": through_host,
    }
    times = timed({**works, "parts, local": parts[1].give_back}, (whole, kept, *parts), rounds)
    base = [a + b for a, b in zip(times["base, local"], times["base, wire"], strict=True)]
    ours = [a + b for a, b in zip(times["parts, local"], times["parts, wire"], strict=True)]
    return {
        "bytes": nbytes,
        "ms": {name: summary([1e3 * value for value in values]) for name, values in times.items()},
        "local, parts over base": ratio(times["parts, local"], times["base, local"]),
        "all, parts over base": ratio(ours, base),
        "all, parts over through host": ratio(ours, times["through host and back"]),
        "bytes_copied_locally_by_base": nbytes // DEGREE,
    }


def timed(works: dict[str, Callable[[], Any]], memories: Sequence[Pages], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each work, each time on memory that is there."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            for memory in memories:
                memory.floats.fill_(1.0)
            begin = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - begin)
    return {name: values[1:] for name, values in times.items()}


def weights(path: Path, rounds: int, quick: bool, kept: Kept) -> dict[str, Any]:
    rank, peer = (wrapped(path, number) for number in range(2))
    runtime, layers = rank.elastic, rank.config.num_hidden_layers
    gone = tuple(layer * SHARDS + part for layer in range(layers) for part in range(SHARDS // DEGREE, SHARDS))
    source = peer.elastic.weights_source(shards=gone)
    runtime.digests(shards=gone)
    up, down, freed, pauses = [], [], [], []
    for _ in range(rounds + 1):
        before = used(runtime)
        begin = time.perf_counter()
        runtime.drop(shards=gone)
        middle = time.perf_counter()
        freed.append(before - used(runtime))
        pauses.append(runtime.events()[-1].pause_ms)
        runtime.fetch((), source, shards=gone)
        up.append(1e3 * (middle - begin) / layers)
        down.append(1e3 * (time.perf_counter() - middle) / layers)
    swap = partial_swap(rank, rounds)
    through_host = [1e3 * value / layers for value in released(runtime, tuple(range(layers)), rounds)]
    for model in (rank, peer):
        elastic.unwrap(model)
    return {
        "ms_per_layer": {
            "up": summary(up[1:]),
            "down": summary(down[1:]),
            "partial swap": summary(swap),
            "through host and back": summary(through_host),
        },
        "freed_bytes": statistics.median(freed),
        "pause_ms": summary(pauses[1:]),
        "up over partial swap": ratio(up[1:], swap),
        "up and down over through host": ratio([a + b for a, b in zip(up[1:], down[1:], strict=True)], through_host),
    }


def wrapped(path: Path, number: int) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    elastic.wrap(model, places=[f"cpu#{number}=1GiB"], shards=SHARDS, checkpoint=path)
    return model


def used(runtime: elastic.Runtime) -> int:
    (place,) = runtime.status().places
    return sum(nbytes for owner, nbytes in place.owners.items() if owner.startswith("layer:"))


def partial_swap(model: Any, rounds: int) -> list[float]:
    """Return the milliseconds of a layer: what stays of it is copied to fresh pages, the old ones are given back."""
    mlp = model.model.layers[0].mlp
    sizes = [4 * projection.weight.numel() for projection in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]

    def swap() -> None:
        for memory, nbytes in zip(old, sizes, strict=True):
            fresh = Pages(nbytes // DEGREE)
            fresh.floats[: nbytes // 4 // DEGREE].copy_(memory.floats[: nbytes // 4 // DEGREE])
            memory.give_back()

    times = []
    for _ in range(rounds + 1):
        old = [Pages(nbytes) for nbytes in sizes]
        for memory in old:
            memory.floats.fill_(1.0)
        begin = time.perf_counter()
        swap()
        times.append(1e3 * (time.perf_counter() - begin))
    return times[1:]


def released(runtime: elastic.Runtime, layers: tuple[int, ...], rounds: int) -> list[float]:
    """Return the seconds in which all layers go to host memory, and come back: what a transformation by way of it
    does with the weights."""

    def there_and_back() -> None:
        runtime.release(layers)
        runtime.restore(layers)

    return paired({"host": there_and_back}, "cpu", rounds, 1)["host"]
