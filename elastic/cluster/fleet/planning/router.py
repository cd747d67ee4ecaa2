"""Which instance a request goes to: a pure function of what is known of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Routing = Literal["prefix", "freeness", "least_load", "round_robin"]


@dataclass(frozen=True, slots=True)
class RoutingCandidate:
    """An instance that can hold a request now."""

    name: str
    sequences: int
    """Answers that it was given and that have not ended."""
    free_blocks: int
    """Blocks of KV cache after what its requests are promised."""
    waiting_blocks: int = 0
    """Blocks of the prompts that it was given and has to compute first."""
    cached_blocks: int = 0
    """Blocks of the beginning of this request's prompt that it has."""
    given: int = 0
    """Requests that it was given since it came."""
    block_tokens: int = 1
    """Of each of its blocks."""


def freeness(free_blocks: int, sequences: int) -> float:
    """Return the blocks that are left for each running sequence (Llumnix, section 4.2); below zero: all that lack."""
    return free_blocks / max(1, sequences) if free_blocks > 0 else float(free_blocks)


def route(candidates: Sequence[RoutingCandidate], routing: Routing = "prefix") -> RoutingCandidate | None:
    """Return where a request goes; None without candidates.

    `prefix`: where the least has to be computed before its answer gets on: the blocks of its prompt that are not cached
    there, those of the prompts that are before it, and one for each running sequence, which computes a block while this
    one fills one. So a cached beginning wins just where it saves more than the request would wait and share. Among
    equal ones, and with `freeness`: where the most blocks are left for each sequence. `least_load`: where the fewest
    sequences are. `round_robin`: where the fewest requests went.
    """
    rules: Mapping[Routing, Callable[[RoutingCandidate], tuple[float, ...]]] = {
        "prefix": lambda c: ((c.waiting_blocks + c.sequences - c.cached_blocks) * c.block_tokens, -_freeness(c)),
        "freeness": lambda c: (-_freeness(c),),
        "least_load": lambda c: (c.sequences, -c.free_blocks),
        "round_robin": lambda c: (c.given,),
    }
    return min(candidates, key=rules[routing], default=None)


def _freeness(candidate: RoutingCandidate) -> float:
    return freeness(candidate.free_blocks, candidate.sequences)
