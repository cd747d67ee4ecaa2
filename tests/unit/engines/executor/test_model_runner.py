"""Steps made by hand: whatever the cut of a text into chunks, the tokens are those of the plain model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from elastic.engines.base import Request
from elastic.engines.continuous.compatibility import kv_format
from elastic.engines.core.step import ScheduledChunk, SequenceState, Step
from elastic.engines.executor.block_layout import LAYOUTS
from elastic.engines.executor.layer_groups import block_groups, layer_groups
from elastic.engines.executor.model_runner import ModelRunner
from elastic.kvcache.storage.paged import BlockMemory
from support import architectures
from support.architectures import in_turn
from support.serving.generations import SERVED, prompts, same_unless_close
from support.wrapped_model import small


class HandMadeSteps:
    """A runner, and blocks that are dealt out one after another and never come back."""

    def __init__(self, model: Any, layout: str = "head_centric", block_tokens: int = 8) -> None:
        config = model.config.get_text_config(decoder=True)
        self.groups = layer_groups(config)
        form = kv_format(model, block_tokens, layout, "auto")
        (kv,) = model.elastic.kv.memory.shares()
        self.memory = BlockMemory(kv, block_groups(form))
        self.runner = ModelRunner(model, self.memory, form)
        self.block_tokens = block_tokens
        self.free: list[list[int]] = [[] for _ in self.groups]
        self.held: dict[str, list[int]] = {}
        self.number = 0

    def close(self) -> None:
        self.runner.close()
        self.memory.close()

    def take(self, group: int, count: int) -> tuple[int, ...]:
        while len(self.free[group]) < count:
            size = self.memory.blocks_per_sector(group)
            sector = self.memory.allocate(group)
            self.free[group] += range(sector * size, (sector + 1) * size)
        return tuple(self.free[group].pop() for _ in range(count))

    def chunk(self, sequence: str, start: int, tokens: Sequence[int], samples: bool) -> ScheduledChunk:
        held = self.held.setdefault(sequence, [0] * len(self.groups))
        blocks = []
        for group, (layers, have) in enumerate(zip(self.groups, held, strict=True)):
            needed = -(-min(start + len(tokens), layers.window or 10**9) // self.block_tokens)
            blocks.append(self.take(group, max(0, needed - have)))
            held[group] = max(needed, have)
        return ScheduledChunk(sequence, start, tuple(tokens), samples, tuple(blocks))

    def run(self, chunks: Sequence[ScheduledChunk], added: Sequence[SequenceState] = ()) -> Any:
        self.number += 1
        return self.runner.execute(Step(self.number, 0, tuple(chunks), tuple(added))).result()


@pytest.fixture
def steps(wrapped: Any) -> Iterator[Any]:
    """steps(model, …): a runner over a wrapped model; it gives its memory back when the test ends."""
    made: list[HandMadeSteps] = []

    def make(model: Any, **options: Any) -> HandMadeSteps:
        wrapped(model, small(16 << 20))
        made.append(HandMadeSteps(model, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def decode(steps: HandMadeSteps, requests: Sequence[Request], most: int, choose: random.Random) -> list[list[int]]:
    """Compute all of them in steps of random chunks, in random company."""
    texts = [list(request.prompt) for request in requests]
    computed, known = [0] * len(requests), [False] * len(requests)
    while any(len(t) < len(r.prompt) + r.max_tokens for t, r in zip(texts, requests, strict=True)):
        chunks, added, sampling = [], [], []
        for i, request in enumerate(requests):
            left = len(texts[i]) - computed[i]
            if len(texts[i]) == len(request.prompt) + request.max_tokens or choose.random() < 0.2:
                continue
            count = choose.randint(1, min(left, most))
            if not known[i]:
                added.append(SequenceState(request.id, request, 0, 0))
                known[i] = True
            new = texts[i][computed[i] : computed[i] + count]
            chunks.append(steps.chunk(request.id, computed[i], new, samples=count == left))
            computed[i] += count
            if count == left:
                sampling.append(i)
        if chunks:
            result = steps.run(chunks, added)
            for i, sampled in zip(sampling, result.sampled, strict=True):
                texts[i].append(sampled.token)
    return [text[len(request.prompt) :] for text, request in zip(texts, requests, strict=True)]


@pytest.mark.parametrize(("name", "layout"), in_turn(sorted(SERVED), sorted(LAYOUTS)))
def test_any_chunks_in_any_company_give_the_tokens_of_the_plain_model(name: str, layout: str, steps: Any) -> None:
    model = architectures.build(name)
    asked = prompts([1, 8, 9, 40, 70], architectures.VOCAB)
    made = steps(model, layout=layout, block_tokens=12 if layout == "token_major" else 8)
    got = decode(made, [Request(prompt, 12) for prompt in asked], 30, random.Random(name + layout))
    plain = architectures.build(name)
    for prompt, tokens in zip(asked, got, strict=True):
        assert len(tokens) == 12
        assert same_unless_close(plain, prompt, tokens)
