"""A batch: each answer by its own rule, errors of one its own, log-probabilities the model's raw ones."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.engines.base import Request, Sampling
from elastic.engines.sampling import SamplingState, sample

VOCABULARY = 50
RULES = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.8, 1.0]),
    top_p=st.sampled_from([1.0, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.sampled_from([(), ((3, 5.0),)]),
)
REQUESTS = st.builds(
    Request,
    prompt=st.just((1, 2, 3)),
    max_tokens=st.just(20),
    sampling=RULES,
    stop_tokens=st.just((7,)),
    min_tokens=st.integers(0, 5),
    logprobs=st.sampled_from([None, 0, 4]),
)


def model(tokens: list[int]) -> torch.Tensor:
    """Logits [vocabulary] that depend on all tokens so far."""
    source = torch.Generator().manual_seed(hash(tuple(tokens)) % 2**32)
    return torch.randn(VOCABULARY, generator=source) * 2


def go_on(request: Request, seed: int, tokens: list[int], steps: int) -> list[int]:
    """Generate from a state that is made of the tokens so far."""
    state, tokens = SamplingState(request, seed, tokens), list(tokens)
    for _ in range(steps):
        (chosen,) = sample(model(tokens)[None].clone(), [state])
        state.append(chosen.token)
        tokens.append(chosen.token)
    return tokens


@given(REQUESTS, st.integers(0, 2**64 - 1), st.integers(0, 12))
def test_an_answer_goes_on_anywhere_with_the_same_tokens(request: Request, seed: int, cut: int) -> None:
    whole = go_on(request, seed, [], 12)
    assert go_on(request, seed, whole[:cut], 12 - cut) == whole


@given(st.lists(st.tuples(REQUESTS, st.integers(0, 99), st.integers(0, 3)), min_size=1, max_size=6), st.integers(0, 99))
def test_an_answer_does_not_depend_on_the_others_of_its_batch(rows: list[tuple[Request, int, int]], seed: int) -> None:
    logits = torch.randn(len(rows), VOCABULARY, generator=torch.Generator().manual_seed(seed))
    states = [SamplingState(request, own, [4] * length) for request, own, length in rows]
    alone = [sample(logits[row : row + 1].clone(), states[row : row + 1])[0] for row in range(len(rows))]
    together = sample(logits.clone(), states)
    assert [chosen.token for chosen in together] == [chosen.token for chosen in alone]
    for chosen, other, state, raw in zip(together, alone, states, logits.log_softmax(-1), strict=True):
        assert chosen.error is None
        if state.request.logprobs is None:
            assert chosen.logprobs is None
            continue
        assert chosen.logprobs is not None
        assert other.logprobs is not None
        assert chosen.logprobs.logprob == pytest.approx(raw[chosen.token].item(), abs=1e-5)
        assert [token for token, _ in chosen.logprobs.top] == raw.topk(state.request.logprobs).indices.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_an_answer_without_a_token_fails_alone(temperature: float, score: float) -> None:
    logits = torch.zeros(3, VOCABULARY)
    logits[:, 9], logits[1, 5] = 4.0, score
    states = [SamplingState(Request((1,), 9, Sampling(temperature), logprobs=1), seed) for seed in range(3)]
    chosen = sample(logits, states)
    assert [one.error is None for one in chosen] == [True, False, True]
    assert "NaN" in str(chosen[1].error)


def test_a_greedy_answer_of_which_no_token_is_left_fails() -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[1] = -math.inf
    chosen = sample(logits, [SamplingState(Request((1,), 9), seed) for seed in range(2)])
    assert [one.error is None for one in chosen] == [True, False]


def test_greedy_answers_take_the_likeliest_beside_answers_that_are_drawn() -> None:
    logits = torch.randn(8, VOCABULARY, generator=torch.Generator().manual_seed(0))
    states = [SamplingState(Request((1,), 9, Sampling(row % 2 * 1.5)), row) for row in range(8)]
    likeliest = logits.argmax(-1).tolist()
    tokens = [chosen.token for chosen in sample(logits, states)]
    assert tokens[::2] == likeliest[::2]
    assert tokens != likeliest


class Even:
    """A matcher that allows even tokens."""

    def fill_mask(self, mask: torch.Tensor) -> None:
        mask.fill_(0x55555555)

    def accept(self, token: int) -> None:
        """Stay the same."""


@pytest.mark.cuda
def test_a_gpu_chooses_the_tokens_of_a_cpu() -> None:
    rules = [Sampling(), Sampling(0.8), Sampling(1.0, top_k=9, top_p=0.9), Sampling(1.2, top_p=0.8, min_p=0.01)]
    rules += [Sampling(1.0, repetition_penalty=1.2, frequency_penalty=0.5, logit_bias=((4, 3.0), (5, -2.0)))]
    rows = [
        Request((1, 2, 3), 20, rule, (7,), min_tokens=row % 2 * 9, logprobs=row % 3 or None)
        for row, rule in enumerate(rules * 8)
    ]
    states = [
        SamplingState(request, row, [4, 4, 9], Even() if row % 4 == 0 else None) for row, request in enumerate(rows)
    ]
    logits = torch.randn(len(rows), 5000, generator=torch.Generator().manual_seed(0)) * 2
    there, here = sample(logits.to("cuda:0"), states), sample(logits, states)
    assert [chosen.token for chosen in there] == [chosen.token for chosen in here]
    for one, other in zip(there, here, strict=True):
        assert (one.logprobs is None) == (other.logprobs is None)
        if one.logprobs is not None and other.logprobs is not None:
            assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)
            assert [token for token, _ in one.logprobs.top] == [token for token, _ in other.logprobs.top]
