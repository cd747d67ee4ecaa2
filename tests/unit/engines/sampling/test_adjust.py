"""Biases, penalties, end tokens and grammars: for a batch at once what they are for one answer alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.engines.base import Request, Sampling
from elastic.engines.sampling.adjust import adjust
from elastic.engines.sampling.state import SamplingState
from elastic.errors import ConfigError

VOCABULARY = 70
STOP = 65
TOKEN = st.integers(0, VOCABULARY - 1)
RULES = st.builds(
    Sampling,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.25]),
    presence_penalty=st.sampled_from([0.0, -0.5, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.25, 0.75]),
    logit_bias=st.lists(st.tuples(TOKEN, st.sampled_from([-100.0, -1.0, 2.5])), max_size=4).map(tuple),
)


class Only:
    """A matcher that allows these tokens."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens

    def fill_mask(self, mask: torch.Tensor) -> None:
        mask.zero_()
        for token in self.tokens:
            mask.numpy().view("uint32")[token // 32] |= 1 << token % 32

    def accept(self, token: int) -> None:
        """Stay the same."""


class Lost(Only):
    """A matcher that cannot go on."""

    def fill_mask(self, mask: torch.Tensor) -> None:
        raise ConfigError("too complex")


@st.composite
def states(draw: st.DrawFn) -> SamplingState:
    prompt = draw(st.lists(TOKEN, min_size=1, max_size=8))
    generated = draw(st.lists(TOKEN, max_size=8))
    request = Request(tuple(prompt), 20, draw(RULES), (STOP, 999), min_tokens=draw(st.integers(0, 10)))
    matcher = Only(*draw(st.lists(TOKEN, min_size=1, max_size=5)), STOP) if draw(st.booleans()) else None
    return SamplingState(request, 0, generated, matcher)


def expected(scores: list[float], state: SamplingState, generated: list[int]) -> list[float]:
    """The rules as they are told, token by token."""
    rule, answer = state.rule, generated
    for token, bias in rule.logit_bias:
        scores[token] += bias
    for token in {*state.request.prompt, *answer} if rule.repetition_penalty != 1 else ():
        scores[token] *= rule.repetition_penalty if scores[token] <= 0 else 1 / rule.repetition_penalty
    for token in set(answer):
        scores[token] -= rule.presence_penalty + rule.frequency_penalty * answer.count(token)
    allowed = set(state.matcher.tokens) if isinstance(state.matcher, Only) else set(range(VOCABULARY))
    if len(answer) < state.request.min_tokens and allowed - {STOP}:
        allowed -= {STOP}
    return [score if token in allowed else -math.inf for token, score in enumerate(scores)]


@given(st.lists(states(), min_size=1, max_size=5), st.integers(0, 2**32))
def test_a_batch_is_adjusted_as_each_answer_alone(batch: list[SamplingState], seed: int) -> None:
    logits = torch.randn(len(batch), VOCABULARY, generator=torch.Generator().manual_seed(seed))
    told = []
    for row, state in zip(logits.tolist(), batch, strict=True):
        counts = state.counts
        known = zip(*(view.tolist() for view in counts.views()), strict=True) if counts is not None else ()
        generated = [token for token, count in known for _ in range(count)]
        generated += [-1] * (state.position - len(generated)) if counts is None else []
        told.append(expected(row, state, generated))
    adjust(logits, batch)
    torch.testing.assert_close(logits, torch.tensor(told))


def test_an_end_is_allowed_from_min_tokens_on() -> None:
    request = Request((1,), 9, stop_tokens=(STOP,), min_tokens=2)
    state, ends = SamplingState(request, 0), []
    for _ in range(4):
        logits = torch.zeros(1, VOCABULARY)
        adjust(logits, [state])
        ends.append(bool(logits[0, STOP] == 0))
        assert int((logits == 0).sum()) == VOCABULARY - (not ends[-1])
        state.append(3)
    assert ends == [False, False, True, True]


def test_a_complete_text_ends_before_min_tokens() -> None:
    state = SamplingState(Request((1,), 9, stop_tokens=(STOP,), min_tokens=2), 0, matcher=Only(STOP))
    logits = torch.zeros(1, VOCABULARY)
    adjust(logits, [state])
    assert torch.isfinite(logits).nonzero().tolist() == [[0, STOP]]


@pytest.mark.parametrize("bias", [math.inf, -math.inf])
def test_endless_biases_leave_finite_scores(bias: float) -> None:
    logits = torch.zeros(1, 4)
    adjust(logits, [SamplingState(Request((1,), 9, Sampling(logit_bias=((2, bias),))), 0)])
    assert torch.isfinite(logits).all()
    assert int(logits.argmax() if bias > 0 else logits.argmin()) == 2


def test_a_lost_grammar_is_told_and_harms_no_other_answer() -> None:
    lost, plain = SamplingState(Request((1,), 9), 0, matcher=Lost()), SamplingState(Request((1,), 9), 0)
    logits = torch.ones(2, VOCABULARY)
    assert adjust(logits, [lost, plain]) == {0: "too complex"}
    assert bool((logits[1] == 1).all())
