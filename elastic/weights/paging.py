"""Moving the parameters of decoder layers into pages (wrap) and out (unwrap)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from elastic.memory.backends.peers import reachable
from elastic.memory.backends.streams import note_current_stream
from elastic.memory.checkpoint_file import Checkpoint
from elastic.memory.pages.page_pool import PagePool
from elastic.memory.places import give_back_freed
from elastic.memory.rate_limit import RateLimiter
from elastic.memory.weight_buffer import WeightBuffer
from elastic.memory.weight_layout import LayerLayout, ParameterLayout
from elastic.weights.decoder import Decoder
from elastic.weights.layer import Absence, DecoderLayer, WeightUnit
from elastic.weights.parameter_slot import ParameterSlot, UnpagedTensors
from elastic.weights.shards.layer_cut import LayerCut, Piece
from elastic.weights.slot_contents import absent_contents, resident_contents


def make_layers(
    decoder: Decoder,
    slots: Sequence[Mapping[str, ParameterSlot]],
    pools: Sequence[PagePool],
    checkpoint: Checkpoint | None,
    cuts: Sequence[LayerCut | None],
) -> list[WeightUnit]:
    """Make the units of all layers, before anything is moved; `pools` are those of their places."""
    units = []
    for index, (module, name) in enumerate(zip(decoder.layers, decoder.layer_names, strict=True)):
        cut, pool = cuts[index], pools[index]
        layer = DecoderLayer(index, name, UnpagedTensors(module, slots[index]), checkpoint, cut)
        layouts = {n: ParameterLayout.like(slot.parameter) for n, slot in slots[index].items()}
        if cut is not None:
            layouts = {n: cut.stored(n, like, pool.page_bytes) for n, like in layouts.items()}
            layouts = {n: layouts[n] for n in sorted(layouts, key=cut.parted.__contains__)}
        units.append(WeightUnit(layer, pool, slots[index], LayerLayout.pack(layouts)))
    return units


def move_in(unit: WeightUnit, absent: bool) -> None:
    """Have a unit's parameters in pages of its place, or in the host store; what they were before is let go of."""
    if absent:
        unit.keep()
        unit.hide(absent_contents(unit))
    else:
        block = unit.block_for(unit.full)
        block.allocate(unit.owner)
        tensors = block.show(unit.layout)
        with torch.no_grad():
            for name, slot in unit.slots.items():
                tensors[name].copy_(slot.in_pages(reachable(slot.parameter, unit.pool.device)))
        unit.show(resident_contents(unit, unit.full))
    give_back_freed(unit.pool.backend.device)


def load_in(unit: WeightUnit, shards: frozenset[int]) -> None:
    """Have some parts of a unit's parameters, which have no data, in pages of its place, read from the checkpoint.

    What the others are is noted by their digests: they were never here, and come by that as if they had been dropped.
    Raises `CapacityError`.
    """
    unit.digests = _digests_in_files(unit)
    unit.hide(absent_contents(unit, Absence.DROPPED), Absence.DROPPED)
    for slot in unit.slots.values():
        slot.device = unit.pool.backend.device
    if shards == unit.every:
        block = unit.block_for(unit.full)
        block.allocate(unit.owner)
        for name, tensor in block.show(unit.layout).items():
            read_in(unit, name, tensor)
        unit.show(resident_contents(unit, unit.full))
    elif shards and unit.cut is not None:
        block = unit.blocks[unit.full.key] = WeightBuffer(
            unit.pool, unit.nbytes, slots=unit.shard_pages.numbers(shards)
        )
        block.allocate(unit.owner)
        for name, tensor in block.show(unit.cut.common(unit.layout)).items():
            read_in(unit, name, tensor)
        for piece in (piece for part in sorted(shards) for piece in unit.pieces(part)):
            read_in(unit, piece.name, unit.show_piece(piece), piece)
        unit.hide(absent_contents(unit, Absence.DROPPED, shards), Absence.DROPPED, shards)


def read_in(
    unit: WeightUnit, name: str, target: torch.Tensor, piece: Piece | None = None, pace: RateLimiter | None = None
) -> None:
    """Fill a tensor over a unit's block with a parameter, any shape, or a piece of it, as the checkpoint has it."""
    stored, slot = unit.require_in_files(name), unit.slots[name]
    if slot.prepacked:
        target.copy_(slot.in_pages(stored.whole()))
    elif piece is None:
        stored.read(target, pace=pace)
    else:
        stored.read(target, piece.dim, piece.rows, pace)


def _digests_in_files(unit: WeightUnit) -> dict[str, int]:
    """Return the digests of all parameters, as `WeightUnit.measure` has them, of what the checkpoint has."""
    pieces = [piece for part in sorted(unit.every) for piece in unit.pieces(part)]
    parted = {piece.name for piece in pieces}
    digests = {name: unit.require_in_files(name).digest() for name in unit.slots if name not in parted}
    return digests | {piece.key: unit.require_in_files(piece.name).digest(piece.dim, piece.rows) for piece in pieces}


def move_out(unit: WeightUnit) -> None:
    """Have a unit's tensors in ordinary memory, strided and where they were before; give its pages back.

    One that is dropped had no data before either: its model was not loaded to the end.
    """
    if unit.absent is Absence.DROPPED:
        give_back(unit)
        return
    note_current_stream(unit.pool.device)  # it reads the pages that are given back
    for name, slot in unit.slots.items():
        if not slot.intact():  # somebody else's by now
            continue
        plain = not unit.absent and name not in unit.precision.packings
        source = slot.parameter.detach() if plain else slot.in_order(unit.host_copies[name].tensor)
        with torch.inference_mode(False), torch.no_grad():
            tensor = torch.empty_strided(source.shape, slot.strides, dtype=source.dtype, device=slot.device)
            tensor.copy_(reachable(source, tensor.device))
        slot.put(slot.plain(tensor))
        del source
    if not unit.part:
        unit.layer.unpaged.move_to(next((slot.device for slot in unit.slots.values()), unit.pool.backend.device))
    unit.absent = None
    unit.drop_host_copies()
    give_back(unit)


def give_back(unit: WeightUnit) -> None:
    """Close the unit's blocks: their pages go back to the system."""
    if unit.blocks:
        while unit.blocks:
            unit.blocks.popitem()[1].close()
        unit.pool.trim()
