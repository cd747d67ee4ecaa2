"""Requests that wait at an instance for blocks, which others of its group must not take before them."""

from __future__ import annotations

from collections.abc import Iterable

from elastic.cluster.fleet.instance import Instance, all_blocks
from elastic.cluster.fleet.records.requests import RequestRecord

STARVES_S = 1.0
"""How long a request waits at an instance before others of its group keep for it what it lacks."""


def waiting_answers(instance: Instance) -> list[tuple[RequestRecord, int]]:
    """List requests of which answers have no blocks, and how many of these, the first to wait first.

    They are as many as the instance says, of the last ones that it was given.
    """
    left, waiting = instance.load.waiting, list[tuple[RequestRecord, int]]()
    for record in reversed(instance.records.values()):
        if left <= 0:
            break
        answers = sum(not answer.tokens for answer in record.live) if record.begun else record.left
        if answers:
            waiting.append((record, min(left, answers)))
            left -= answers
    return waiting[::-1]


def waiting_blocks(instance: Instance) -> list[int]:
    """List the blocks that requests may need for which an instance has none yet, the first to wait first."""
    kv = instance.kv_format
    return [all_blocks(kv, record) * answers // record.left for record, answers in waiting_answers(instance)]


def waited_s(instance: Instance, now: float) -> float:
    """Return for how long the first request that waits at an instance has been there; 0: none does, or it has begun."""
    first = next((record for record, _ in waiting_answers(instance)), None)
    return 0.0 if first is None or first.begun else now - first.given_s


def reserved_blocks(instances: Iterable[Instance], record: RequestRecord, now: float) -> dict[str, int]:
    """Return the blocks that instances keep from a request: what one lacks that has waited elsewhere in their group.

    It is older, and its instance could be given so much.
    """
    reserved: dict[str, int] = {}
    for instance in instances:
        if not instance.load.waiting or not instance.group or waited_s(instance, now) < STARVES_S:
            continue
        first, _ = waiting_answers(instance)[0]
        lacking = waiting_blocks(instance)[0] - instance.load.free_blocks
        reached = instance.request_blocks(first.request) <= instance.reachable_blocks
        if lacking > 0 and first.arrived_s < record.arrived_s and reached:
            others = (name for name in instance.group if name != instance.name)
            reserved.update((name, max(lacking, reserved.get(name, 0))) for name in others)
    return reserved
