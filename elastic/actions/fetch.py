"""The weights of a dropped layer on their way back: from another process's memory, the host store or the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing

from elastic.errors import ConfigError, StateError
from elastic.memory.backends.base import runs
from elastic.memory.backends.rank_memory import open_memory
from elastic.memory.checksum import digest
from elastic.memory.rate_limit import RateLimiter
from elastic.memory.weight_buffer import WeightBuffer
from elastic.types import Fetch, LayerPages, WeightsSource
from elastic.weights.layer import WeightUnit, combined
from elastic.weights.model import ModelWeights

logger = logging.getLogger(__name__)
_PIECE_BYTES = 4 << 20
"""Read at once, between two questions to the rate limiter."""


def require_source(unit: WeightUnit, action: object) -> None:
    """Raise for a dropped unit whose weights an action would have from nowhere, or from a layer that is another one."""
    if isinstance(action, Fetch):
        _require_same(unit, pages_in(action.source, unit.index))
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
            _read(weights, buffer, action, pages_in(action.source, unit.index), rate)
            _require_unchanged(unit, buffer)
            return
        except StateError as error:
            if not unit.recoverable:
                raise
            logger.warning("%s is read from the checkpoint instead: %s", unit.name, str(error))
    weights.streamer(unit).copier.copy(unit.sources(buffer.show(unit.layout)), rate).finish()
    _require_unchanged(unit, buffer)


def pages_in(source: WeightsSource, layer: int) -> LayerPages:
    """Return where a layer lies. Raises `ConfigError` if the source has it not."""
    for pages in source.layers:
        if pages.layer == layer:
            return pages
    there = ", ".join(str(pages.layer) for pages in source.layers) or "none"
    raise ConfigError(f"layer {layer} is not in the source; it has {there}")


def _require_same(unit: WeightUnit, pages: LayerPages) -> None:
    """Raise `ConfigError` for a layer of another form, `StateError` for one with other weights."""
    if (pages.nbytes, pages.layout) != (unit.nbytes, unit.layout.checksum):
        raise ConfigError(
            f"{unit.name} lies otherwise in the source ({pages.nbytes:,} bytes, layout {pages.layout}) than here "
            f"({unit.nbytes:,} bytes, layout {unit.layout.checksum}): fetch from a process with the same model"
        )
    if pages.digest != combined(unit.digests):
        raise StateError(f"the source has other weights of {unit.name} than were dropped here")


def _read(weights: ModelWeights, buffer: WeightBuffer, action: Fetch, pages: LayerPages, rate: RateLimiter) -> None:
    source, pace = action.source, weights.pace if action.coordinated else None
    with closing(open_memory(source.file, source.memory, weights.peers, coordinated=action.coordinated)) as reader:
        most = (lambda: _PIECE_BYTES) if pace is None else lambda: pace.chunk
        buffer.read(reader, _pieces(pages, source.page_bytes, most), rate, pace)


def _pieces(pages: LayerPages, page_bytes: int, most: Callable[[], int]) -> Iterator[tuple[int, int]]:
    """Cut what lies in pages into pieces of the memory: (offset, bytes), each of as many as it may have then."""
    left = pages.nbytes
    for first, count in runs(pages.pages):
        offset, stop = first * page_bytes, first * page_bytes + min(left, count * page_bytes)
        left -= stop - offset
        while offset < stop:
            nbytes = min(most(), stop - offset)
            yield offset, nbytes
            offset += nbytes


def _require_unchanged(unit: WeightUnit, buffer: WeightBuffer) -> None:
    """Raise `StateError` if what a buffer has are not the weights that were dropped."""
    now = {name: digest(tensor) for name, tensor in buffer.show(unit.layout).items()}
    changed = [name for name, known in unit.digests.items() if now[name] != known]
    if changed:
        raise StateError(
            f"{unit.name}.{changed[0]} is not what it was when the layer was dropped: its process has changed or given "
            "up those pages, or the checkpoint is of another model"
        )
