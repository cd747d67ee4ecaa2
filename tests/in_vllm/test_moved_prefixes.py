"""Cached prefixes in the way of a shrink are moved with their keys and values: who shares them gets plain tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import elastic.vllm
from support.vllm_engine.engine import (
    LONG_TEXTS,
    coordinator,
    elastic_engine,
    plain_engine,
    wait_for,
)

LENGTH, LAST, BLOCK = 20, 3, 32


def generate(llm: Any, prompts: Sequence[str] = LONG_TEXTS) -> tuple[int, list[list[int]]]:
    """Return how many of the prompts' tokens were cached, and the tokens."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    outputs = llm.generate(list(prompts), sampling, use_tqdm=False)
    return sum(o.num_cached_tokens for o in outputs), [list(o.outputs[0].token_ids) for o in outputs]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    with plain_engine() as llm:
        return generate(llm)[1]


def require_moved(llm: Any, plain: list[list[int]], *, live: int = 0) -> None:
    """Shrink under cached prefixes, and have requests share those that were used last. `live`: tokens of another."""
    from vllm import SamplingParams

    rt, engine, moved = elastic.vllm.runtime(llm), llm.llm_engine, coordinator(llm).moved_blocks
    generate(llm)
    if live:
        engine.add_request("live", {"prompt": "import"}, SamplingParams(max_tokens=live, ignore_eos=True))
        engine.step()
    rt.kv.resize(4 * rt.kv.limit_bytes // coordinator(llm).mapped)  # sectors
    while engine.has_unfinished_requests():
        engine.step()
        coordinator(llm).capacity.check()
    wait_for(lambda: coordinator(llm).mapped == 4)
    assert coordinator(llm).moved_blocks >= moved + LAST
    full_blocks = sum((len(llm.get_tokenizer().encode(prompt)) - 1) // BLOCK for prompt in LONG_TEXTS[-LAST:])
    assert generate(llm, LONG_TEXTS[-LAST:]) == (full_blocks * BLOCK, plain[-LAST:])
    coordinator(llm).capacity.check()
    rt.check()


@pytest.mark.parametrize("live", [0, 30])
def test_those_used_last_are_there_after_a_shrink(plain: list[list[int]], live: int) -> None:
    with elastic_engine("20MiB", enable_prefix_caching=True) as llm:
        require_moved(llm, plain, live=live)


def test_steps_of_an_idle_engine_move_them_at_ranks_in_processes_of_their_own(plain: list[list[int]]) -> None:
    with elastic_engine("20MiB", enable_prefix_caching=True, distributed_executor_backend="mp") as llm:
        require_moved(llm, plain)
