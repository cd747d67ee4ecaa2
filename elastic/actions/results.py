"""Adding up what several actions came to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elastic.types import Change


def together(changes: Sequence[Change]) -> Change:
    """One change of what several did to different layers, or to different parts of layers."""
    return Change(
        "deferred" if any(change.deferred for change in changes) else "applied",
        tuple(dict.fromkeys(layer for change in changes for layer in change.layers)),
        tuple(dict.fromkeys(layer for change in changes for layer in change.deferred)),
        sum(change.moved_bytes for change in changes),
        sum(change.released_bytes for change in changes),
        sum(change.retained_bytes for change in changes),
    )


def followed_by(first: Change, later: Iterable[Change]) -> Change:
    """A change whose deferred layers moved, some or all of them, in later ones; bytes are shared out by layers."""
    mine = [(c, [layer for layer in c.layers if layer in first.deferred]) for c in later]
    done = {layer for _, layers in mine for layer in layers}
    waiting = tuple(layer for layer in first.deferred if layer not in done)
    return Change(
        "deferred" if waiting else "applied",
        (*first.layers, *(layer for layer in first.deferred if layer in done)),
        waiting,
        first.moved_bytes + sum(c.moved_bytes * len(layers) // len(c.layers) for c, layers in mine if layers),
        first.released_bytes + sum(c.released_bytes * len(layers) // len(c.layers) for c, layers in mine if layers),
        first.retained_bytes + sum(c.retained_bytes * len(layers) // len(c.layers) for c, layers in mine if layers),
    )
