"""Timing the kernels of one new token on made-up keys and values, to decide which one is taken."""

from __future__ import annotations

import math
import platform
import time
from functools import cache, partial
from typing import NamedTuple

import torch

from elastic.kvcache.decode_kernels import KERNELS
from elastic.memory.backends.device_time import seconds_of

DEFAULT = "sdpa"
MARGIN = 0.95
"""Another kernel than the default must take less than this share of its time: near ties go the same way everywhere."""
HEAD_BYTES = 8 << 20
"""On a CPU, so many bytes of keys and values are attended to in one timing: a few heads of a long context."""
ROTATED_BYTES = 32 << 20
"""Keys and values are used in turn, so many bytes in all: in a model they come from memory, not from cache."""
GAP = 64
"""Tokens of room between the heads of a head-major cache: its pages are seldom full."""
ROUNDS = 3
SECONDS = 0.02
"""No further round for a length that took longer."""

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class DecodeShape(NamedTuple):
    """The key by which a kernel is chosen, apart from the number of tokens held."""

    processor: str
    dtype: torch.dtype
    queries: int
    """Query heads of each key head."""
    dim: int
    value_dim: int
    order: str
    """"head_major": the tokens of a head are side by side in memory; "token_major": the heads of a token do."""


@cache
def processor(device: torch.device) -> str:
    """Describe what computes on a device, as far as it decides which kernel is the fastest."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    native = "bf16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "no bf16"
    return f"{_cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {native}"


def fastest(shape: DecodeShape, tokens: int, device: torch.device, kv_heads: int) -> str:
    """Time the kernels on made-up keys and values of so many tokens; bounded to some tens of milliseconds."""
    try:
        with torch.inference_mode(), torch.autocast(device.type, enabled=False):
            inputs = _inputs(shape, tokens, device, kv_heads)
            return _race(inputs, shape.dim**-0.5, device)
    except torch.OutOfMemoryError:
        return DEFAULT


def _race(inputs: list[Inputs], scaling: float, device: torch.device) -> str:
    """Run the kernels in turn, each time on other inputs; those left far behind by the first timing are left out."""
    best: dict[str, float] = dict.fromkeys(KERNELS, math.inf)
    turn, start = 0, time.perf_counter()
    for round_ in range(ROUNDS + 1):  # the first one warms up
        leader = min(best.values())
        for name in [name for name, seconds in best.items() if round_ < 2 or seconds < 1.5 * leader]:
            seconds = seconds_of(partial(KERNELS[name], *inputs[turn % len(inputs)], None, scaling), device)
            best[name] = min(best[name], seconds) if round_ else math.inf
            turn += 1
        if round_ and time.perf_counter() - start > SECONDS:
            break
    winner = min(best, key=lambda name: best[name])
    return winner if best[winner] < MARGIN * best[DEFAULT] else DEFAULT


def _inputs(shape: DecodeShape, tokens: int, device: torch.device, kv_heads: int) -> list[Inputs]:
    """Several sets of query, key and value, one behind the other in memory."""
    room = tokens + (GAP if shape.order == "head_major" else 0)
    per_head = room * (shape.dim + shape.value_dim)
    if device.type == "cuda":
        heads = kv_heads
    else:
        heads = min(kv_heads, max(2, torch.get_num_threads(), HEAD_BYTES // (per_head * shape.dtype.itemsize)))
    most = (ROUNDS + 1) * len(KERNELS)  # none is used twice then
    sets = min(most, max(1, ROTATED_BYTES // (heads * per_head * shape.dtype.itemsize)))
    memory = torch.full((sets, heads * per_head), 0.01, dtype=shape.dtype, device=device)
    query = torch.full((1, heads, shape.queries, shape.dim), 0.01, dtype=shape.dtype, device=device)

    def states(flat: torch.Tensor, dim: int) -> torch.Tensor:
        """View [heads * room * dim] elements as [1, heads, tokens, dim], in the order of the shape."""
        if shape.order == "token_major":
            return flat.view(1, room, heads, dim).transpose(1, 2)
        return flat.view(1, heads, room, dim)[:, :, :tokens]

    split = heads * room * shape.dim
    return [(query, states(row[:split], shape.dim), states(row[split:], shape.value_dim)) for row in memory]


@cache
def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
