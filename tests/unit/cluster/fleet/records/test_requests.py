"""What is kept of a request: each token once, whoever tells it, and enough to go on with it anywhere."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic import IntegrityError
from elastic.cluster.fleet.records.requests import Resumption, new_record
from elastic.engines.base import Output, Request, Sampling, TokenLogprobs

REQUEST = Request((5, 6, 7), 9, id="a")


def record(request: Request = REQUEST) -> Any:
    return new_record(request, lambda _: None, 0.0)


def test_the_seed_is_drawn_once_and_goes_wherever_the_request_goes() -> None:
    drawn = record()
    before = drawn.states()
    drawn.take(Output("a", (1,)), 0)
    assert drawn.states()[0].seed == before[0].seed
    assert drawn.states()[0].generated == (1,)
    other = record()
    assert other.answers[0].state.seed != drawn.answers[0].state.seed
    seeded = Request((1,), 2, Sampling(seed=4), n=2)
    assert [s.seed for s in record(seeded).states()] == [s.seed for s in record(seeded).states()]


PLACES = st.integers(0, 12)


@given(st.lists(st.integers(0, 99), max_size=12), st.lists(st.tuples(PLACES, PLACES), max_size=12), PLACES)
def test_whatever_is_told_again_each_token_is_told_once(
    tokens: list[int], pieces: list[tuple[int, int]], last: int
) -> None:
    kept, heard = record(Request((1,), 50, id="a")), []
    for begin, end in [*pieces, (last, len(tokens))]:
        start = min(begin, len(heard))
        stop = max(start, min(end, len(tokens)))
        new = kept.take(Output("a", tuple(tokens[start:stop])), start)
        heard += new.tokens if new is not None else ()
        assert heard == tokens[: max(stop, len(heard))]
    assert heard == kept.answers[0].tokens == tokens


def test_missing_tokens_are_an_error_and_nothing_is_told() -> None:
    kept = record()
    with pytest.raises(IntegrityError, match="from 2 on came after 0"):
        kept.take(Output("a", (1,)), 2)
    with pytest.raises(IntegrityError, match="from -1 on came after 0"):
        kept.take(Output("a", (1, 2)), -1)
    assert kept.answers[0].tokens == []


@pytest.mark.parametrize("index", [-1, 1])
def test_tokens_of_an_answer_that_is_none_are_an_error_and_nothing_is_told(index: int) -> None:
    kept = record()
    with pytest.raises(IntegrityError, match=f"has 1 answers, and tokens of answer {index} came"):
        kept.take(Output("a", (1,), index=index), 0)
    assert kept.answers[0].tokens == []


def test_an_end_that_is_told_again_with_known_tokens_is_told_without_them() -> None:
    kept = record()
    kept.take(Output("a", (1, 2)), 0)
    scores = (TokenLogprobs(2, -1.0, 1), TokenLogprobs(3, -2.0, 1))
    new = kept.take(Output("a", (2, 3), "stop", logprobs=scores), 1)
    assert (new.tokens, new.finish, new.logprobs) == ((3,), "stop", scores[1:])
    assert kept.take(Output("a", (4,)), 3) is None


def test_what_the_first_output_says_is_said_once() -> None:
    kept = record()
    first = kept.take(Output("a", (1,), scheduled_s=1.0, cached_tokens=2), 0)
    again = kept.take(Output("a", (2,), scheduled_s=3.0, cached_tokens=3, waited_for_kv_s=0.0), 1)
    assert (first.scheduled_s, first.cached_tokens) == (1.0, 2)
    assert (again.tokens, again.scheduled_s, again.cached_tokens, again.waited_for_kv_s) == ((2,), None, None, None)


def test_answers_end_one_by_one() -> None:
    kept = record(Request((1,), 5, n=3, id="a"))
    kept.take(Output("a", (9,), "length", index=1), 0)
    assert [state.index for state in kept.states()] == [0, 2]
    assert [(o.index, o.finish) for o in kept.end([0, 1], "cancelled", 0.0)] == [(0, "cancelled")]
    assert [answer.state.index for answer in kept.live] == [2]


def test_a_resumption_is_done_when_all_have_been_heard_of_once() -> None:
    done: list[Resumption] = []
    resumption = Resumption(2, done.append, {"a", "b"})
    for request in ("a", "a", "c"):
        resumption.heard(request)
    assert done == []
    resumption.heard("b")
    resumption.heard("b")
    assert done == [resumption]
