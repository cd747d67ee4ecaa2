"""Prompts are as long as the trace says, seeded, and do not share what they should not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.bench.traces.prompts import random_prompts, text_prompts
from elastic.bench.traces.trace import Trace, TraceRequest
from elastic.errors import ConfigError

TEXT = list(range(1000, 1100))
lengths = st.lists(st.integers(1, 300), min_size=1, max_size=30)


def trace_of(sizes: list[int]) -> Trace:
    return Trace(tuple(TraceRequest(float(i), n, 1) for i, n in enumerate(sizes)), "x")


@given(lengths, st.integers(0, 9), st.integers(0, 50))
def test_each_prompt_has_its_length_and_the_seed_decides(sizes: list[int], seed: int, shared: int) -> None:
    trace = trace_of(sizes)
    for make in (lambda s: text_prompts(trace, TEXT, seed=s, shared_prefix=shared),
                 lambda s: random_prompts(trace, 500, seed=s, shared_prefix=shared)):  # fmt: skip
        assert [len(p) for p in make(seed)] == sizes
        assert make(seed) == make(seed)


@given(lengths, st.integers(0, 9))
def test_no_two_prompts_begin_at_the_same_place_of_the_text(sizes: list[int], seed: int) -> None:
    firsts = [p[0] for p in text_prompts(trace_of(sizes), TEXT, seed=seed)]
    assert len(set(firsts)) == len(firsts)


@given(lengths, st.integers(0, 9))
def test_a_prompt_is_a_passage_of_the_text_that_goes_round(sizes: list[int], seed: int) -> None:
    for prompt in text_prompts(trace_of(sizes), TEXT, seed=seed):
        start = TEXT.index(prompt[0])
        assert list(prompt) == [TEXT[(start + i) % len(TEXT)] for i in range(len(prompt))]


@given(lengths, st.integers(1, 400))
def test_a_shared_prefix_is_shared_and_leaves_each_prompt_a_token_of_its_own(sizes: list[int], shared: int) -> None:
    prompts = text_prompts(trace_of(sizes), TEXT, shared_prefix=shared)
    own = text_prompts(trace_of(sizes), TEXT)
    for prompt, plain in zip(prompts, own, strict=True):
        common = min(shared, len(prompt) - 1)
        assert list(prompt[:common]) == [TEXT[i % len(TEXT)] for i in range(common)]
        assert prompt[common:] == plain[common:]


def test_random_tokens_are_of_the_vocabulary_and_differ_between_requests() -> None:
    prompts = random_prompts(trace_of([50] * 20), 7, seed=1)
    assert {token for p in prompts for token in p} == set(range(7))
    assert len(set(prompts)) == 20


def test_a_shared_prefix_is_no_longer_than_the_longest_prompt() -> None:
    trace = trace_of([3, 5])
    for make in (lambda shared: random_prompts(trace, 9, shared_prefix=shared), lambda shared: text_prompts(
        trace, range(9), shared_prefix=shared
    )):  # fmt: skip
        assert make(10**15) == make(5)


def test_what_cannot_work_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="the text has 3 tokens, and 4 prompts"):
        text_prompts(trace_of([5] * 4), [1, 2, 3])
    with pytest.raises(ConfigError, match="the text has 0 tokens"):
        text_prompts(trace_of([]), [], shared_prefix=3)
    with pytest.raises(ConfigError, match="vocabulary of 1"):
        random_prompts(trace_of([5]), 1)
    with pytest.raises(ConfigError, match="have 2,000,000,000,000 tokens together"):
        random_prompts(trace_of([10**12] * 2), 9)
    with pytest.raises(ConfigError, match="have 1,000,000,000,000 tokens together"):
        text_prompts(trace_of([10**12]), [1, 2, 3])
    with pytest.raises(ConfigError, match="shared prefix -1"):
        random_prompts(trace_of([5]), 9, shared_prefix=-1)
