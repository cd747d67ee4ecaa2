"""The weights of a dropped layer on their way back: from another process's memory, the host store or the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing

import torch

from elastic.errors import ConfigError, StateError
from elastic.memory.backends.base import runs
from elastic.memory.backends.rank_memory import open_memory
from elastic.memory.checksum import digest
from elastic.memory.rate_limit import RateLimiter
from elastic.memory.weight_buffer import WeightBuffer
from elastic.memory.weight_layout import pages_under
from elastic.types import Fetch, LayerPages, Swap, WeightsSource
from elastic.weights.layer import WeightUnit, combined
from elastic.weights.model import ModelWeights
from elastic.weights.paging import read_in
from elastic.weights.proxy.dropped_source import missing_error
from elastic.weights.shards.layer_cut import Piece

logger = logging.getLogger(__name__)
_PIECE_BYTES = 4 << 20
"""Read at once, between two questions to the rate limiter."""


def require_source(unit: WeightUnit, action: object, shards: frozenset[int]) -> None:
    """Raise for a dropped unit whose weights an action would have from nowhere, or from a layer that is another one.

    `shards` are the parts that it has then.
    """
    if isinstance(action, Fetch):
        _require_same(unit, pages_in(action.source, unit.index), shards - unit.shards_here)
    elif isinstance(action, Swap) and unit.shards_here:
        raise missing_error(unit.name, unit.index, sorted(unit.every - unit.shards_here), len(unit.every))
    elif not unit.recoverable:
        raise StateError(
            f"{unit.name} is dropped, and neither host memory nor a checkpoint has its weights; fetch them from a "
            f"process that has them: rt.fetch({unit.index}, source)"
        )


def refill(weights: ModelWeights, unit: WeightUnit, action: object, buffer: WeightBuffer, rate: RateLimiter) -> None:
    """Have the full weights of a dropped unit in a buffer with pages; they have the digests that they had.

    Raises `StateError` where they cannot be had: nobody has them any more, or what is there are others.
    """
    if isinstance(action, Fetch):
        try:
            _read(weights, unit, buffer, action, [(0, unit.nbytes)], rate)
            _put_in_order(unit, buffer)
            _require_unchanged(unit, _digests_in(buffer, unit))
            return
        except StateError as error:
            _note_fault(unit, error)
    _read_stored(weights, unit, [(tensor, name) for name, tensor in buffer.show(unit.layout).items()], rate)
    _require_unchanged(unit, _digests_in(buffer, unit))


def refill_parts(
    weights: ModelWeights, unit: WeightUnit, shards: frozenset[int], action: object, rate: RateLimiter
) -> int:
    """Have the full weights of further parts in a unit's block, which has pages for them; as `refill`.

    `shards` are the parts that it has then. Returns the bytes that were copied.
    """
    missing = runs_of_parts(unit, shards)
    moved = sum(nbytes for _, nbytes in missing)
    if isinstance(action, Fetch):
        try:
            _read(weights, unit, unit.blocks[unit.full.key], action, missing, rate)
            _require_unchanged(unit, _digests_of_parts(unit, shards))
            return moved
        except StateError as error:
            _note_fault(unit, error)
    _read_stored(weights, unit, _coming(unit, shards), rate)
    _require_unchanged(unit, _digests_of_parts(unit, shards))
    return moved


def runs_of_parts(unit: WeightUnit, shards: frozenset[int]) -> list[tuple[int, int]]:
    """Return the runs of bytes (offset, bytes) of a unit's layout that it has not, and needs for these parts."""
    assert unit.cut is not None, "it comes as a whole"
    runs = [(piece.offset, piece.nbytes) for part in shards - unit.shards_here for piece in unit.pieces(part)]
    if not unit.shards_here:
        runs += [(lies.offset, lies.nbytes) for lies in unit.cut.common(unit.layout).parameters.values()]
    joined: list[tuple[int, int]] = []
    for offset, nbytes in sorted(runs):
        if joined and sum(joined[-1]) == offset:
            joined[-1] = joined[-1][0], joined[-1][1] + nbytes
        else:
            joined.append((offset, nbytes))
    return joined


def pages_in(source: WeightsSource, layer: int) -> LayerPages:
    """Return where a layer lies. Raises `ConfigError` if the source has it not."""
    for pages in source.layers:
        if pages.layer == layer:
            return pages
    there = ", ".join(str(pages.layer) for pages in source.layers) or "none"
    raise ConfigError(f"layer {layer} is not in the source; it has {there}")


def _digests_of_parts(unit: WeightUnit, shards: frozenset[int]) -> dict[str, int]:
    """Return the digests of what comes with parts, by name, as it is in the unit's block."""
    return {
        of if isinstance(of, str) else of.key: digest(tensor) if isinstance(of, str) else of.digest(tensor)
        for tensor, of in _coming(unit, shards)
    }


def _read_stored(
    weights: ModelWeights, unit: WeightUnit, coming: Iterable[tuple[torch.Tensor, Piece | str]], rate: RateLimiter
) -> None:
    """Fill what comes to a unit's block, from host memory, or else from the files of the checkpoint, run by run."""
    kept = []
    for target, of in coming:
        name, piece = (of, None) if isinstance(of, str) else (of.name, of)
        if name in unit.host_copies:
            full = unit.host_copies[name].tensor
            kept.append((target, full if piece is None else piece.of(full)))
        else:
            read_in(unit, name, target, piece, rate)
    weights.streamer(unit).copier.copy(kept, rate).finish()


def _coming(unit: WeightUnit, shards: frozenset[int]) -> Iterator[tuple[torch.Tensor, Piece | str]]:
    """Yield what comes with parts: a tensor over the unit's block, any shape, and which piece or parameter it is."""
    assert unit.cut is not None, "it comes as a whole"
    for part in sorted(shards - unit.shards_here):
        for piece in unit.pieces(part):
            yield unit.show_piece(piece), piece
    if not unit.shards_here:
        for name, tensor in unit.blocks[unit.full.key].show(unit.cut.common(unit.layout)).items():
            yield tensor, name


def _note_fault(unit: WeightUnit, error: StateError) -> None:
    """Raise the error of a source that cannot be read, unless the unit's weights can be had elsewhere."""
    if not unit.recoverable:
        raise error
    logger.warning("%s is read from the checkpoint instead: %s", unit.name, str(error))


def _require_same(unit: WeightUnit, pages: LayerPages, shards: frozenset[int]) -> None:
    """Raise `ConfigError` for a layer of another form or without some parts, `StateError` for one of other weights."""
    if (pages.nbytes, pages.layout) != (unit.nbytes, unit.layout_checksum):
        raise ConfigError(
            f"{unit.name} lies otherwise in the source ({pages.nbytes:,} bytes, layout {pages.layout}) than here "
            f"({unit.nbytes:,} bytes, layout {unit.layout_checksum}): fetch from a process with the same model"
        )
    if not shards <= set(pages.shards):
        raise ConfigError(
            f"parts {sorted(shards - set(pages.shards))} of {unit.name} are not in the source; it has {pages.shards} "
            f"of {len(unit.every)}"
        )
    if pages.digest != combined(unit.digests):
        raise StateError(f"the source has other weights of {unit.name} than were dropped here")


def _read(
    weights: ModelWeights,
    unit: WeightUnit,
    buffer: WeightBuffer,
    action: Fetch,
    wanted: Sequence[tuple[int, int]],
    rate: RateLimiter,
) -> None:
    """Read runs of bytes (offset, bytes) of a unit's layout from the memory of another process into its own."""
    source, pace = action.source, weights.pace if action.coordinated else None
    pages, size = pages_in(source, unit.index), source.page_bytes
    lies = unit.layout.pages(size) if unit.cut is None else unit.cut.pages(unit.layout, size).numbers(pages.shards)
    place_of = dict(zip(sorted(lies), pages.pages, strict=True))
    with closing(open_memory(source.file, source.memory, weights.peers, coordinated=action.coordinated)) as reader:
        most = (lambda: _PIECE_BYTES) if pace is None else lambda: pace.chunk
        for offset, nbytes in wanted:
            buffer.read(reader, _pieces(place_of, size, offset, nbytes, most), rate, pace, at=offset)


def _pieces(
    pages: Mapping[int, int], page_bytes: int, offset: int, nbytes: int, most: Callable[[], int]
) -> Iterator[tuple[int, int]]:
    """Cut a run of bytes of a layout into pieces of the memory: (offset, bytes), each of as many as it may have then.

    `pages` are those of the memory, by number from the beginning of the layout.
    """
    numbers = pages_under(offset, nbytes, page_bytes)
    stop_at, left = offset % page_bytes, nbytes
    for first, count in runs([pages[number] for number in numbers]):
        at = first * page_bytes + stop_at
        stop = at + min(left, count * page_bytes - stop_at)
        left, stop_at = left - (stop - at), 0
        while at < stop:
            piece = min(most(), stop - at)
            yield at, piece
            at += piece


def _put_in_order(unit: WeightUnit, buffer: WeightBuffer) -> None:
    """Have a unit's full parameters in a buffer, which came plain, in the order that they have in its pages.

    The tensors go with this frame: one in the frame of an error that lives on would keep its pages.
    """
    for name, tensor in buffer.show(unit.layout).items():
        if unit.slots[name].prepacked:
            tensor.copy_(unit.slots[name].in_pages(tensor))


def _digests_in(buffer: WeightBuffer, unit: WeightUnit) -> dict[str, int]:
    """Return the digests of a unit's full parameters, by name, as they are in a buffer."""
    return {name: unit.slots[name].digest(tensor) for name, tensor in buffer.show(unit.layout).items()}


def _require_unchanged(unit: WeightUnit, now: Mapping[str, int]) -> None:
    """Raise `StateError` if what has come is not what was dropped, by the digests of both.

    It is given no tensor: an error that lives on would keep it, and the pages under it.
    """
    changed = [name for name, value in now.items() if value != unit.digests[name]]
    if changed:
        raise StateError(
            f"{unit.name}.{changed[0]} is not what it was when the layer was dropped: its process has changed or given "
            "up those pages, or the checkpoint is of another model"
        )
