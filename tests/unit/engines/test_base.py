"""Requests and their sampling: what is of another type is refused in words, where it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from elastic.engines.base import Request, Sampling
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
    ],
)
def test_what_is_of_another_type_is_refused_in_words(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize("prompt", [(1, 2), [1, 2], range(2), ()])
def test_token_ids_come_in_any_sequence(prompt: Any) -> None:
    assert Request(prompt, 5).prompt == prompt
