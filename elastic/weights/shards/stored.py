"""A parameter in the files of a checkpoint, read run by run: never more of it is in memory than a piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from elastic.memory.checkpoint_file import Checkpoint, CheckpointFile
from elastic.memory.checksum import RunningDigest
from elastic.memory.copy_engine import copy, pieces
from elastic.memory.rate_limit import RateLimiter

CHUNK_BYTES = 8 << 20
"""Read at once: so much memory does loading take besides the pages that are filled."""


@dataclass(frozen=True)
class Tile:
    """An entry of a file that is the whole of a parameter, or a block of it, such as one of its experts."""

    file: CheckpointFile
    name: str
    at: tuple[int, ...]
    """Where it begins in the parameter."""

    @property
    def tensor(self) -> torch.Tensor | None:
        """The entry in its shape, mapped, ones before it: as many dimensions as the parameter; None for an unknown
        dtype."""
        tensor = self.file.tensor(self.name)
        return None if tensor is None else tensor.view((1,) * (len(self.at) - tensor.ndim) + tuple(tensor.shape))


@dataclass(frozen=True)
class StoredParameter:
    """A parameter of a model, of this shape and dtype, as the files have it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    tiles: tuple[Tile, ...]

    def read(
        self, target: torch.Tensor, dim: int = 0, rows: range | None = None, pace: RateLimiter | None = None
    ) -> None:
        """Copy rows of a dimension (None: all) to `target`, of the parameter's shape but for that dimension."""
        rows = rows if rows is not None else range(self.shape[dim] if self.shape else 1)
        for tile in self.tiles:
            self._read(tile, target, dim, rows, pace)

    def digest(self, dim: int = 0, rows: range | None = None) -> int:
        """Compute the checksum that these rows have where the dimension is stored outermost, as `Piece.digest`."""
        rows = rows if rows is not None else range(self.shape[dim] if self.shape else 1)
        others = [size for other, size in enumerate(self.shape) if other != dim]
        row = torch.empty(others, dtype=self.dtype, device="meta")
        step, running = max(1, CHUNK_BYTES // max(1, row.nbytes)), RunningDigest()
        for start in range(rows.start, rows.stop, step):
            chunk = range(start, min(start + step, rows.stop))
            buffer = torch.empty([len(chunk), *others] if self.shape else (), dtype=self.dtype)
            self.read(buffer.movedim(0, dim) if self.shape else buffer, dim, chunk)
            running.update(buffer)
        return running.value

    def whole(self) -> torch.Tensor:
        """Return the parameter, in its shape and dtype: mapped where it is one entry of its dtype, else copied."""
        (first, *others) = self.tiles
        tensor = first.tensor
        if tensor is not None and not others and tensor.dtype == self.dtype:
            return tensor
        copied = torch.empty(self.shape, dtype=self.dtype)
        self.read(copied)
        return copied

    def _read(self, tile: Tile, target: torch.Tensor, dim: int, rows: range, pace: RateLimiter | None) -> None:
        source = tile.tensor
        assert source is not None, "an entry of another dtype is not found"
        if source.ndim:
            begin = tile.at[dim]
            first, stop = max(rows.start, begin), min(rows.stop, begin + source.shape[dim])
            if first >= stop:
                return
            source, target = (
                source.narrow(dim, first - begin, stop - first),
                target.narrow(dim, first - rows.start, stop - first),
            )
            for other in set(range(source.ndim)) - {dim}:
                target = target.narrow(other, tile.at[other], source.shape[other])
        for piece, to in pieces(source, target, CHUNK_BYTES):
            copy(to, piece)
            tile.file.forget(tile.name)
            if pace is not None:
                pace.acquire(to.nbytes)


def find_stored(
    checkpoint: Checkpoint | None, name: str, shape: Sequence[int], dtype: torch.dtype
) -> StoredParameter | None:
    """Find a parameter in files by its name in the model; None: it is not there so, or does not hold all values."""
    tiles = tuple(_tiles(checkpoint, name, len(shape))) if checkpoint is not None else ()
    tensors = [tile.tensor for tile in tiles]
    filled = sum(0 if tensor is None else tensor.numel() for tensor in tensors)
    fits = all(
        tensor is not None
        and torch.promote_types(tensor.dtype, dtype) == dtype
        and all(at + size <= whole for at, size, whole in zip(tile.at, tensor.shape, shape, strict=True))
        for tile, tensor in zip(tiles, tensors, strict=True)
    )
    size = torch.Size(shape).numel()
    return StoredParameter(tuple(shape), dtype, tiles) if tiles and fits and filled == size else None


def _tiles(checkpoint: Checkpoint, name: str, ndim: int) -> Iterator[Tile]:
    """Yield the entries of a parameter; none, if one of them is missing."""
    located = checkpoint.locate(name)
    if located is not None:
        file, entry = located
        if len(file.shapes[entry]) == ndim:
            yield Tile(file, entry, (0,) * ndim)
        return
    for entry, at in checkpoint.find_blocks(name):
        located = checkpoint.locate(entry)
        if located is None or len(located[0].shapes[located[1]]) > ndim:
            return
        yield Tile(*located, at)
