"""What is refused at once: requests too large for all instances or more than may wait, verbs that make no sense."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from elastic.cluster.fleet.instance import Instance
from elastic.cluster.fleet.records.requests import RequestRecord
from elastic.engines.base import Request
from elastic.errors import (
    CapacityError,
    NotFound,
    Overloaded,
    StateError,
    is_integer,
    require,
    require_count,
    require_flag,
    require_seconds,
    require_whole,
)


def require_possible(serving: Sequence[Instance], request: Request, retry_after_s: float) -> None:
    """Raise `CapacityError` for a request that no instance which serves could hold, however empty it and others are.

    `Overloaded`, if one could have held it, and limits of KV have been lowered since.
    """
    if not serving or any(each.request_blocks(request) <= each.reachable_blocks for each in serving):
        return
    if any(each.request_blocks(request) <= each.most_blocks for each in serving):
        tokens = len(request.prompt) + request.max_tokens
        raise Overloaded(
            f"a request of {tokens} tokens does not fit while the limits of KV are as they are",
            retry_after_s=retry_after_s,
        )
    raise no_room(serving, request)


def longest_request(serving: Sequence[Instance], most: int, *, ever: bool) -> int:
    """Return the most tokens, up to `most`, of a request that is not refused; `ever`: not for good."""
    require_whole(most, "most", least=0)
    if not serving:
        return most
    limits = [(each, each.most_blocks if ever else each.reachable_blocks) for each in serving]
    return bisect_left(
        range(1, most + 1), True, key=lambda tokens: all(each.blocks_alone(tokens) > limit for each, limit in limits)
    )


def no_room(instances: Sequence[Instance], request: Request) -> CapacityError:
    """Return the error for a request that fits in none of these instances."""
    best = max(instances, key=lambda instance: instance.most_blocks)
    kv, tokens = best.kv_format, len(request.prompt) + request.max_tokens
    return CapacityError(
        f"a request of {tokens} tokens fits in no instance; ask for less, or give the ranks more memory",
        requested_bytes=best.request_blocks(request) * kv.group_block_bytes,
        free_bytes=max(0, best.free_blocks) * kv.group_block_bytes,
        total_bytes=best.most_blocks * kv.group_block_bytes,
    )


def not_there(what: str, there: Iterable[str]) -> NotFound:
    """Return the error for a rank or an instance that nobody knows; `there` are the names of those that are."""
    return NotFound(f"there is no {what}; there are: {', '.join(there) or 'none'}")


def require_place(
    queue: Iterable[RequestRecord], request: Request, max_queue: int | None, retry_after_s: float
) -> None:
    """Raise `Overloaded` if no more requests may wait: parts of the request's parent do not count."""
    if max_queue is None:
        return
    waiting = sum(request.parent is None or record.request.parent != request.parent for record in queue)
    if waiting >= max_queue:
        raise Overloaded(f"{waiting} requests wait, max_queue={max_queue}", retry_after_s=retry_after_s)


def require_timeout(timeout_s: Any) -> None:
    """Raise `ConfigError` for what is no number of seconds, and not None."""
    if timeout_s is not None:
        require_seconds(timeout_s, "timeout_s")


STARTED = ("starting", "serving", "draining", "stopping")
"""The states of a fleet that may have ranks."""


class VerbChecks:
    """What the verbs of a fleet check before they begin."""

    _state = "serving"  # one of `new`, those of `STARTED`, `stopped`; a simulated fleet serves always

    def _require_state(self, *states: str) -> None:
        """Raise `StateError` for a fleet that is in none of these states."""
        if self._state not in states:
            remedy = {"new": "start it first: fleet.start(), or with fleet:", "starting": "wait until start() returns"}
            raise StateError(f"the fleet is {self._state}; {remedy.get(self._state, 'make a new one')}")

    def _require_verb(self, **arguments: Any) -> None:
        """Raise `StateError` without ranks, and `ConfigError` for arguments, by their names, of another kind."""
        self._require_state(*STARTED)
        for name, value in arguments.items():
            _CHECKS[name](value, name)


def layer_numbers(layers: Any) -> tuple[int, ...]:
    """Return the numbers of layers, of any iterable. Raises `ConfigError` for what is none."""
    numbers = tuple(layers) if isinstance(layers, Iterable) and not isinstance(layers, str | bytes) else (None,)
    require(all(map(is_integer, numbers)), "layers", layers, "a list of the numbers of layers")
    return numbers


_CHECKS: dict[str, Callable[[Any, str], None]] = {
    **dict.fromkeys(
        ("rank", "home", "request", "instance", "id", "why"),
        lambda value, name: require(isinstance(value, str), name, value, "its name, a text"),
    ),
    **dict.fromkeys(("dry_run", "drain", "sharing", "whole"), require_flag),
    "most": require_count,
    "timeout_s": require_seconds,
}
