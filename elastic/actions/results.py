"""Sums of the results of several actions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elastic.types import Change


def merge_changes(changes: Sequence[Change]) -> Change:
    """Add up the changes of several actions on different layers, or on different parts of layers."""
    return Change(
        "deferred" if any(change.deferred for change in changes) else "applied",
        tuple(dict.fromkeys(layer for change in changes for layer in change.layers)),
        tuple(dict.fromkeys(layer for change in changes for layer in change.deferred)),
        sum(change.moved_bytes for change in changes),
        sum(change.released_bytes for change in changes),
        sum(change.retained_bytes for change in changes),
    )


def followed_by(first: Change, later: Iterable[Change]) -> Change:
    """Add to a change what later ones did to its deferred layers; bytes of a later change count by its layers."""
    moved, released, retained = first.moved_bytes, first.released_bytes, first.retained_bytes
    done: set[int] = set()
    for change in later:
        layers = [layer for layer in change.layers if layer in first.deferred]
        if layers:
            moved += change.moved_bytes * len(layers) // len(change.layers)
            released += change.released_bytes * len(layers) // len(change.layers)
            retained += change.retained_bytes * len(layers) // len(change.layers)
            done.update(layers)
    deferred = tuple(layer for layer in first.deferred if layer not in done)
    applied = (*first.layers, *(layer for layer in first.deferred if layer in done))
    return Change("deferred" if deferred else "applied", applied, deferred, moved, released, retained)
