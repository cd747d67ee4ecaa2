"""Which heads of attention belong to a shard of a decoder layer, and which part of its KV cache has their keys.

A layer cut into S shards has P = gcd(S, KV heads) parts of its KV cache: whole KV heads, as many in each. Where there
are fewer parts than shards, several shards share one, and each of them attends for its own share of the query heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


def kv_shards(shards: int, kv_heads: int) -> int:
    """Return into how many parts the KV cache of a layer falls that is cut into shards."""
    return math.gcd(shards, kv_heads)


def kv_parts(shards: Iterable[int], of: int, kv_shards: int) -> tuple[int, ...]:
    """Return the numbers of the KV parts that shards need, from the first to the last, each once.

    Shards are counted in their layer, or over all layers (`layer * of + shard`); so are parts then (`layer * kv_shards
    + part`).
    """
    return tuple(sorted({shard * kv_shards // of for shard in shards}))


def heads_of(shards: Iterable[int], of: int, query_heads: int) -> list[int]:
    """Return the query heads that shards of one layer attend for, from the first to the last.

    Those of all shards together are every head once; a shard may have one more than another, or none.
    """
    bounds = ((shard * query_heads // of, (shard + 1) * query_heads // of) for shard in sorted(set(shards)))
    return [head for start, stop in bounds for head in range(start, stop)]
