"""Two engines that are compared have the same greedy tokens, but for ties."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import continuous_vllm
from continuous_vllm import batch_prompts, same_tokens

from elastic.assets import MODEL_DIR
from support.serving.live_server import model_tokens

MODEL = str(MODEL_DIR)


def expected() -> list[list[int]]:
    return [model_tokens(tuple(prompt), 4) for prompt in batch_prompts()[:4]]


def test_the_share_of_requests_with_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = expected()
    assert same_tokens(MODEL, tokens, tokens) == 1
    other = [*tokens[:3], [*tokens[3][:2], tokens[3][2] + 1, 7]]
    monkeypatch.setattr(continuous_vllm, "TIE", 10.0)
    assert same_tokens(MODEL, tokens, other) == 0.75


def test_a_token_that_is_not_the_likeliest_is_an_error() -> None:
    tokens = expected()
    other = [*tokens[:3], [*tokens[3][:2], tokens[3][2] + 1, 7]]
    for one, another in ((tokens, other), (other, tokens)):
        with pytest.raises(RuntimeError, match="request 3: token 2"):
            same_tokens(MODEL, one, another)
