"""Recounting what a fleet knows of its requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from elastic.cluster.fleet.instance import Instance
from elastic.cluster.fleet.records.requests import RequestRecord
from elastic.errors import IntegrityError


def check_records(
    records: Mapping[str, RequestRecord],
    queue: Collection[RequestRecord],
    instances: Mapping[str, Instance],
    names: set[str],
) -> None:
    """Raise `IntegrityError` if a request is lost, at two instances, or ended and remembered.

    `names`: the sequences that are known to live.
    """
    waiting = {id(record) for record in queue}
    for request, record in records.items():
        there = [instance.name for instance in instances.values() if request in instance.records]
        if there != ([record.instance] if record.instance is not None else []):
            raise IntegrityError(f"request {request!r} is at {record.instance}, instances that have it: {there}")
        if record.instance is None and not record.moving and id(record) not in waiting:
            raise IntegrityError(f"request {request!r} is at no instance, and does not wait")
        if not record.left:
            raise IntegrityError(f"request {request!r} has ended, and is remembered")
    if len(waiting) != len(queue) or any(record.instance is not None for record in queue):
        raise IntegrityError("a request waits that an instance has, or waits twice")
    live = {answer.state.id for record in records.values() for answer in record.answers}
    if live != names:
        raise IntegrityError(f"sequences {sorted(live ^ names)} are remembered or missing")
