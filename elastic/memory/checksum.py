"""Checksums of tensors: whether two have the same bytes, on whatever device and in whatever order."""

from __future__ import annotations

import torch

_DIGEST_WORDS = 128


def digest(tensor: torch.Tensor) -> int:
    """Compute a checksum of the bytes of a tensor of any shape and dtype, on any device, in any layout.

    Equal tensors have equal ones. Groups of 128 words of 64 bits are summed, and the sums weighted by their position.
    It tells changed weights from unchanged ones; it is no defence against an adversary.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = flat.numel() // (8 * _DIGEST_WORDS) * 8 * _DIGEST_WORDS
    sums = flat[:whole].view(torch.int64).view(-1, _DIGEST_WORDS).sum(dim=1)
    rest = flat[whole:].to(torch.int64)
    weighted = [(words * (torch.arange(len(words), device=words.device) * 2 + 1)).sum() for words in (sums, rest)]
    return int(weighted[0] * 31 + weighted[1] + 17 * flat.numel())
