"""A measurement of fingerprints in the engine, on a device of this machine: the seconds that estimates are made of."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from elastic.config import Place, parse_bytes
from elastic.engines.continuous import ContinuousEngine
from elastic.engines.continuous.chunk_profile import Mix, Pace, profile_chunks, profile_replays
from elastic.errors import ConfigError, require
from elastic.estimation.activations import measured_share
from elastic.estimation.fingerprint import fingerprint, take_layers
from elastic.estimation.kv_room import KVBlockCapacity
from elastic.estimation.model_layout import LayerKind, ModelLayout, layout_of
from elastic.estimation.weight_pages import WeightPages
from elastic.estimation.work import copies_blocks, layer_work, window_of
from elastic.memory.backends.cuda import require_cuda
from elastic.memory.backends.streams import synchronize
from elastic.planning.estimate.configuration import FULL, split_form
from elastic.planning.estimate.devices import PAGE_BYTES
from elastic.planning.estimate.layer_cost import LayerCost, r_squared
from elastic.planning.estimate.performance import NO_HANDOVERS, Handovers
from elastic.planning.measured_cost import LinearLatency
from elastic.planning.pipeline.chunk_cost import ChunkCost, ChunkProfile
from elastic.quant.formats.base import KernelTarget
from elastic.quant.kernels.workspace import kept_bytes
from elastic.wrap import unwrap, wrap

CACHED_BYTES = 64 << 20
"""What caches of a processor hold where it does not say."""
_CACHE_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
PASSES, ROUNDS = 3, 5
"""All forms are measured in turn, so many times, as the pace of a machine changes: and batches so often in each."""
_SEQUENCES = 9
_WIDTH = 1024
_LEAST_READ = 8 << 20
"""Bytes of a product that takes much longer than its call."""


@dataclass(frozen=True)
class CostProfile:
    """Costs that were fitted to measurements, of one kind of device.

    They are by forms of weights, such as `int4`; `int4 KV int8` with keys and values in 8 bits, which is another one.
    """

    device: str
    """Its type: "cpu" or "cuda"."""
    layers: Mapping[tuple[str, str], LayerCost | ChunkCost]
    """(kind of layer, form) -> the cost of one layer."""
    around: Mapping[str, LayerCost | ChunkCost]
    """Form -> the cost of what is around the layers."""
    link: LinearLatency | None = None
    """Seconds for so many bytes from one rank to another; None: as the data sheet has it."""
    activations: Mapping[str, float] = field(default_factory=dict)
    """Form -> the share of the bound on a batch's bytes that batches were seen to take."""
    scratch_bytes: Mapping[str, int] = field(default_factory=dict)
    """Form -> what kernels keep from batch to batch."""
    r_squared: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """(kind of layer, form) -> the share of the variance of what was measured that its cost explains."""
    contention: float = 0.0
    """By how much more slowly a rank reads for each other one that reads from the same memory meanwhile."""
    handovers: Handovers = NO_HANDOVERS
    """What the engine takes around links, besides `link`."""

    def with_links(self, other: CostProfile) -> CostProfile:
        """Return it with what another one says of links: what two ranks do to each other."""
        return replace(self, link=other.link, contention=other.contention, handovers=other.handovers)


def measure_fingerprints(
    model: Any,
    forms: Sequence[str] = (FULL,),
    *,
    device: str | torch.device = "cpu",
    context: int = 512,
    step_tokens: int = 512,
    most_s: float = 2.0,
    pace: Pace | None = None,
) -> CostProfile:
    """Measure a fingerprint of each kind of layer, in the model's weights and in variants: `most_s` seconds for each.

    `forms` are those of `CostProfile`: `full`, names of variants, and such as `int4 KV int8`.
    `model` is a directory, of whose layers only those of fingerprints are read, or a loaded model, which stays as it
    is. Costs are fitted to batches of up to `step_tokens` new tokens and contexts of up to `context`. `pace` is called
    behind each batch, and may wait or raise. Raises `ConfigError` for a model that the engine cannot serve, and for a
    device of another type than "cpu" and "cuda".
    """
    target = torch.device(device)
    require(target.type in PAGE_BYTES, "device", str(device), f"of one of the types {', '.join(PAGE_BYTES)}")
    if target.type == "cuda":
        require_cuda(target)
    dtype = torch.float32 if target.type == "cpu" else None
    layout = layout_of(model, dtype)
    of_files = isinstance(model, str | Path)
    layers: dict[tuple[str, str], LayerCost] = {}
    around: dict[str, LayerCost] = {}
    explained: dict[tuple[str, str], float] = {}
    taken: dict[str, float] = {}
    kept: dict[str, int] = {}
    for kind in layout.kinds:
        chosen = fingerprint_layers(kind, target.type)
        rates: list[float] = []
        samples: dict[str, list[ChunkProfile]] = {name: [] for name in forms}
        replays: dict[str, list[tuple[Mix, float]]] = {name: [] for name in forms}
        for _ in range(PASSES):
            rates.append(reading_rate(len(chosen) * kind.full.nbytes, target, pace))
            for name in forms:
                small = fingerprint(model, chosen, dtype) if of_files else take_layers(model, chosen)
                with engine_for(small.to(target), name, target, context + step_tokens, step_tokens) as engine:
                    mixes = telling_mixes(engine, context, step_tokens, most_s, pace)
                    samples[name].append(profile_chunks(engine, mixes, ROUNDS, most_s=most_s / PASSES, pace=pace))
                    few = shortest_decodes(mixes)
                    shares = profile_replays(engine, few, ROUNDS, most_s / PASSES, pace)
                    replays[name] += zip(few, shares, strict=True)
                    block = engine.kv_format.block_tokens if copies_blocks(layout, target.type) else 1
                    share = measured_share(engine, layout, largest(mixes), split_form(name)[1])
                taken[name], kept[name] = max(share, taken.get(name, 0.0)), kept_bytes()
        for name, passes in samples.items():
            of_layer = [sample for each in passes for sample in each.layer]
            cost = LayerCost.fit(of_layer, window_of(layout.decoder.config, kind), block)
            read_s = least_bytes(layout, kind, name, target.type) / statistics.median(rates)
            layers[kind.name, name] = cost.with_reading(read_s).with_replays(replays[name])
            explained[kind.name, name] = r_squared(cost, of_layer)
            rest = [sample for each in passes for sample in each.rest]
            around.setdefault(name, LayerCost.fit(rest, attention=False).with_replays(replays[name]))
    return CostProfile(target.type, layers, around, activations=taken, scratch_bytes=kept, r_squared=explained)


def reading_rate(nbytes: int, device: torch.device, pace: Pace | None) -> float:
    """Return the bytes of weights that are read a second for a product with one token.

    Weights are of about `nbytes`: caches hold as much of them as of layers that are as large.
    """
    rows = max(nbytes, _LEAST_READ) // 4 // _WIDTH
    weights = torch.empty(rows, _WIDTH, dtype=torch.float32, device=device).fill_(1.0)
    hidden, taken = torch.ones(1, _WIDTH, dtype=torch.float32, device=device), []
    for _ in range(ROUNDS + 1):
        synchronize(device)
        began_s = time.perf_counter()
        torch.nn.functional.linear(hidden, weights)
        synchronize(device)
        taken.append(time.perf_counter() - began_s)
        if pace is not None:
            pace(taken[-1])
    return weights.nbytes / statistics.median(taken[1:])


def least_bytes(layout: ModelLayout, kind: LayerKind, form: str, device: str) -> float:
    """Return the bytes of weights that a layer in a form reads for one token."""
    page_bytes = PAGE_BYTES[device]
    weights, kv = split_form(form)
    pages = WeightPages(layout, page_bytes, KernelTarget.of(torch.device(device)))
    works = layer_work(pages, kind, weights, layout.kv_shape(kv), 1)
    return math.fsum(work.least_met * work.weight_bytes for work in works)


def fingerprint_layers(kind: LayerKind, device: str = "cpu") -> tuple[int, ...]:
    """Choose the layers of a kind that are measured: two, or as many as no cache of a processor holds."""
    count = max(2, -(-2 * cached_bytes(device) // max(1, kind.full.nbytes)))
    return kind.layers[:count]


def cached_bytes(device: str) -> int:
    """Return what caches of a type of device hold."""
    if device == "cpu":
        with suppress(OSError, ConfigError):
            return parse_bytes(_CACHE_SIZE.read_text().strip() + "iB", option=str(_CACHE_SIZE))
    return CACHED_BYTES


def fingerprint_bytes(layout: ModelLayout, kind: LayerKind, form: str, tokens: int) -> int:
    """Return about what the fingerprint of a kind takes while requests of so many tokens are measured, in a form."""
    chosen = fingerprint_layers(kind)
    weights, kv_form = split_form(form)
    copies = 1 if weights == FULL else 2  # of a layer that is swapped both forms are there for a moment
    kv = layout.kv_shape(kv_form).token_bytes * len(chosen) * _SEQUENCES * tokens
    return sum(layout.fixed.values()) + copies * len(chosen) * kind.full.nbytes + kv


def telling_mixes(
    engine: ContinuousEngine, context: int, step_tokens: int, most_s: float, pace: Pace | None = None
) -> list[Mix]:
    """Return batches that tell what tokens, chunks and contexts cost: prompts, some behind a prefix, and decode steps.

    A slow model is measured in smaller batches.
    """
    longest = min(
        engine.reports.load().total_blocks * engine.kv_format.block_tokens // (_SEQUENCES - 1), context + step_tokens
    )
    most, limit = 16, max(16, min(step_tokens, longest // 2))
    while 2 * most <= limit and profile_chunks(engine, [((0, most),)], 1, pace=pace).whole[0].seconds < most_s / 5:
        most *= 2
    half = (longest - most) // 2
    prompts: list[Mix] = [((0, size),) for size in (most, most // 2, most // 4, most // 8)]
    behind: list[Mix] = [((half, most // 2),), ((2 * half, most // 2),), ((half, most // 8),)]
    decodes: list[Mix] = [((start, 1),) * count for count in (1, 2, 4, 8) for start in (half // 4, 2 * half)]
    return [*prompts, *behind, *decodes, ((0, most // 4),) * 2, (*((half, 1),) * 4, (0, most // 4))]


def largest(mixes: Sequence[Mix]) -> list[Mix]:
    """Return the batches of the most new tokens, with and without a prefix, and of the most decode steps."""
    alone = [mix for mix in mixes if len(mix) == 1]
    most = [max((mix for mix in alone if bool(mix[0][0]) == behind), key=_size) for behind in (False, True)]
    return [*most, max((mix for mix in mixes if all(count == 1 for _, count in mix)), key=_size)]


def shortest_decodes(mixes: Sequence[Mix]) -> list[Mix]:
    """Choose the decode steps of one sequence and of the most, with the shortest contexts."""
    decodes = sorted((mix for mix in mixes if all(count == 1 for _, count in mix)), key=_size)
    return [decodes[0], next(mix for mix in decodes if len(mix) == len(decodes[-1]))]


def _size(mix: Mix) -> tuple[int, int]:
    return sum(count for _, count in mix), sum(start for start, _ in mix)


@contextmanager
def engine_for(
    model: Any, form: str, device: torch.device, tokens: int, step_tokens: int
) -> Iterator[ContinuousEngine]:
    """Serve a model in a form, on a place that has room for some requests of so many tokens."""
    weights, kv = split_form(form)
    nbytes = _budget(model, weights, kv, device, tokens)
    place = Place(f"{device}#fingerprint", device, nbytes)
    wrap(model, places=[place], variants=() if weights == FULL else (weights,), controller=False)
    try:
        if weights != FULL:
            model.elastic.swap(range(model.config.get_text_config(decoder=True).num_hidden_layers), weights)
        engine = ContinuousEngine(
            model,
            max_batch_tokens=step_tokens,
            share_prefixes=False,
            kv_cache_dtype="auto" if kv == FULL else kv,
        )
        try:
            yield engine
        finally:
            engine.stop()
    finally:
        unwrap(model)


def _budget(model: Any, weights: str, kv: str, device: torch.device, tokens: int) -> int:
    """Return the bytes that a model needs with so many tokens of some requests."""
    layout = layout_of(model)
    page_bytes = PAGE_BYTES[device.type]
    pages = WeightPages(layout, page_bytes, KernelTarget.of(device))
    every = range(len(layout.decoder.layers))
    room = KVBlockCapacity(layout.decoder.config, None, page_bytes, layout.kv_shape(kv), 1, every)
    held = pages.fixed + pages.layers(every, FULL, 1) + pages.staging(weights, 1)
    return (held + room.pages(_SEQUENCES, tokens)) * page_bytes
