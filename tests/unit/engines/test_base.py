"""Requests and their sampling: what is of another type is refused in words, where it is made."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from elastic.engines.base import Grammar, Request, Sampling
from elastic.errors import ConfigError


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Request("import os", 5), "prompt: .* not of str"),
        (lambda: Request((1.5, 2), 5), "prompt: .* not of float, int"),
        (lambda: Request(torch.tensor([1, 2]), 5), "prompt: .* not of Tensor"),
        (lambda: Request((1,), "5"), "max_tokens='5' cannot be"),
        (lambda: Request((1,), 5.5), "max_tokens=5.5 cannot be"),
        (lambda: Request((1,), 5, n=True), "n=True cannot be"),
        (lambda: Request((1,), 5, sampling={"temperature": 1}), "sampling=.* cannot be"),
        (lambda: Sampling(temperature="1"), "temperature='1' cannot be"),
        (lambda: Sampling(top_p=None), "top_p=None cannot be"),
        (lambda: Sampling(top_k=1.5), "top_k=1.5 cannot be"),
        (lambda: Sampling(seed="x"), "seed='x' cannot be"),
        (lambda: Request((True,), 5), "prompt: .* not of bool: True"),
        (lambda: Request(5, 5), "prompt: .* not of int: 5"),
        (lambda: Request(b"abc", 5), "prompt: .* not of bytes"),
        (lambda: Request((1,), 5, stop_tokens=5), "stop_tokens: .* not of int: 5"),
        (lambda: Request((1,), 5, stop_tokens=(7, 2.5)), "stop_tokens: .* not of float, int: 2.5"),
        (lambda: Request((1,), 5, stop_tokens=("a",)), "stop_tokens: .* not of str: 'a'"),
        (lambda: Request((1,), 5, stop_tokens=(3, -5)), "stop_tokens=-5 cannot be"),
        (lambda: Request((1,), 5, logprobs=True), "logprobs=True cannot be"),
        (lambda: Request((1,), 5, logprobs=2.5), "logprobs=2.5 cannot be"),
        (lambda: Request((1,), 5, prompt_logprobs=True), "prompt_logprobs=True cannot be"),
        (lambda: Request((1,), 5, prompt_logprobs=2.5), "prompt_logprobs=2.5 cannot be"),
        (lambda: Request((1,), 5, ignore_eos="no"), "ignore_eos='no' cannot be; it must be True or False"),
        (lambda: Request((1,), 5, arrived_s="x"), "arrived_s='x' cannot be"),
        (lambda: Request((1,), 5, arrived_s=math.nan), "arrived_s=nan cannot be"),
        (lambda: Request((1,), 5, grammar="[a-z]"), "grammar=.* cannot be"),
        (lambda: Grammar("yaml", "a: b"), "kind='yaml' cannot be; it must be one of json_schema, regex, lark"),
        (lambda: Grammar(["regex"], "a"), "kind=.* cannot be"),
        (lambda: Grammar("json_schema", {"type": "object"}), "text={'type': 'object'} cannot be; it must be a text"),
        (lambda: Request((1,), 5, id=None), "id=None cannot be; it must be a text"),
        (lambda: Sampling(temperature=True), "temperature=True cannot be"),
        (lambda: Sampling(temperature=10**400), "temperature=1000.* cannot be; it must be at least 0 and finite"),
        (lambda: Sampling(presence_penalty=10**400), "presence_penalty=1000.* cannot be; it must be finite"),
        (lambda: Sampling(frequency_penalty=-1e300), "frequency_penalty=-1e\\+300 cannot be; it must be finite"),
        (lambda: Sampling(repetition_penalty=1e300), "repetition_penalty=1e\\+300 cannot be; it must be above 0"),
        (lambda: Sampling(repetition_penalty=1e-300), "repetition_penalty=1e-300 cannot be; it must be above 0"),
        (lambda: Sampling(logit_bias={5: 1.0}), "logit_bias={5: 1.0} cannot be; it must be pairs"),
        (lambda: Sampling(logit_bias=(5, 1.0)), "logit_bias=.5, 1.0. cannot be; it must be pairs"),
        (lambda: Sampling(logit_bias=((5, "a"),)), "logit_bias='a' cannot be; it must be a number for token 5"),
        (lambda: Sampling(logit_bias=((5, 10**400),)), "logit_bias=1000.* cannot be; it must be a number"),
        (lambda: Sampling(logit_bias=((5.0, 1),)), "logit_bias=5.0 cannot be; it must be of token ids"),
        (lambda: Sampling(logit_bias=((True, 1.0),)), "logit_bias=True cannot be; it must be of token ids"),
        (lambda: Sampling(logit_bias=np.array([[5, 1]])), "logit_bias=array.* cannot be; it must be pairs"),
        (lambda: Sampling(logit_bias=np.float32(2.0)), "logit_bias=.* cannot be; it must be pairs"),
        (lambda: Request(bytearray(b"abc"), 5), "prompt: .* not of bytearray"),
        (lambda: Request((np.array(3),), 5), "prompt: .* not of ndarray"),
        (lambda: Request((1,), 5, stop_tokens=np.int64(2)), "stop_tokens: .* not of int64"),
        (lambda: Request((1,), 5, stop_tokens=np.array([[1, 2]])), "stop_tokens: .* not of ndarray"),
        (lambda: Request((1,), 5, stop_tokens=torch.tensor(3)), "stop_tokens: .* not of Tensor"),
        (lambda: Request((1,), 5, parent=np.array([1, 2])), "parent=array.* cannot be; it must be a text, or None"),
        (lambda: Grammar(np.array(["lark", "regex"]), "a"), "kind=array.* cannot be"),
    ],
)
def test_what_is_of_another_type_is_refused_in_words(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize("prompt", [(1, 2), [1, 2], range(2), ()])
def test_token_ids_come_in_any_sequence(prompt: Any) -> None:
    assert Request(prompt, 5).prompt == tuple(prompt)


def test_what_was_given_in_lists_can_be_changed_afterwards() -> None:
    prompt, ends, biases, stops = [1, 2], [3], [[5, 1.0]], {7}
    request = Request(prompt, 5, Sampling(logit_bias=biases), stop_tokens=ends)  # type: ignore[arg-type]
    other = Request((1, 2), 5, stop_tokens=stops)  # type: ignore[arg-type]
    prompt.append(9)
    ends.append(9)
    stops.add(9)
    biases[0][1] = 2.0
    biases.append([6, 1.0])
    assert (request.prompt, request.stop_tokens, request.sampling.logit_bias) == ((1, 2), (3,), ((5, 1.0),))
    assert other.stop_tokens == (7,)


def test_token_ids_of_numpy_and_sets_of_them_are_taken() -> None:
    assert Request((1, 2), 5, stop_tokens=frozenset({np.int64(3)})).stop_tokens == {3}  # type: ignore[arg-type]
    assert Request((1, 2), 5, stop_tokens=np.array([3, 4])).stop_tokens == (3, 4)  # type: ignore[arg-type]
    assert Sampling(logit_bias=((np.int64(3), -math.inf),)).logit_bias == ((3, -math.inf),)  # type: ignore[arg-type]
