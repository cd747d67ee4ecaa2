"""Outputs as columns: nothing of an output is lost on the way, whatever is in it."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.cluster.control.columns import from_columns, to_columns
from elastic.cluster.control.messages import News
from elastic.engines.base import Output, TokenLogprobs
from elastic.engines.core.load import EngineLoad

LOGPROBS = TokenLogprobs(3, -0.5, 1, ((3, -0.5),))
OTHER: dict[str, Any] = {
    "request": "another",
    "tokens": (1, 2),
    "finish": "stop",
    "error": "it failed",
    "at_s": 2.5,
    "weights": 1,
    "scheduled_s": 1.5,
    "waited_for_kv_s": 0.0,
    "index": 3,
    "logprobs": (LOGPROBS,),
    "prompt_logprobs": (None, LOGPROBS),
    "cached_tokens": 0,
}
PLAIN = Output("request", (7,), at_s=1.0)

outputs = st.builds(
    lambda changes, value: replace(PLAIN, **{name: OTHER[name] for name in changes}, **value),
    st.sets(st.sampled_from(sorted(OTHER.keys() - {"tokens"})), max_size=2),
    st.fixed_dictionaries({"tokens": st.sampled_from([(), (0,), (2**31,), (1, 2)])}),
)


@pytest.mark.parametrize("field", [field.name for field in fields(Output)])
def test_each_field_of_an_output_is_kept(field: str) -> None:
    changed = replace(PLAIN, **{field: OTHER[field]})
    assert from_columns(to_columns([PLAIN, changed, PLAIN])) == (PLAIN, changed, PLAIN)


@given(st.lists(outputs, max_size=8))
def test_any_mixture_comes_back_in_order(some: list[Output]) -> None:
    assert from_columns(to_columns(some)) == tuple(some)


def test_news_are_pickled_as_columns_and_come_back_equal() -> None:
    step = tuple(replace(PLAIN, request=f"request-{i}") for i in range(64))
    news = News(step, tuple(range(64)), EngineLoad(64, 0, 3, 100, 9), None, (("int4",),))
    assert pickle.loads(pickle.dumps(news, 5)) == news
    assert len(pickle.dumps(news, 5)) < len(pickle.dumps(step, 5)) / 2
