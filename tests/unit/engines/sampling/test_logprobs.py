"""Log-probabilities: those of the plain model's softmax."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.engines.base import TokenLogprobs
from elastic.engines.sampling.logprobs import token_logprobs


@given(
    st.integers(0, 2**32), st.integers(1, 60), st.lists(st.tuples(st.integers(0, 59), st.integers(0, 60)), min_size=1)
)
def test_they_are_the_softmax_of_the_logits(seed: int, vocabulary: int, asked: list[tuple[int, int]]) -> None:
    logits = torch.randn(len(asked), vocabulary, generator=torch.Generator().manual_seed(seed)) * 5
    plain = logits.log_softmax(-1)
    tokens, counts = [token % vocabulary for token, _ in asked], [min(count, vocabulary) for _, count in asked]
    for row, told in enumerate(token_logprobs(logits, tokens, counts)):
        assert told.token == tokens[row]
        assert told.logprob == pytest.approx(plain[row, tokens[row]].item(), abs=1e-5)
        assert told.rank == int((plain[row] >= plain[row, tokens[row]]).sum())
        assert [logprob for _, logprob in told.top] == pytest.approx(
            plain[row].topk(counts[row]).values.tolist(), abs=1e-5
        )
        assert all(plain[row, token].item() == pytest.approx(logprob, abs=1e-5) for token, logprob in told.top)


def test_a_token_as_likely_as_others_has_the_rank_of_the_last_of_them() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, -1.0]])
    assert [token_logprobs(logits, [token], [0])[0].rank for token in range(4)] == [3, 2, 2, 4]


def test_tokens_of_a_prompt_are_told_like_others() -> None:
    logits = torch.tensor([[0.0, 0.0], [0.0, 1.7]])
    first, second = token_logprobs(logits, (0, 1), [1, 1])
    assert first.logprob == pytest.approx(-math.log(2))
    assert (second.token, second.rank, second.top) == (1, 1, ((1, second.logprob),))
    assert token_logprobs(logits, (0, 1), [0, 0])[1] == TokenLogprobs(1, second.logprob, 1)
    assert token_logprobs(torch.empty(0, 7), (), []) == []
