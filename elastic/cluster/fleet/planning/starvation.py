"""Requests that wait at an instance for blocks, which others of its group must not take before them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from elastic.cluster.fleet.instance import Instance, all_blocks
from elastic.cluster.fleet.records.requests import RequestRecord

STARVES_S = 1.0
"""How long a request waits at an instance before others of its group keep for it what it lacks."""


def waiting_blocks(instance: Instance) -> list[int]:
    """List the blocks that requests may need for which an instance has none yet, the first to wait first.

    They are as many sequences as the instance says, of the last ones that it was given.
    """
    return [blocks for _, blocks in _waiting(instance)]


def waited_s(instance: Instance, now: float) -> float:
    """Return for how long the first request that waits at an instance has been there; 0: none does, or it has begun."""
    unheard = next((instance.unheard.get(record.request.id) for record, _ in _waiting(instance)), None)
    return 0.0 if unheard is None else now - unheard.since_s


def reserved_blocks(instances: Iterable[Instance], record: RequestRecord, now: float) -> dict[str, int]:
    """Return the blocks that instances keep from a request: what one lacks that has waited elsewhere in their group.

    It is older, and its instance could be given so much.
    """
    reserved: dict[str, int] = {}
    for instance in instances:
        if not instance.load.waiting or not instance.group or waited_s(instance, now) < STARVES_S:
            continue
        first, blocks = _waiting(instance)[0]
        lacking = blocks - instance.load.free_blocks
        if lacking > 0 and first.arrived_s < record.arrived_s and instance.reaches(first.request):
            others = (name for name in instance.group if name != instance.name)
            reserved.update((name, max(lacking, reserved.get(name, 0))) for name in others)
    return reserved


def _waiting(instance: Instance) -> list[tuple[RequestRecord, int]]:
    return [*_last_waiting(instance)][::-1]


def _last_waiting(instance: Instance) -> Iterator[tuple[RequestRecord, int]]:
    """Yield requests of which sequences have no blocks, and what these may need, the last one first."""
    left = instance.load.waiting
    for record in reversed(instance.records.values()):
        if left <= 0:
            return
        sequences = sum(not answer.tokens for answer in record.live) if record.begun else record.left
        if sequences:
            waiting = min(left, sequences)
            left -= waiting
            yield record, all_blocks(instance.kv_format, record) * waiting // record.left
