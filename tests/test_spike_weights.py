"""The floor carries weights too: one Linear in two ranges, flipped between decode steps, a view held outside.

What the next mechanism (weights in the ledger) needs of pages, ranges, spans and the gate, shown end to end.
"""

from __future__ import annotations

from typing import Any

import torch
from architectures import build, prompt
from torch import nn

import elastic
from elastic.memory.range import VirtualRange
from elastic.memory.tensors import Span

OWNER = "layer:0"


class Residency:
    """A weight in pages of its own."""

    def __init__(self, pool: Any, weight: torch.Tensor) -> None:
        self.pool = pool
        nbytes = weight.numel() * weight.element_size()
        self.range = VirtualRange(pool, pool.pages_for(nbytes))
        self.range.map(0, pool.take(OWNER, pool.pages_for(nbytes)))
        self.span: Span = self.range.span(0, nbytes, lambda: None)
        self.tensor: torch.Tensor | None = self.span.tensor(weight.dtype).view(weight.shape)
        self.tensor.copy_(weight)

    def retire(self) -> bool:
        """Give the pages back, unless a tensor still shows them."""
        self.tensor = None
        self.span.drop()
        if self.span.alive:
            return False
        self.range.close()
        return True


def show(linear: nn.Linear, residency: Residency) -> None:
    """Put a residency in the parameter's slot: the same Parameter object, other bytes."""
    assert residency.tensor is not None
    linear.weight.data = residency.tensor


def test_a_weight_flips_between_two_ranges_under_a_running_generation(wrapped: Any) -> None:
    model = build("llama-gqa")
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**prompt(), **options)
    linear = model.model.layers[0].mlp.up_proj
    parameter, original = linear.weight, linear.weight.data
    wrapped(model)
    rt = model.elastic
    pool = rt.kv.memory.pools[0].pool
    free = pool.free_pages

    current = Residency(pool, original)
    show(linear, current)
    view: torch.Tensor | None = linear.weight.detach()[3:5]
    waiting: list[Residency] = []

    def flip(module: Any, args: Any) -> None:
        """Prepare beside the forward that is about to run, commit before it begins."""
        nonlocal current
        new, old = Residency(pool, linear.weight), current
        show(linear, new)
        current = new
        if not old.retire():
            waiting.append(old)
        rt.kv.memory.check()

    handle = model.register_forward_pre_hook(flip, prepend=True)
    assert torch.equal(model.generate(**prompt(), **options), expected)
    handle.remove()

    assert len(waiting) == 1, "only the residency that a view shows had to wait"
    assert view is not None
    assert torch.equal(view, original[3:5])
    view = None
    assert waiting[0].retire()

    assert linear.weight is parameter
    linear.weight.data = original
    assert current.retire()
    rt.kv.trim()
    assert pool.free_pages == free
    assert pool.pages_of(OWNER) == pool.pages_for(sum(p.nbytes for p in model.model.layers[0].parameters()))
    elastic.unwrap(model)
    assert torch.equal(model.generate(**prompt(), **options), expected)
