"""Attention's matrices shared by two ranks: gathered before the last one, or that one cut and its outputs added up.

    python benchmarks/attention_forms.py [--rounds 11]

Two processes, pinned to a core each, compute the projections of one layer and exchange over the connections that ranks
have. Softmax is left out: each rank attends for its own heads in all forms. Forms:

- `gather`: q, k and v of all heads, then the heads are exchanged, and the last matrix is whole: what a fleet does
- `own rows`: q, k and v of the own heads alone, else as `gather`
- `rowwise`: these, and the last matrix's columns of the own heads; the products go to the other rank, and are added up
- `reduce-scatter`: the same, but each rank adds up a part of the outputs, and sends that part of the sum

`bytes`: that a rank sends for a token, counted on the wire; of four ranks what it would send to all others together.
`logits`: of the model inside with every layer computed so by two ranks, the largest error to float64 over that of the
plain model; at most 2.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from common import SEED, arguments, finish, ratio, show, table
from torch.nn import functional
from transformers import AutoModelForCausalLM

from elastic.assets import MODEL_DIR
from elastic.cluster.peers.hub import PeerHub
from elastic.engines.pipeline.transport import Key, Transport

KEY = b"the key of this benchmark's ranks"
RANKS = 2


class Shape(NamedTuple):
    """Of a layer's attention."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int = 64


SHAPES = {"512, 8 heads": Shape(512, 8, 8), "2,048, 32 heads, 8 of keys": Shape(2048, 32, 8)}
TOKENS = {"decode": 8, "prompt": 256}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Swap:
    """Tensors to and from the other rank, in the same order at both."""

    def __init__(self, transport: Transport, other: str) -> None:
        self._transport, self._other, self._step = transport, other, 0

    def __call__(self, own: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
        """Send a tensor and return the other's, of the same shape unless another is like it."""
        self._step += 1
        key = Key(self._step, 0)
        self._transport.send(self._other, own, key)
        return self._transport.receive(self._other, own if like is None else like, key)


class Block:
    """The projections of one layer at rank `index`; hidden states are [tokens, hidden size]."""

    def __init__(self, shape: Shape, dtype: torch.dtype, index: int, swap: Swap) -> None:
        torch.manual_seed(SEED)
        inside, kv = shape.heads * shape.dim, shape.kv_heads * shape.dim
        q, k, v = (torch.randn(rows, shape.hidden).mul_(shape.hidden**-0.5).to(dtype) for rows in (inside, kv, kv))
        self.whole = q, k, v
        self.own = tuple(weight.chunk(RANKS)[index] for weight in (q, k, v))  # views: whole heads are whole rows
        self.last = torch.randn(shape.hidden, inside).mul_(inside**-0.5).to(dtype)
        self.own_last = self.last.chunk(RANKS, 1)[index]
        self._index, self._swap = index, swap

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        heads, _, _ = (functional.linear(hidden, weight) for weight in self.whole)
        return self._gathered(heads.chunk(RANKS, 1)[self._index].contiguous())

    def own_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        heads, _, _ = (functional.linear(hidden, weight) for weight in self.own)
        return self._gathered(heads)

    def rowwise(self, hidden: torch.Tensor) -> torch.Tensor:
        part = self._part(hidden)
        return self._sum(part, self._swap(part))

    def reduce_scatter(self, hidden: torch.Tensor) -> torch.Tensor:
        halves = [half.contiguous() for half in self._part(hidden).chunk(RANKS, 1)]
        own = self._sum(halves[self._index], self._swap(halves[1 - self._index]))
        return self._in_order(own, self._swap(own))

    def _part(self, hidden: torch.Tensor) -> torch.Tensor:
        heads, _, _ = (functional.linear(hidden, weight) for weight in self.own)
        return functional.linear(heads, self.own_last)

    def _gathered(self, own: torch.Tensor) -> torch.Tensor:
        return functional.linear(self._in_order(own, self._swap(own)), self.last)

    def _sum(self, own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Add up in the order of ranks, and round once."""
        first, second = (own, other) if self._index == 0 else (other, own)
        return (first.float() + second.float()).to(own.dtype)

    def _in_order(self, own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.cat((own, other) if self._index == 0 else (other, own), 1)


FORMS: dict[str, Callable[[Block, torch.Tensor], torch.Tensor]] = {
    "gather": Block.gather,
    "own rows": Block.own_rows,
    "rowwise": Block.rowwise,
    "reduce-scatter": Block.reduce_scatter,
}


def rank(index: int, pipe: Any, rounds: int, repeats: int) -> None:
    """Be a rank; the first one sends what it has measured: case -> form -> seconds of each round, bytes of a token."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[index]})
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    name, other = f"r{index}", f"r{1 - index}"
    hub = PeerHub(name, KEY)
    pipe.send(hub.address)
    hub.meet({other: pipe.recv()})
    swap, choose, found = Swap(hub.transport("r0"), other), random.Random(SEED), {}
    for shape_name, shape in SHAPES.items():
        for dtype_name, dtype in DTYPES.items():
            block = Block(shape, dtype, index, swap)
            for tokens_name, tokens in TOKENS.items():
                hidden = torch.randn(tokens, shape.hidden, generator=torch.Generator().manual_seed(SEED)).to(dtype)
                works = {form: partial(compute, block, hidden) for form, compute in FORMS.items()}
                took = {form: [] for form in FORMS}
                for _ in range(rounds + 1):
                    for form in choose.sample(list(FORMS), len(FORMS)):
                        took[form].append(measured(works[form], hub, repeats if tokens > 8 else 8 * repeats))
                case = f"{shape_name}, {dtype_name}, {tokens_name}"
                found[case] = {form: ([s for s, _ in each[1:]], each[-1][1] / tokens) for form, each in took.items()}
    pipe.send(found)
    pipe.recv()  # the other one may still be sending
    hub.close()


def measured(work: Callable[[], Any], hub: PeerHub, repeats: int) -> tuple[float, float]:
    """Return seconds and bytes sent, of one repetition."""
    before, start = sum(wire.sent_bytes for wire in hub.wires.read()), time.perf_counter()
    for _ in range(repeats):
        work()
    took = time.perf_counter() - start
    return took / repeats, (sum(wire.sent_bytes for wire in hub.wires.read()) - before) / repeats


def times(rounds: int, repeats: int) -> dict[str, Any]:
    """Have two processes compute all cases."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for index in range(RANKS):
        here, there = context.Pipe()
        pipes.append(here)
        processes.append(context.Process(target=rank, args=(index, there, rounds, repeats), daemon=True))
        processes[-1].start()
    addresses = [pipe.recv() for pipe in pipes]
    for pipe, address in zip(pipes, reversed(addresses), strict=True):
        pipe.send(address)
    found, _ = (pipe.recv() for pipe in pipes)
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()
    return {case: figures(case, forms) for case, forms in found.items()}


def figures(case: str, forms: dict[str, tuple[list[float], float]]) -> dict[str, Any]:
    shape = next(shape for name, shape in SHAPES.items() if case.startswith(name))
    size = 4 if "float32" in case else 2
    return {
        form: {
            "ms": statistics.median(seconds) * 1e3,
            "of gather": ratio(seconds, forms["gather"][0]),
            "bytes of a token": sent,
            "of four ranks": bytes_sent(form, shape, 4) * size,
        }
        for form, (seconds, sent) in forms.items()
    }


def bytes_sent(form: str, shape: Shape, ranks: int) -> int:
    """Count the elements of a token that one rank sends to all others."""
    if form in ("gather", "own rows"):
        return (ranks - 1) * shape.heads * shape.dim // ranks
    return (ranks - 1) * shape.hidden if form == "rowwise" else 2 * (ranks - 1) * shape.hidden // ranks


class OwnRows(torch.nn.Module):
    """A matrix as two ranks compute it, rows at each."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.parts = [weight.clone() for weight in linear.weight.detach().chunk(RANKS)]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([functional.linear(hidden, weight) for weight in self.parts], -1)


class OwnColumns(OwnRows):
    """The same with columns at each; outputs are added up in float32, and rounded once."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__(linear)
        self.parts = [weight.clone() for weight in linear.weight.detach().chunk(RANKS, 1)]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        first, second = map(functional.linear, hidden.chunk(RANKS, -1), self.parts)
        return (first.float() + second.float()).to(hidden.dtype)


def errors(prompts: int) -> dict[str, Any]:
    """Compare logits with those of the same weights in float64."""
    generator = torch.Generator().manual_seed(SEED)
    found: dict[str, Any] = {}
    for name, dtype in DTYPES.items():
        plain = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=dtype).eval()
        exact = copy.deepcopy(plain).double()
        models = {"plain": plain, "own rows": copy.deepcopy(plain), "rowwise": copy.deepcopy(plain)}
        for form in ("own rows", "rowwise"):
            for layer in models[form].model.layers:
                attention = layer.self_attn
                for projection in ("q_proj", "k_proj", "v_proj"):
                    setattr(attention, projection, OwnRows(getattr(attention, projection)))
                if form == "rowwise":
                    attention.o_proj = OwnColumns(attention.o_proj)
        of: dict[str, list[float]] = {form: [] for form in models}
        for _ in range(prompts):
            ids = torch.randint(3, 1000, (1, 64), generator=generator)
            right = exact(ids).logits
            for form, model in models.items():
                of[form].append(float((model(ids).logits.double() - right).abs().max()))
        found[name] = {"plain": max(of["plain"])} | {
            f"{form} over plain": max(of[form]) / max(of["plain"]) for form in ("own rows", "rowwise")
        }
    return found


def shown(value: Any) -> str:
    return show(value) if isinstance(value, dict) else f"{value:,.4g}"


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    if options.device != "cpu" or len(os.sched_getaffinity(0)) < RANKS:
        sys.exit("this benchmark pins two ranks to a core each: it is for a CPU of two cores")
    found = times(2 if options.quick else options.rounds, 2 if options.quick else 10)
    for case, forms in found.items():
        lines = [[form, *map(shown, each.values())] for form, each in forms.items()]
        table([case, "ms", "of gather", "bytes of a token", "of four ranks"], lines)
    logits = errors(2 if options.quick else 20)
    table(["logits", *DTYPES], [[key, *(f"{logits[d][key]:.3g}" for d in DTYPES)] for key in logits["float32"]])
    finish("attention_forms", "cpu", {"times": found, "logits": logits})


if __name__ == "__main__":
    main()
