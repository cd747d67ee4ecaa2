"""Checksums are of bytes: whatever their number, wherever they lie, and in however many runs they come."""

from __future__ import annotations

from hashlib import blake2b

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.memory import checksum
from elastic.memory.checksum import RunningDigest, digest


def by_definition(data: bytes) -> int:
    """The BLAKE2b of the sums of groups of 128 words, those of words at the same place of all groups, bytes behind the
    last group, and their number."""
    whole = len(data) // 1024 * 1024
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, whole, 8)]
    sums = [sum(words[at : at + 128]) for at in range(0, len(words), 128)]
    sums += [sum(words[at::128]) for at in range(128)]
    text = b"".join((each % (1 << 64)).to_bytes(8, "little") for each in sums)
    text += data[whole:] + len(data).to_bytes(8, "little")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little", signed=True)


def bytes_of(seed: int, count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("small_bytes", [checksum._SMALL_BYTES, 0])
@given(count=st.integers(0, 5000), offset=st.integers(0, 9), cuts=st.lists(st.integers(0, 5000), max_size=3))
def test_it_is_that_of_the_bytes(small_bytes: int, count: int, offset: int, cuts: list[int]) -> None:
    """By numpy, and by torch alone, as larger tensors have it."""
    tensor = bytes_of(count, offset + count)[offset:]
    expected = by_definition(bytes(tensor.tolist()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum, "_SMALL_BYTES", small_bytes)
        assert digest(tensor) == expected
        running, at = RunningDigest(), sorted(min(cut, count) for cut in cuts)
        for start, stop in zip([0, *at], [*at, count], strict=True):
            running.update(tensor[start:stop])
        assert running.value == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [32, 512, 1024])
def test_what_changes_places_within_a_row_is_told_apart(inputs: int, dtype: torch.dtype) -> None:
    """Heads of 8 in another order lie in the same groups of words."""
    weight = torch.randn(64, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    heads = weight.view(64, -1, 8)
    for moved in (heads.flip(1), heads.roll(1, 1), heads.flip(0), heads[:, [1, 0, *range(2, inputs // 8)]]):
        assert digest(moved.reshape(64, inputs)) != digest(weight)


def test_what_is_stored_in_another_order_has_that_of_its_elements() -> None:
    matrix = torch.arange(600.0).view(20, 30)
    stored = matrix.t().contiguous().t()
    assert stored.stride() != matrix.stride()
    assert digest(stored) == digest(matrix)
    assert digest(matrix.t()) != digest(matrix)


def test_a_small_tensor_that_is_no_plain_one_is_asked_for_its_bytes() -> None:
    class Doubled(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            args = [each.as_subclass(torch.Tensor) * 2 if isinstance(each, cls) else each for each in args]
            return func(*args, **(kwargs or {}))

    plain = torch.arange(300.0)
    assert digest(plain.as_subclass(Doubled)) == digest(plain * 2)


def test_words_that_overflow_are_told_apart() -> None:
    largest = torch.full((256,), torch.iinfo(torch.int64).max)
    changed = largest.clone()
    changed[200] -= 1
    assert digest(largest) == by_definition(bytes(largest.view(torch.uint8).tolist()))
    assert digest(largest) != digest(changed)


@given(count=st.integers(1, 5000), flips=st.sets(st.integers(0, 40_000), min_size=1, max_size=3))
def test_bits_that_are_turned_are_told_apart(count: int, flips: set[int]) -> None:
    """The signs of every second float32 had no part in it; those of two words cancel each other in a plain sum."""
    tensor = bytes_of(count, count)
    changed = tensor.clone()
    for flip in {flip % (8 * count) for flip in flips}:
        changed[flip // 8] ^= 1 << flip % 8
    assert digest(changed) != digest(tensor)


@pytest.mark.parametrize("numbers", [1, 2])
def test_signs_that_are_turned_are_told_apart(numbers: int) -> None:
    tensor = torch.arange(1.0, 4097.0)
    changed = tensor.clone()
    changed[1 : 2 * numbers + 1 : 2] *= -1
    assert digest(changed) != digest(tensor)
