"""Index tensors of one batch for attention: which tokens are whose, and where their keys and values are.

Requests with one new token are computed together: their block tables are padded to the length of the longest, in groups
whose lengths differ by less than two. The others, prompts or parts of them, are computed one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from elastic.engines.continuous.allocators import FullBlocks, SlidingBlocks


@dataclass(frozen=True)
class RequestTokens:
    """The new tokens of one request in a batch."""

    request: str
    past: int
    """Tokens that the cache held before."""
    start: int
    """Of the new ones, in the batch."""
    count: int


@dataclass(frozen=True)
class DecodeGroup:
    """Requests with one new token each."""

    at: torch.Tensor
    """[requests]: their tokens in the batch."""
    table: torch.Tensor
    """[requests * blocks]: blocks of each, padded with its first."""
    mask: torch.Tensor
    """[requests, 1, 1, blocks * tokens per block]: 0 for tokens that are seen, else minus infinity."""


@dataclass(frozen=True)
class PromptInputs:
    """A request with several new tokens."""

    request: RequestTokens
    past: torch.Tensor
    """[tokens]: rows of the tokens in the cache that the new ones see; may be none."""
    mask: torch.Tensor | None
    """[new, past + new]: what each sees; None: every token before it, with no past."""


@dataclass(frozen=True)
class AttentionBatch:
    """One batch, as the layers of one allocator see it."""

    decoding: tuple[DecodeGroup, ...]
    prompts: tuple[PromptInputs, ...]
    only_decoding: bool
    """One group with all tokens of the batch, in order."""


def make_batch(
    requests: Sequence[RequestTokens],
    allocator: FullBlocks | SlidingBlocks,
    device: torch.device,
    dtype: torch.dtype,
) -> AttentionBatch:
    """Make the index tensors of a batch for an allocator's layers."""
    groups: dict[int, list[RequestTokens]] = defaultdict(list)
    for request in requests:
        if request.count == 1:
            groups[len(allocator.block_table[request.request]).bit_length()].append(request)
    decoding = tuple(_decoding(group, allocator, device, dtype) for group in groups.values())
    prompts = tuple(_prompt(request, allocator, device) for request in requests if request.count > 1)
    return AttentionBatch(decoding, prompts, only_decoding=len(decoding) == 1 and not prompts)


def _decoding(
    requests: Sequence[RequestTokens],
    allocator: FullBlocks | SlidingBlocks,
    device: torch.device,
    dtype: torch.dtype,
) -> DecodeGroup:
    tables = [allocator.block_table[request.request] for request in requests]
    longest = max(map(len, tables))
    window = getattr(allocator, "sliding_window", None)
    lengths = torch.tensor([min(request.past + 1, window or request.past + 1) for request in requests])
    slots = torch.arange(longest * allocator.tokens_per_page)
    mask = torch.zeros(len(requests), slots.numel(), dtype=dtype).masked_fill_(slots >= lengths[:, None], -torch.inf)
    padded = [block for table in tables for block in (*table, *[table[0]] * (longest - len(table)))]
    return DecodeGroup(
        at=torch.tensor([request.start for request in requests], device=device),
        table=torch.tensor(padded, device=device),
        mask=mask[:, None, None].to(device),
    )


def _prompt(request: RequestTokens, allocator: FullBlocks | SlidingBlocks, device: torch.device) -> PromptInputs:
    window: int | None = None
    if isinstance(allocator, SlidingBlocks):
        window = allocator.sliding_window
        rows = allocator.recent_rows(request.request, request.past)
    else:
        rows = allocator.get_read_indices(request.request, request.past, 0) if request.past else []
    past = torch.tensor(rows, dtype=torch.long, device=device)
    if not rows and (window is None or request.count <= window):
        return PromptInputs(request, past, None)
    ago = len(rows) + torch.arange(request.count)[:, None] - torch.arange(len(rows) + request.count)
    visible = ago >= 0 if window is None else (ago >= 0) & (ago < window)
    return PromptInputs(request, past, visible.to(device))
