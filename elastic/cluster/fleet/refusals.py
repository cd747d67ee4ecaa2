"""What is refused at once: requests too large for all instances, or more than may wait, and seconds that are none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from elastic.cluster.fleet.instance import Instance, request_blocks
from elastic.config import is_number, require
from elastic.engines.base import Request
from elastic.errors import CapacityError, Overloaded


def require_possible(instances: Iterable[Instance], request: Request, retry_after_s: float) -> None:
    """Raise `CapacityError` for a request that no instance could hold, however empty it and others are.

    `Overloaded`, if one could have held it, and limits of KV have been lowered since.
    """
    serving = [instance for instance in instances if instance.state == "serving"]
    if not serving or any(instance.reaches(request) for instance in serving):
        return
    if any(instance.ever_holds(request) for instance in serving):
        tokens = len(request.prompt) + request.max_tokens
        raise Overloaded(
            f"a request of {tokens} tokens does not fit while the limits of KV are as they are",
            retry_after_s=retry_after_s,
        )
    raise no_room(serving, request)


def no_room(instances: Sequence[Instance], request: Request) -> CapacityError:
    """Return the error for a request that fits in none of these instances."""
    best = max(instances, key=lambda instance: instance.most_blocks)
    kv, tokens = best.kv_format, len(request.prompt) + request.max_tokens
    block_bytes = kv.block_bytes * sum(len(layers) for layers, _ in kv.groups) // len(kv.groups)
    return CapacityError(
        f"a request of {tokens} tokens fits in no instance; ask for less, or give the ranks more memory",
        requested_bytes=request_blocks(kv, request) * block_bytes,
        free_bytes=max(0, best.free_blocks) * block_bytes,
        total_bytes=best.most_blocks * block_bytes,
    )


def require_place(waiting: int, max_queue: int | None, retry_after_s: float) -> None:
    """Raise `Overloaded` if no more requests may wait."""
    if max_queue is not None and waiting >= max_queue:
        raise Overloaded(f"{waiting} requests wait, max_queue={max_queue}", retry_after_s=retry_after_s)


def require_timeout(timeout_s: Any) -> None:
    """Raise `ConfigError` for what is no number of seconds, and not None."""
    seconds = timeout_s is None or (is_number(timeout_s) and timeout_s >= 0)
    require(seconds, "timeout_s", timeout_s, "a number of seconds, at least 0, or None")
