"""Which of a fleet's instances gets a request now: those that can hold it, as the router orders them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from elastic.cluster.fleet.instance import Instance
from elastic.cluster.fleet.planning.prefix_index import PrefixIndex
from elastic.cluster.fleet.planning.router import Routing, RoutingCandidate, route
from elastic.cluster.fleet.planning.starvation import reserved_blocks
from elastic.cluster.fleet.records.requests import RequestRecord


def choose(
    instances: Mapping[str, Instance],
    record: RequestRecord,
    prefixes: PrefixIndex,
    routing: Routing,
    now: float,
    among: Collection[str] | None = None,
) -> tuple[Instance, int] | None:
    """Return where a request goes now, and how many blocks of its prompt are there; None: nowhere.

    `now` is on the clock of the records; `among`: just one of these.
    """
    reserved = reserved_blocks(instances.values(), record, now)
    candidates = []
    for name, instance in instances.items():
        if among is not None and name not in among:
            continue
        if not instance.may_get(record, now):
            continue
        cached = prefixes.cached(name, record.hashes.get(instance.kv_format.block_tokens, ())) if record.hashes else 0
        if instance.holds(record, cached, reserved.get(name, 0) if reserved else 0):
            ahead = sum(unheard.prompt_blocks for unheard in instance.unheard.values()) if instance.unheard else 0
            room = instance.sequences, instance.free_blocks
            size = instance.kv_format.block_tokens
            candidates.append(RoutingCandidate(name, *room, ahead, cached, instance.given, size))
    best = route(candidates, routing)
    return None if best is None else (instances[best.name], best.cached_blocks)
