"""What was captured computes, for other inputs, what running it would compute, to the bit, and holds little memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from elastic.engines.executor.graphs import operator_graph
from elastic.engines.executor.graphs.graph_memory import GraphMemory
from elastic.engines.executor.graphs.operator_graph import CaptureRefused, OperatorGraph
from elastic.engines.executor.kernels.elementwise import ElementwiseProgram, elementwise_library
from elastic.memory.backends.memfd import MemfdBackend
from elastic.memory.pages.page_pool import PagePool
from elastic.memory.pages.virtual_range import VirtualRange
from elastic.quant.formats.base import KernelTarget
from elastic.quant.kernels.compiled.integer_matmul import (
    WIDTHS,
    int4_matmul,
    int8_matmul,
    multiplies_nibbles,
    multiplies_rows,
)

ROWS, WIDTH = 3, 8
PAGE = 4096
WEIGHT = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
CODES = torch.randint(-127, 128, (WIDTH, WIDTH), dtype=torch.int8, generator=torch.Generator().manual_seed(2))


def in_integers(x: torch.Tensor) -> torch.Tensor:
    """Multiply x by codes, where there is a kernel for that."""
    if not multiplies_rows(WIDTH):
        return nn.functional.linear(x, CODES / 64)
    out = torch.empty(len(x), WIDTH)
    int8_matmul(x.contiguous(), CODES, torch.full((WIDTH,), 1 / 64, dtype=torch.bfloat16), None, out)
    return out


INSTRUCTIONS = KernelTarget.of(torch.device("cpu")).instructions


def in_nibbles(x: torch.Tensor) -> torch.Tensor:
    """Multiply x by nibbles, a slab of columns at a time, where there is a kernel for that."""
    if not multiplies_nibbles(INSTRUCTIONS, WIDTH):
        return nn.functional.linear(x, CODES / 64)
    width = WIDTHS[INSTRUCTIONS]
    out, scales = torch.empty(len(x), 2 * width), torch.full((1, 2 * width, 2), 1 / 64, dtype=torch.bfloat16)
    planes = CODES.view(torch.uint8).repeat(1, width // WIDTH).view(2, 1, -1)  # of either slab
    for plane, columns in zip(planes, (slice(width), slice(width, None)), strict=True):
        int4_matmul(x.contiguous(), plane, scales[:, columns], width, 8.0, 1.0, out[:, columns])
    return out[:, width - WIDTH // 2 : width + WIDTH // 2].contiguous()


STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "product": lambda x, y: nn.functional.linear(x, WEIGHT),
    "product in integers": lambda x, y: in_integers(x),
    "product in nibbles": lambda x, y: in_nibbles(x),
    "sum": lambda x, y: x + y,
    "in place": lambda x, y: x.clone().mul_(0.5).add_(y),
    "into an empty one": lambda x, y: torch.empty_like(x).copy_(y),
    "parts": lambda x, y: torch.cat([y.chunk(2, -1)[1], x[:, : WIDTH // 2]], -1),
    "transposed": lambda x, y: (x.T @ y).T[:ROWS].contiguous(),
    "strided": lambda x, y: (x.T + y.T).T,
    "several results": lambda x, y: torch.sort(x, -1).values + torch.var_mean(y, -1, keepdim=True)[1],
    "rows by number": lambda x, y: x[y.argmax(-1) % ROWS],
    "other dtype": lambda x, y: (x.double() * 2).to(torch.float32),
    "norm": lambda x, y: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "chosen": lambda x, y: torch.where(x > y, x, y),
    "rotated": lambda x, y: x * y[:, :1] + torch.cat((-x[:, WIDTH // 2 :], x[:, : WIDTH // 2]), -1) / 3,
    "in bfloat16": lambda x, y: (x.bfloat16() * y.bfloat16() - x.bfloat16()).float(),
    "constant": lambda x, y: x + torch.tensor([0.25]),
    "view of all": lambda x, y: x.view(-1)[WIDTH:].view(ROWS - 1, WIDTH).sum(0) + y,
}


def computation(names: list[str]) -> Callable[[torch.Tensor], dict[str, torch.Tensor]]:
    def run(x: torch.Tensor) -> dict[str, torch.Tensor]:
        before, last = x, x
        for name in names:
            before, last = last, STEPS[name](last, before)
        return {"last": last, "before": before}

    return run


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether all numbers are equal, and what is none is none in both: long computations overflow."""
    return torch.allclose(found, expected, rtol=0, atol=0, equal_nan=True)


@contextmanager
def without_compiler(missing: bool) -> Iterator[None]:
    """So that operators on elements are called one by one."""
    with pytest.MonkeyPatch.context() as patch:
        if missing:
            patch.setattr(operator_graph, "elementwise_library", lambda: None)
        yield


@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=12), st.integers(0, 2**20), st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_replay_has_the_bits_of_a_run(names: list[str], seed: int, missing: bool) -> None:
    random, run, graph = torch.Generator().manual_seed(seed), computation(names), OperatorGraph()
    x, memory = torch.randn(ROWS, WIDTH, generator=random), GraphMemory()
    with torch.no_grad(), without_compiler(missing):
        expected = run(x)
        captured = graph.capture(lambda: run(x), memory)
        assert all(same(captured[name], expected[name]) for name in expected)
        for _ in range(3):
            x.copy_(torch.randn(ROWS, WIDTH, generator=random))
            expected = {name: tensor.clone() for name, tensor in run(x).items()}
            replayed = graph.replay()
            assert all(same(replayed[name], expected[name]) for name in expected)
            assert all(replayed[name].stride() == expected[name].stride() for name in expected)


def joined(run: Callable[[torch.Tensor], dict[str, torch.Tensor]], x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"both": torch.cat([run(x)["last"], run(x)["before"]])}


@pytest.mark.skipif(elementwise_library() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("name", ["sum", "rotated", "in bfloat16"])
def test_operators_on_elements_are_one_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is not in it is called as ever."""
    graph, x, calls = OperatorGraph(), torch.randn(ROWS, WIDTH), []
    monkeypatch.setattr(ElementwiseProgram, "__call__", lambda self: calls.append(self._given[1]))
    with torch.no_grad():
        graph.capture(lambda: computation([name, name])(torch.tanh(computation([name] * 2)(x)["last"])), GraphMemory())
        graph.replay()
    assert len(calls) == 2
    assert min(calls) >= 2


@given(st.lists(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=6), min_size=2, max_size=4))
@settings(max_examples=50, deadline=None)
def test_graphs_that_share_buffers_do_not_spoil_each_other(programs: list[list[str]]) -> None:
    memory, graphs = GraphMemory(), []
    with torch.no_grad():
        for number, names in enumerate(programs):
            x, run = torch.randn(ROWS, WIDTH), computation(names)
            if number % 2:  # one of other sizes
                run = partial(joined, run)
            graph = OperatorGraph()
            graph.capture(partial(run, x), memory)
            graphs.append((graph, x, run))
        for graph, x, run in [*graphs, *reversed(graphs)]:
            x.copy_(torch.randn(ROWS, WIDTH))
            expected = run(x)
            replayed = graph.replay()
            assert all(same(replayed[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.sum() > 0),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: np.asarray(x),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.rand_like(x),
        lambda x: nn.functional.dropout(x, 0.5, training=True),
        lambda x: x.to_sparse(),
    ],
)
def test_what_depends_on_contents_or_chance_is_refused(look: Callable[[torch.Tensor], Any]) -> None:
    x = torch.randn(ROWS, WIDTH)

    def run() -> torch.Tensor:
        y = x + 1
        look(y)
        return y * 2

    with pytest.raises(CaptureRefused):
        OperatorGraph().capture(run, GraphMemory())
    look(x)  # nothing of the capture is left behind


def test_a_function_that_is_not_looked_into_is_called_by_replays() -> None:
    graph, x, factor = OperatorGraph(), torch.ones(ROWS, WIDTH), [2.0]

    def outside(y: torch.Tensor, name: str) -> torch.Tensor:
        assert name == "seen"
        return torch.tensor((y * factor[0]).tolist())

    with torch.no_grad():
        assert graph.capture(lambda: graph.call(outside, x + 1, "seen") + 1, GraphMemory()).eq(5).all()
        factor[0] = 3.0
        x.fill_(2.0)
        assert graph.replay().eq(10).all()


def test_results_leave_their_place_to_later_ones() -> None:
    x, memory, graph = torch.randn(64, 64), GraphMemory(), OperatorGraph()

    def run() -> torch.Tensor:
        y = x
        for _ in range(50):
            y = torch.tanh(y) @ x
        return y

    with torch.no_grad():
        graph.capture(run, memory)
    assert sum(buffer.nbytes for buffer in memory._buffers) <= 2 * x.nbytes
    assert torch.equal(graph.replay(), run())


def test_pages_that_graphs_look_at_come_free_when_they_are_told_to_forget_them() -> None:
    pool = PagePool("cpu#test", MemfdBackend(PAGE), 8 * PAGE, ready_pages=0)
    pages = VirtualRange(pool, 4)
    pages.map(0, pool.allocate("weights", 1))
    dead: list[int] = []
    span = pages.storage(0, PAGE, lambda: dead.append(1))
    memory, graph = GraphMemory(), OperatorGraph()

    def capture(weight: torch.Tensor) -> None:
        graph.capture(lambda: nn.functional.linear(torch.ones(ROWS, WIDTH), weight) + weight[0, 0], memory)

    with torch.no_grad():
        capture(span.tensor(torch.float32).view(-1, WIDTH))
    span.drop()
    gc.collect()
    assert not dead
    memory.forget_views()
    assert dead
