"""What an answer's choice depends on: rebuilt from its tokens, it is what it was."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from elastic.engines.base import Request, Sampling
from elastic.engines.sampling.state import SamplingState, TokenCounts

TOKENS = st.lists(st.integers(0, 300), max_size=400)


class Recorder:
    """A matcher that only remembers."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def fill_mask(self, mask: object) -> None:
        """Allow what was allowed."""

    def accept(self, token: int) -> None:
        self.accepted.append(token)


def content(counts: TokenCounts) -> dict[int, int]:
    tokens, often = counts.views()
    return dict(zip(tokens.tolist(), often.tolist(), strict=True))


@given(TOKENS, TOKENS, TOKENS)
def test_counts_are_those_of_the_answer_over_the_tokens_of_both(
    prompt: list[int], before: list[int], after: list[int]
) -> None:
    counts = TokenCounts(prompt, before)
    for token in after:
        counts.add(token)
    answer = Counter(before + after)
    assert content(counts) == {token: answer[token] for token in {*prompt, *before, *after}}


@given(TOKENS, st.data())
def test_a_state_is_rebuilt_from_its_tokens(tokens: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(tokens)))
    request = Request((1, 2, 2), 500, Sampling(1.0, repetition_penalty=1.1), min_tokens=data.draw(st.integers(0, 400)))
    lived, rebuilt = Recorder(), Recorder()
    one, other = SamplingState(request, 3, matcher=lived), SamplingState(request, 3, tokens[:cut], rebuilt)
    for token in tokens:
        one.append(token)
    for token in tokens[cut:]:
        other.append(token)
    assert (one.key, one.position, one.too_short) == (other.key, other.position, other.too_short)
    assert one.counts is not None
    assert other.counts is not None
    assert content(one.counts) == content(other.counts)
    assert lived.accepted == rebuilt.accepted == tokens


def test_tokens_are_counted_only_where_a_penalty_looks_at_them() -> None:
    plain = SamplingState(Request((1, 2), 5), 0, (3,))
    frequency = SamplingState(Request((1, 2), 5, Sampling(frequency_penalty=0.5)), 0, (3,))
    assert plain.counts is None
    assert frequency.counts is not None
    assert content(frequency.counts) == {3: 1}
