"""Which hidden states go from which rank to which between two layers of a step: the same answer at every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from elastic.planning.arrangement.arrangement import Arrangement, Assignment

NO_HOSTS: Mapping[str, str] = {}


class Route(NamedTuple):
    """The hidden states of consecutive tokens of a batch that one rank sends another."""

    frm: str
    to: str
    start: int
    stop: int


def routes(
    arrangement: Arrangement,
    assignment: Assignment,
    spans: Sequence[tuple[str, int]],
    layer: int,
    hosts: Mapping[str, str] = NO_HOSTS,
) -> tuple[Route, ...]:
    """Return the routes behind a layer: of a batch of `spans`, (request, new tokens) one after another.

    After a layer all shards of the copy that computed a request have its hidden states, and all shards of the next
    layer's copy need them. Who needs and has not gets them once: from a rank of its own host where there is one, else
    the shards take turns. Behind the last layer nothing goes anywhere: the ranks that have the hidden states sample.
    """
    if layer + 1 >= len(arrangement.layers):
        return ()
    was, will = arrangement.layers[layer], arrangement.layers[layer + 1]
    found: list[Route] = []
    stop = 0
    for (old, new), same in groupby(spans, lambda span: _copies(assignment[span[0]], layer)):
        start, stop = stop, stop + sum(count for _, count in same)
        have, need = was[old], will[new]
        if stop == start or have == need:
            continue
        for turn, rank in enumerate(rank for rank in need if rank not in have):
            near = [other for other in have if rank in hosts and hosts.get(other) == hosts[rank]] or have
            found.append(Route(near[turn % len(near)], rank, start, stop))
    return tuple(_joined(found))


def _copies(path: Sequence[int], layer: int) -> tuple[int, int]:
    return path[layer], path[layer + 1]


def _joined(found: Sequence[Route]) -> list[Route]:
    """Return the routes with those of one pair joined where tokens follow one another, in the order of the tokens."""
    joined: dict[tuple[str, str], list[Route]] = {}
    for route in found:
        same = joined.setdefault(route[:2], [])
        if same and same[-1].stop == route.start:
            same[-1] = same[-1]._replace(stop=route.stop)
        else:
            same.append(route)
    return sorted((route for same in joined.values() for route in same), key=lambda r: (r.start, r.to, r.frm))
