"""The rows `kv` and `weights` of `reshard.py`: what one rank does by itself when its layers are shared, and when not.

`kv` is on memory alone, as much as a cache of 90 % use has. `base` is the paper's first form: blocks by tokens, so the
half of the heads that stays is scattered, the other is gathered to be sent, and what stays is moved together to free
pages. Here each part of the heads has pages of its own: those of the part that leaves are sent as they lie, and given
back; nothing else is touched. `weights` is on the Llama of 40M parameters: the shards that leave are unmapped, those
that come back are read from another process's memory, here another model's; `partial swap`: what stays is copied to
fresh pages, and all of the old ones are unmapped (the paper's base).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from common import Kept, paired, ratio, seconds
from reshard_memory import Memory, memory
from reshard_setting import ROOMY_SHARE, SHARDS, Setting
from serving import summary
from transformers import AutoModelForCausalLM

import elastic
from support.cluster.joined_runtimes import joined

DEGREE, USE = 2, 0.9
TOKENS, HEADS, DIM = 32, 8, 64
"""Of a block."""


def kv(setting: Setting, rounds: int, quick: bool, _: Kept) -> dict[str, Any]:
    device, peer = setting.device_of(0), setting.device_of(1)
    blocks = int(USE * (200 if quick else 2000 if device == "cpu" else 20000))
    shape = (blocks, TOKENS, 2, HEADS, DIM)
    nbytes = 4 * blocks * TOKENS * 2 * HEADS * DIM
    whole, kept = memory(device, nbytes), memory(device, nbytes // DEGREE)
    parts = [memory(device, nbytes // DEGREE) for _ in range(DEGREE)]
    wire = torch.empty(nbytes // 4 // DEGREE, device=peer)
    host = torch.empty(nbytes // 4, pin_memory=device != "cpu")
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

    works = {
        "base, local": keep_by_tokens,
        "base, wire": send_by_tokens,
        "parts, wire": send_part,
        "through host and back": through_host,
    }
    times = timed({**works, "parts, local": parts[1].give_back}, (whole, kept, *parts), device, rounds)
    for each in (whole, kept, *parts):
        each.close()
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


def timed(
    works: dict[str, Callable[[], Any]], memories: Sequence[Memory], device: str, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of each work, each time on memory that is there."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            for each in memories:
                each.fill()
            times[name].append(seconds(work, device))
    return {name: values[1:] for name, values in times.items()}


def weights(setting: Setting, rounds: int, quick: bool, kept: Kept) -> dict[str, Any]:
    rank, peer = (wrapped(setting, number, ROOMY_SHARE) for number in range(2))
    runtime, layers, device = rank.elastic, rank.config.num_hidden_layers, setting.device_of(0)
    gone = tuple(layer * SHARDS + part for layer in range(layers) for part in range(SHARDS // DEGREE, SHARDS))
    reading = ExitStack()
    if setting.device != "cpu":  # no file has the memory of a GPU
        joined(reading, r0=runtime, r1=peer.elastic)
    source = peer.elastic.weights_source(shards=gone)
    runtime.digests(shards=gone)
    up, down, freed, pauses = [], [], [], []
    for _ in range(rounds + 1):
        before = used(runtime)
        up.append(1e3 * seconds(partial(runtime.drop, shards=gone), device) / layers)
        freed.append(before - used(runtime))
        pauses.append(runtime.events()[-1].pause_ms)
        down.append(1e3 * seconds(partial(runtime.fetch, (), source, shards=gone), device) / layers)
    swap = partial_swap(rank, device, rounds)
    through_host = [1e3 * value / layers for value in released(runtime, tuple(range(layers)), device, rounds)]
    reading.close()
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


def wrapped(setting: Setting, number: int, share: float) -> Any:
    """Load the model of a rank, of whose memory decoder layers are such a share."""
    model = AutoModelForCausalLM.from_pretrained(setting.path).eval().to(setting.device_of(number))
    elastic.wrap(model, places=[setting.place(number, share)], shards=SHARDS, checkpoint=setting.path)
    return model


def used(runtime: elastic.Runtime) -> int:
    (place,) = runtime.status().places
    return sum(nbytes for owner, nbytes in place.owners.items() if owner.startswith("layer:"))


def partial_swap(model: Any, device: str, rounds: int) -> list[float]:
    """Return the milliseconds of a layer: what stays of it is copied to fresh pages, the old ones are given back."""
    mlp = model.model.layers[0].mlp
    sizes = [projection.weight.nbytes for projection in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    old = [memory(device, nbytes) for nbytes in sizes]
    fresh = [memory(device, nbytes // DEGREE) for nbytes in sizes]

    def swap() -> None:
        for source, target, nbytes in zip(old, fresh, sizes, strict=True):
            target.come_back()
            target.floats[: nbytes // 4 // DEGREE].copy_(source.floats[: nbytes // 4 // DEGREE])
            source.give_back()

    times = []
    for _ in range(rounds + 1):
        for each in fresh:
            each.give_back()
        for each in old:
            each.fill()
        times.append(1e3 * seconds(swap, device))
    for each in (*old, *fresh):
        each.close()
    return times[1:]


def released(runtime: elastic.Runtime, layers: tuple[int, ...], device: str, rounds: int) -> list[float]:
    """Return the seconds in which all layers go to host memory, and come back: what a transformation by way of it
    does with the weights."""

    def there_and_back() -> None:
        runtime.release(layers)
        runtime.restore(layers)

    return paired({"host": there_and_back}, device, rounds, 1)["host"]
