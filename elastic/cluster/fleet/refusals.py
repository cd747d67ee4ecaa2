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
    if not serving or any(instance.reaches(request) for instance in serving):
        return
    if any(instance.ever_holds(request) for instance in serving):
        tokens = len(request.prompt) + request.max_tokens
        raise Overloaded(
            f"a request of {tokens} tokens does not fit while the limits of KV are as they are",
            retry_after_s=retry_after_s,
        )
    raise no_room(serving, request)


def longest_request(serving: Sequence[Instance], most: int, *, ever: bool) -> int:
    """Return the most tokens, up to `most`, of a request that is not refused; `ever`: not for good."""

    require_whole(most, "most", least=0)

    def is_refused(tokens: int) -> bool:
        holds = (instance.most_blocks if ever else instance.reachable_limit for instance in serving)
        return all(i.blocks_alone(tokens) > blocks for i, blocks in zip(serving, holds, strict=True))

    return bisect_left(range(1, most + 1), True, key=is_refused) if serving else most


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


class VerbChecks:
    """What the verbs of a fleet check before they begin."""

    def _require_started(self) -> None:
        """Raise `StateError` for a fleet that has no ranks yet, or none any more."""

    def _require_verb(self, **arguments: Any) -> None:
        """Raise `StateError` without ranks, and `ConfigError` for arguments, by their names, of another kind."""
        self._require_started()
        for name, value in arguments.items():
            _CHECKS[name](value, name)


def layer_numbers(layers: Any) -> tuple[int, ...]:
    """Return the numbers of layers, of any iterable. Raises `ConfigError` for what is none."""
    numbers = tuple(layers) if isinstance(layers, Iterable) and not isinstance(layers, str | bytes) else (None,)
    require(all(map(is_integer, numbers)), "layers", layers, "a list of the numbers of layers")
    return numbers


def _require_text(value: Any, name: str) -> None:
    require(isinstance(value, str), name, value, "its name, a text")


_CHECKS: dict[str, Callable[[Any, str], None]] = {
    **dict.fromkeys(("rank", "home", "request", "instance", "id", "why"), _require_text),
    **dict.fromkeys(("dry_run", "drain", "sharing", "whole"), require_flag),
    "most": require_count,
    "timeout_s": require_seconds,
}
