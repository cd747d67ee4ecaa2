"""The steps of `assemble`, from the ground up: places, weights in pages, packed variants, reserves, KV pools.

Everything is undone by the stacks that are given, in reverse.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from elastic.actions.pages.broker import StagingReserve
from elastic.config import Place
from elastic.errors import ConfigError
from elastic.kvcache.storage.pool import KVPool
from elastic.memory.checkpoint_file import Checkpoint
from elastic.memory.copy_engine import make_copy_engine
from elastic.memory.pages.page_pool import PagePool
from elastic.memory.places import close_place, open_place
from elastic.runtime.options import ChooseLayout, device_of
from elastic.weights.decoder import Decoder
from elastic.weights.eligible import head_slot, held_outside
from elastic.weights.initial_residency import choose_absent, least_pages, spread, too_small
from elastic.weights.layer import WeightUnit
from elastic.weights.model import ModelWeights
from elastic.weights.paging import give_back, load_in, move_in, move_out
from elastic.weights.parameter_slot import ParameterSlot
from elastic.weights.prepacked.joined import find_groups
from elastic.weights.prepacked.onednn import OneDNNLayout
from elastic.weights.prepacked.source import ResidentSource
from elastic.weights.proxy.tensor import WeightProxy
from elastic.weights.streaming import WeightStreamer

if TYPE_CHECKING:
    from elastic.quant.variants.variant import Variant

logger = logging.getLogger(__name__)
WORTH_A_WARNING = 64 << 20
"""Bytes of weights that are copied to host memory where a checkpoint could hold them."""


def open_places(
    model: nn.Module, decoder: Decoder, chosen: list[Place], slots: list[dict[str, ParameterSlot]], stack: ExitStack
) -> tuple[PagePool, ...]:
    """Open the places and charge what stays in ordinary tensors on their devices."""
    outside = held_outside(model, decoder, slots)
    paged: Counter[str] = Counter()
    for layer in slots:
        for slot in layer.values():
            paged[str(slot.parameter.device)] += slot.parameter.nbytes
    pools = []
    for number, place in enumerate(chosen):
        first = all(place.device != earlier.device for earlier in chosen[:number])
        held = outside.get(str(place.device), Counter()) if first else Counter()
        resident = held.total() + (paged[str(place.device)] if first else 0)
        sharers = sum(other.device == place.device and other.budget_bytes is None for other in chosen)
        pool = open_place(place, resident_bytes=resident, sharers=max(1, sharers))
        stack.callback(close_place, pool)
        if (fixed := sum(map(pool.pages_for, held.values()))) > pool.free_pages:
            sizes = (
                [sum(slot.parameter.nbytes for slot in layer.values()) for layer in slots] if len(chosen) == 1 else []
            )
            pages = [*map(pool.pages_for, sizes)]
            least = fixed + least_pages(sum(pages), len(pages), max(pages, default=0))
            raise too_small(pool, least, pool.free_pages)
        for owner, nbytes in held.items():
            pool.charge(owner, nbytes)
            stack.callback(pool.discharge, owner, nbytes)
        pools.append(pool)
    return tuple(pools)


def layer_pools(
    decoder: Decoder, slots: list[dict[str, ParameterSlot]], pools: Sequence[PagePool], placement: str
) -> Sequence[PagePool]:
    """Return the pool of the place at which each layer begins."""
    if placement == "auto":
        return spread([sum(slot.parameter.nbytes for slot in layer.values()) for layer in slots], pools)
    first = {pool.backend.device: pool for pool in reversed(pools)} | {torch.device("meta"): pools[0]}
    return [first[device_of(layer)] for layer in decoder.layers]


def warn_of_other_files(layers: Sequence[WeightUnit], files: Checkpoint | None) -> None:
    """Log where files have none of the layers' parameters as they are: nothing is mapped from them then.

    A warning, unless they are the model's in another dtype and what is copied is little.
    """
    if files is None:
        return
    pairs = [(slot.parameter, files.find(f"{u.name}.{name}")) for u in layers for name, slot in u.slots.items()]
    if not any(stored is not None and stored.shape == p.shape and stored.dtype == p.dtype for p, stored in pairs):
        named, nbytes = sum(stored is not None for _, stored in pairs), sum(p.nbytes for p, _ in pairs)
        logger.log(
            logging.INFO if named and nbytes < WORTH_A_WARNING else logging.WARNING,
            "checkpoint: of %d parameters of decoder layers %d are in it by name, and none in its shape and dtype: "
            "weights are copied to host memory instead; load the model from these files, in their dtype (dtype= "
            "of a fleet, --dtype of commands)",
            len(pairs),
            named,
        )


def pack_variants(
    model: nn.Module,
    layers: list[WeightUnit],
    pools: Sequence[PagePool],
    variants: list[Variant],
    cache: str | Path | None,
    is_packable: Callable[[nn.Module, torch.Tensor], bool],
) -> None:
    """Pack every layer for every variant, from its parameters where they are now, for their devices.

    `is_packable` is asked of a module and a parameter of it, of any shape and dtype.
    """
    if not variants:
        return
    from elastic.quant.variants.calibration import inputs_of, rows_for
    from elastic.quant.variants.eligible import LayerParameters, head_sizes, matrices
    from elastic.quant.variants.pack_model import measure_paths, obtain

    own = [layer for layer in layers if layer.slots]
    parameters = [
        LayerParameters(
            w.name,
            {n: (slot.homes[0][0], slot.parameter) for n, slot in w.slots.items()},
            is_packable,
            head_sizes(model.get_submodule(w.name)),
        )
        for w in own
    ]
    used = {f"{p.name}.{name}": p.parameters[name][0] for p in parameters for name, w, _ in matrices(p) if w.ndim == 2}
    for variant in variants:
        text = variant.calibration
        inputs = (
            partial(inputs_of, model, used, text, rows_for(variant.config))
            if text is not None
            else dict[str, torch.Tensor]
        )
        made = obtain(parameters, variant, cache, inputs)
        for layer, packed in zip(own, made, strict=True):
            layer.variants[variant.name] = packed
        for device in {pool.backend.device for pool in pools} - {layer.device for layer in parameters}:
            with suppress(ConfigError):  # a format without kernels there: its layers stay
                measure_paths(made, device)


def choose_prepacked(layers: list[WeightUnit], choose: ChooseLayout | None) -> None:
    """Decide how each full parameter will lie in its pages."""
    if choose is None:
        return
    slots = [slot for layer in layers for slot in layer.slots.values()]
    for layer in layers:
        together: dict[str, list[torch.Tensor]] = {}
        for group in find_groups(layer.slots):
            members = [layer.slots[name] for name in group]
            if all(getattr(member.homes[0][0], "bias", None) is None for member in members):
                together |= {name: [member.parameter for member in members] for name in group}
        for name, slot in layer.slots.items():
            slot.prepacked = choose(slot.homes[0][0], slot.parameter, together.get(name, ()))
    packed, matrices = sum(slot.prepacked is not None for slot in slots), sum(s.parameter.ndim == 2 for s in slots)
    logger.info("%d of %d matrices in pages are prepacked, in oneDNN's order", packed, matrices)


def pack_head(model: nn.Module, choose: ChooseLayout | None, stack: ExitStack) -> None:
    """Have the matrix of the logits in the order that is chosen for it, in ordinary memory as before."""
    slot = head_slot(model) if choose is not None else None
    layout = choose(slot.homes[0][0], slot.parameter, ()) if choose is not None and slot is not None else None
    if slot is None or layout is None:
        return
    slot.prepacked = layout
    source = ResidentSource("the head", layout, layout.pack(slot.parameter.detach()), on_write=lambda: None)
    slot.put(WeightProxy(slot.parameter, source))
    stack.callback(_unpack_head, slot, layout, source)
    logger.info("the head, %s, is prepacked, in oneDNN's order", list(layout.shape))


def _unpack_head(slot: ParameterSlot, layout: OneDNNLayout, source: ResidentSource) -> None:
    if slot.intact():  # not somebody else's by now
        slot.put(slot.plain(layout.unpack(source.packed)))


def make_reserves(layers: list[WeightUnit], stack: ExitStack) -> dict[str, StagingReserve]:
    """Keep back, at each place, pages for the largest packed layer, so that it can be swapped when all is full."""
    most: dict[str, int] = {}
    for layer in layers:
        for precision in map(layer.with_variant, layer.variants):
            if precision is not layer.full:
                most[layer.pool.name] = max(most.get(layer.pool.name, 0), layer.pages_in(precision))
    pools = {layer.pool.name: layer.pool for layer in layers}
    reserves = {name: StagingReserve(pools[name], pages) for name, pages in most.items()}
    for reserve in reserves.values():
        reserve.fill()
        stack.callback(reserve.close)
    return reserves


def move_weights(
    layers: list[WeightUnit],
    pools: Sequence[PagePool],
    least_buffers: int,
    memory_stack: ExitStack,
    model_stack: ExitStack,
    load_shards: frozenset[int] | None = None,
) -> ModelWeights:
    """Move the layers' weights into pages, one layer after another; or read these shards of them from files."""
    streamers = {pool.name: _streamer(pool, layers, memory_stack) for pool in pools}
    weights = ModelWeights(layers, streamers)
    absent: list[WeightUnit] = []
    for pool in pools:
        own = [layer for layer in layers if layer.pool is pool and layer.slots]
        if own and load_shards is None:
            streamer = streamers[pool.name]
            streamer.least = least_buffers
            buffers, elsewhere = choose_absent(own, pool.free_pages, streamer.buffer_pages, least_buffers=least_buffers)
            streamer.resize(buffers)
            absent += elsewhere
    for layer in layers:
        memory_stack.callback(_for_units, give_back, weights, layer.index)
        model_stack.callback(_for_units, move_out, weights, layer.index)
        if load_shards is None:
            move_in(layer, absent=layer in absent)
        else:
            load_in(layer, frozenset(shard - layer.index * weights.shards for shard in load_shards) & layer.every)
        if layer.variants:
            layer.keep()
    weights.initially_resident = tuple(layer.index for layer in layers if not layer.absent)
    return weights


def _for_units(undo: Callable[[WeightUnit], None], weights: ModelWeights, layer: int) -> None:
    """Undo something for the units of which a layer consists by then."""
    for unit in weights.units(layer):
        undo(unit)


def _streamer(pool: PagePool, layers: list[WeightUnit], stack: ExitStack) -> WeightStreamer:
    """Make what gives a place prefetch buffers: none so far."""
    copier = make_copy_engine(pool.backend.device)
    stack.callback(copier.close)
    largest = max(layer.nbytes for layer in layers)
    streamer = WeightStreamer(pool, copier, largest, layers)
    streamer.least = 0
    stack.callback(streamer.resize, 0)
    return streamer


def make_kv_pools(pools: Sequence[PagePool], stack: ExitStack) -> list[KVPool]:
    """Make the KV pool of each place, of the pages that are left there."""
    kv_pools = []
    for pool in pools:
        on_cuda = pool.backend.device.type == "cuda"
        kv_pools.append(KVPool(pool, pool.free_pages * pool.page_bytes, host_offload=on_cuda))
        stack.callback(kv_pools[-1].close)
    return kv_pools
