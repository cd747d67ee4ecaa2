"""The weights of a dropped layer on their way back: from other processes' memory, the host store or the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import torch

from elastic.errors import ConfigError, StateError
from elastic.memory.backends.base import runs
from elastic.memory.backends.rank_memory import open_memory
from elastic.memory.rate_limit import RateLimiter
from elastic.memory.weight_layout import pages_under
from elastic.planning.sharding.numbers import shared_out
from elastic.types import Fetch, LayerPages, Swap, WeightsSource
from elastic.weights.layer import WeightUnit, combined
from elastic.weights.model import ModelWeights
from elastic.weights.paging import read_in
from elastic.weights.proxy.dropped_source import missing_error
from elastic.weights.shards.layer_cut import Piece

logger = logging.getLogger(__name__)
_PIECE_BYTES = 4 << 20
"""Read at once, between two questions to the rate limiter."""
MOST_AT_ONCE = 8
"""Sources that are read at the same time, each on a thread of its own."""
_COMMON = -1
"""In place of a part: what the parts of a layer have in common, which comes with the first."""


def require_source(unit: WeightUnit, action: object, shards: frozenset[int]) -> None:
    """Raise for a dropped unit whose weights an action would have from nowhere, or from a layer that is another one.

    `shards` are the parts that it has then.
    """
    if isinstance(action, Fetch):
        _require_had(unit, action.sources, shards - unit.shards_here)
    elif isinstance(action, Swap) and unit.shards_here:
        raise missing_error(unit.name, unit.index, sorted(unit.every - unit.shards_here), len(unit.every))
    elif not unit.recoverable:
        raise StateError(
            f"{unit.name} is dropped, and neither host memory nor a checkpoint has its weights; fetch them from a "
            f"process that has them: rt.fetch({unit.index}, source)"
        )


def refill(weights: ModelWeights, unit: WeightUnit, shards: frozenset[int], action: object, rate: RateLimiter) -> int:
    """Have the full weights of a dropped unit, or of further parts of it, in its block, which has pages for them.

    `shards` are the parts that it has then. They have the digests that they had. Returns the bytes that were copied.
    Raises `StateError` where they cannot be had: nobody has them any more, or what is there are others.
    """
    missing = _missing(unit, shards)
    moved = sum(nbytes for _, nbytes in _runs(unit, missing))
    if isinstance(action, Fetch):
        missing = _gather(weights, unit, action, missing, rate)
    if missing:
        _read_stored(weights, unit, missing, rate)
        _require_unchanged(unit, _digests(unit, missing))
    return moved


def missing_runs(unit: WeightUnit, shards: frozenset[int]) -> list[tuple[int, int]]:
    """Return the runs of bytes (offset, bytes) of a unit's layout that it has not, and needs for these parts."""
    return _runs(unit, _missing(unit, shards))


def _missing(unit: WeightUnit, shards: frozenset[int]) -> frozenset[int]:
    """Return the parts of these that a unit has not; of one that is cut with `_COMMON`, if it has none."""
    common = {_COMMON} if unit.cut is not None and not unit.shards_here else frozenset[int]()
    return (shards - unit.shards_here) | common


def _runs(unit: WeightUnit, parts: frozenset[int]) -> list[tuple[int, int]]:
    """Return the runs of bytes (offset, bytes) of a unit's layout in which parts lie."""
    if unit.cut is None:
        return [(0, unit.nbytes)]
    runs = [(piece.offset, piece.nbytes) for part in parts - {_COMMON} for piece in unit.pieces(part)]
    if _COMMON in parts:
        runs += [(lies.offset, lies.nbytes) for lies in unit.cut.common(unit.layout).parameters.values()]
    joined: list[tuple[int, int]] = []
    for offset, nbytes in sorted(runs):
        if joined and sum(joined[-1]) == offset:
            joined[-1] = joined[-1][0], joined[-1][1] + nbytes
        else:
            joined.append((offset, nbytes))
    return joined


def _gather(
    weights: ModelWeights, unit: WeightUnit, action: Fetch, wanted: frozenset[int], rate: RateLimiter
) -> frozenset[int]:
    """Read parts of a unit from the sources that have them, several at once; return what is left to the checkpoint.

    What one of them cannot give, or has changed since, is read from others. Raises the error of one where neither
    others nor the checkpoint have it. (AMOEBA, section 3.2)
    """
    usable = dict(enumerate(_usable(unit, action.sources)))
    coordinated = action.coordinated
    have, left = {n: {*pages.shards, _COMMON} for n, (_, pages) in usable.items()}, wanted
    while asked := shared_out(left, have):
        with ThreadPoolExecutor(min(MOST_AT_ONCE, len(asked)), "elastic-fetch") as threads:
            reads = {
                n: threads.submit(_read, weights, unit, usable[n][0], _runs(unit, frozenset(parts)), rate, coordinated)
                for n, parts in asked.items()
            }
        for n, done in reads.items():
            parts = frozenset(asked[n])
            try:
                done.result()
                _put_in_order(unit, parts)
                _require_unchanged(unit, _digests(unit, parts))
                left -= parts
            except StateError as error:
                del have[n]
                _note_fault(unit, error, elsewhere=parts <= frozenset().union(*have.values()))
    return left


def _usable(unit: WeightUnit, sources: Iterable[WeightsSource]) -> list[tuple[WeightsSource, LayerPages]]:
    """List the sources that have the weights which a unit had, and where these lie in them."""
    there = [(source, pages) for source in sources for pages in source.layers if pages.layer == unit.index]
    return [(source, pages) for source, pages in there if _difference(unit, pages) is None]


def _read_stored(weights: ModelWeights, unit: WeightUnit, parts: frozenset[int], rate: RateLimiter) -> None:
    """Fill what comes with parts, from host memory, or else from the files of the checkpoint, run by run."""
    kept = []
    for target, of in _coming(unit, parts):
        name, piece = (of, None) if isinstance(of, str) else (of.name, of)
        if name in unit.host_copies:
            full = unit.host_copies[name].tensor
            kept.append((target, full if piece is None else piece.of(full)))
        else:
            read_in(unit, name, target, piece, rate)
    weights.streamer(unit).copier.copy(kept, rate).finish()


def _digests(unit: WeightUnit, parts: frozenset[int]) -> dict[str, int]:
    """Return the digests of what comes with parts, by name, as it is in the unit's block."""
    return {
        of if isinstance(of, str) else of.key: (unit.slots[of] if isinstance(of, str) else of).digest(tensor)
        for tensor, of in _coming(unit, parts)
    }


def _coming(unit: WeightUnit, parts: frozenset[int]) -> Iterator[tuple[torch.Tensor, Piece | str]]:
    """Yield what comes with parts: a tensor over the unit's block, any shape, and which piece or parameter it is."""
    for piece in (piece for part in sorted(parts - {_COMMON}) for piece in unit.pieces(part)):
        yield unit.show_piece(piece), piece
    if unit.cut is None or _COMMON in parts:
        layout = unit.layout if unit.cut is None else unit.cut.common(unit.layout)
        for name, tensor in unit.blocks[unit.full.key].show(layout).items():
            yield tensor, name


def _note_fault(unit: WeightUnit, error: StateError, *, elsewhere: bool) -> None:
    """Raise the error of a source that cannot be read, unless others or the checkpoint have what it was to give."""
    if not elsewhere and not unit.recoverable:
        raise error
    where = "another process" if elsewhere else "the checkpoint"
    logger.warning("%s is read from %s instead: %s", unit.name, where, str(error))


def _require_had(unit: WeightUnit, sources: Sequence[WeightsSource], shards: frozenset[int]) -> None:
    """Raise unless sources have these parts of the weights that a unit had.

    `ConfigError` for a layer that is not there, of another form or without some parts, `StateError` for other weights.
    """
    there = [pages for source in sources for pages in source.layers if pages.layer == unit.index]
    if not there:
        others = ", ".join(str(pages.layer) for source in sources for pages in source.layers) or "none"
        raise ConfigError(f"layer {unit.index} is not in the source; it has {others}")
    had = {shard for _, pages in _usable(unit, sources) for shard in pages.shards}
    if shards <= had:
        return
    if difference := next(filter(None, (_difference(unit, pages) for pages in there)), None):
        raise difference
    raise ConfigError(
        f"parts {sorted(shards - had)} of {unit.name} are not in the source; it has {tuple(sorted(had))} of "
        f"{len(unit.every)}"
    )


def _difference(unit: WeightUnit, pages: LayerPages) -> ConfigError | StateError | None:
    """Say in what the layer of a source is another one than a unit's; None: it is the same."""
    if (pages.nbytes, pages.layout) != (unit.nbytes, unit.layout_checksum):
        return ConfigError(
            f"{unit.name} lies otherwise in the source ({pages.nbytes:,} bytes, layout {pages.layout}) than here "
            f"({unit.nbytes:,} bytes, layout {unit.layout_checksum}): fetch from a process with the same model"
        )
    if pages.digest != combined(unit.digests):
        return StateError(f"the source has other weights of {unit.name} than were dropped here")
    return None


def _read(
    weights: ModelWeights,
    unit: WeightUnit,
    source: WeightsSource,
    wanted: Sequence[tuple[int, int]],
    rate: RateLimiter,
    coordinated: bool,
) -> None:
    """Read runs of bytes (offset, bytes) of a unit's layout from the memory of another process into its own."""
    pace, size = weights.pace if coordinated else None, source.page_bytes
    pages = next(pages for pages in source.layers if pages.layer == unit.index)
    lies = unit.layout.pages(size) if unit.cut is None else unit.cut.pages(unit.layout, size).numbers(pages.shards)
    place_of = dict(zip(sorted(lies), pages.pages, strict=True))
    block, device = unit.blocks[unit.full.key], unit.pool.device
    with closing(open_memory(source.file, source.memory, weights.peers, device, coordinated=coordinated)) as reader:
        most = (lambda: _PIECE_BYTES) if pace is None else lambda: pace.chunk
        for offset, nbytes in wanted:
            block.read(reader, _pieces(place_of, size, offset, nbytes, most), rate, pace, at=offset)


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


def _put_in_order(unit: WeightUnit, parts: frozenset[int]) -> None:
    """Have what has come with parts, plain, in the order that it has in the unit's pages.

    The tensors go with this frame: one in the frame of an error that lives on would keep its pages.
    """
    for tensor, of in _coming(unit, parts):
        if isinstance(of, str) and unit.slots[of].prepacked:
            tensor.copy_(unit.slots[of].in_pages(tensor))


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
