"""Copies: bytes side by side go as one, at a pace only while a model computes, beside whoever asked for them."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic import CapacityError
from elastic.hooks import forward_gate
from elastic.hooks.forward_gate import ForwardActivity, ForwardGate
from elastic.memory import copy_engine
from elastic.memory.backends.memfd import MemfdBackend
from elastic.memory.copy_engine import CopyBatch, ThreadCopyEngine
from elastic.memory.pages.page_pool import PagePool
from elastic.memory.rate_limit import RateLimiter

PAGE = 4096


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(0, 3)), max_size=6), st.booleans())
def test_what_lies_between_is_not_copied(parts: list[tuple[int, int, int]], paced: bool) -> None:
    """Parts as (elements, gap after them in the target, gap in the source)."""
    size = sum(map(sum, parts))
    target, source = torch.zeros(size), torch.arange(1, size + 1, dtype=torch.float32)
    expected, pairs, t, s = torch.zeros(size), [], 0, 0
    for count, target_gap, source_gap in parts:
        pairs.append((target[t : t + count], source[s : s + count]))
        expected[t : t + count] = source[s : s + count]
        t, s = t + count + target_gap, s + count + source_gap
    copy_engine._copy_all(pairs, RateLimiter(1e12) if paced else None)
    assert torch.equal(target, expected)


@given(st.lists(st.integers(0, 7), max_size=4), st.permutations(range(4)), st.integers(8, 300), st.booleans())
def test_pieces_are_the_whole_and_none_is_larger(shape: list[int], order: list[int], nbytes: int, gaps: bool) -> None:
    source, dims = torch.rand(shape), [dim for dim in order if dim < len(shape)]
    stored = torch.zeros([shape[dim] + gaps for dim in dims])[tuple(slice(shape[dim]) for dim in dims)]
    target = stored.permute([dims.index(dim) for dim in range(len(shape))])
    for piece, of in copy_engine.pieces(target, source, nbytes):
        assert piece.nbytes <= nbytes
        piece.copy_(of)
    assert torch.equal(target, source)


@pytest.mark.parametrize("strided", [False, True])
def test_neighbours_are_one_copy(strided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target, source = torch.zeros(6, 8), torch.rand(6, 8)
    pairs = [(target[i : i + 2], source[i : i + 2]) for i in (0, 2, 4)]
    if strided:
        pairs = [(t.T, s.T) for t, s in pairs]
    sizes, real = [], copy_engine.copy

    def counted(to: torch.Tensor, of: torch.Tensor) -> None:
        sizes.append(to.nbytes)
        real(to, of)

    monkeypatch.setattr(copy_engine, "copy", counted)
    copy_engine._copy_all(pairs)
    assert torch.equal(target, source)
    assert sizes == ([64] * 3 if strided else [192])


def test_a_bound_holds_while_a_model_computes_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    computing = [True]
    pace, size = RateLimiter(RateLimiter.CHUNK, lambda: computing[0]), 3 * RateLimiter.CHUNK
    target, source = torch.zeros(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    copy_engine._copy_all([(target, source)], pace)
    assert len(slept) == 3
    assert 2 < slept[-1] <= 3
    computing[0] = False
    copy_engine._copy_all([(target, source)], pace)
    assert len(slept) == 3
    assert target.all()


def test_models_compute_between_their_tokens_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now, traffic = [100.0], ForwardActivity()
    monkeypatch.setattr(forward_gate, "traffic", traffic)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert not traffic.busy()
    one, other = ForwardGate(), ForwardGate()
    one.enter(1)
    one.enter(2)
    other.enter(1)
    one.leave(2)
    one.leave(1)
    now[0] += 10
    assert traffic.busy()
    other.leave(1)
    now[0] += ForwardActivity.PAUSE_S / 2
    assert traffic.busy()
    now[0] += ForwardActivity.PAUSE_S
    assert not traffic.busy()


def test_copies_are_carried_one_after_another_beside_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, real = threading.Event(), threading.Event(), copy_engine.copy

    def slowly(target: torch.Tensor, source: torch.Tensor) -> None:
        begun.set()
        assert go_on.wait(30)
        real(target, source)

    monkeypatch.setattr(copy_engine, "copy", slowly)
    copier, copies, target = ThreadCopyEngine(), CopyBatch(), torch.zeros(8)
    for value in (1.0, 2.0):
        copies.handles.append(copier.copy_async([(target, torch.full((8,), value))], RateLimiter()))
    assert begun.wait(30)
    assert not target.any()
    go_on.set()
    copies.finish()
    assert target.tolist() == [2.0] * 8
    copies.handles.append(copier.copy_async([(target, torch.ones(3))], RateLimiter()))
    with pytest.raises(RuntimeError):
        copies.finish()
    copies.discard()
    copier.close()


def test_pages_are_made_ready_as_far_as_the_budget_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PagePool("cpu#test", MemfdBackend(PAGE), 8 * PAGE, ready_pages=0)
    assert (pool.make_ready(3), pool.make_ready(3), len(pool.cached)) == (3, 0, 3)
    assert (pool.make_ready(20), len(pool.cached)) == (5, 8)
    pool.check()

    def refuse(pages: Any) -> None:
        raise CapacityError("no memory", requested_bytes=0, free_bytes=0, total_bytes=0)

    pool.trim()
    monkeypatch.setattr(pool.backend, "create", refuse)
    with pytest.raises(CapacityError, match="no memory"):
        pool.make_ready(2)
    pool.check()
    assert len(pool.cached) == 0
    pool.close()
