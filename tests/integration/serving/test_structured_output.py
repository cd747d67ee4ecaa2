"""Structured output on a running engine: texts of their grammars, beside other requests, wherever they are computed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from elastic import ConfigError
from elastic.engines.base import Grammar, Request, Sampling
from elastic.engines.continuous import ContinuousEngine
from elastic.engines.structured import LlguidanceCompiler
from support.serving.generations import Collector, serve
from support.serving.live_server import FEW, TOKENIZER, model
from support.wrapped_model import small

ALL = 12
"""Layers of the model: what all of them write by a grammar has an end."""
PROMPT = (10, 20, 30)
LIST = Grammar(
    "json_schema",
    '{"type": "array", "maxItems": 3, "items": {"enum": ["def", "class", 7]}}',
)
NAME = Grammar("regex", "[a-z_]{2,6}")


class Limited:
    """A `GrammarCompiler` whose matchers allow token 5 twice, and then cannot go on."""

    def __init__(self) -> None:
        self.accepted = 0

    def matcher(self, grammar: Grammar) -> Limited:
        return Limited()

    def fill_mask(self, mask: torch.Tensor) -> None:
        if self.accepted == 2:
            raise ConfigError("too complex")
        mask.zero_()
        mask[0] = 1 << 5

    def accept(self, token: int) -> None:
        self.accepted += 1


@pytest.fixture
def engine(wrapped: Any) -> Iterator[Any]:
    """engine(grammars, layers) over the first layers of the model that ships, started; stopped when the test ends."""
    made: list[ContinuousEngine] = []

    def engine(grammars: Any, layers: int = FEW) -> ContinuousEngine:
        if getattr(model(layers), "elastic", None) is None:
            wrapped(model(layers), small(64 << 20))
        made.append(ContinuousEngine(model(layers), block_tokens=8, grammars=grammars))
        made[-1].start()
        return made[-1]

    yield engine
    for each in made:
        each.stop(drain=False)


def asked(grammar: Grammar | None, seed: int, max_tokens: int = 60) -> Request:
    return Request(PROMPT, max_tokens, Sampling(1.0, seed=seed), grammar=grammar)


def test_answers_beside_others_are_of_their_grammars(engine: Any) -> None:
    pytest.importorskip("llguidance")
    serving = engine(LlguidanceCompiler(TOKENIZER), ALL)
    requests = [asked(*((LIST, seed), (NAME, seed), (None, seed, 20))[seed % 3]) for seed in range(9)]
    heard = serve(serving, requests)
    for request in requests:
        tokens, end = heard.tokens[request.id], heard.ends[request.id]
        text = TOKENIZER.decode(tokens, skip_special_tokens=True)
        if request.grammar == LIST:
            assert end.finish == "stop"
            assert set(json.loads(text)) <= {"def", "class", 7}
        elif request.grammar == NAME:
            assert end.finish == "stop"
            assert re.fullmatch("[a-z_]{2,6}", text)
        else:
            alone = serve(serving, [asked(None, request.sampling.seed, request.max_tokens)])
            assert tokens in alone.tokens.values()


def test_a_structured_answer_goes_on_in_another_engine(engine: Any) -> None:
    pytest.importorskip("llguidance")
    grammar = Grammar("regex", "([a-z]+ ){1000}")
    here = engine(LlguidanceCompiler(TOKENIZER))
    request = asked(grammar, 3)
    expected = serve(here, [request]).tokens[request.id]
    moving, heard = asked(grammar, 3), Collector()
    here.submit(moving, heard)
    heard.wait_for_tokens(moving.id, 5)
    states = here.export(moving.id)
    here.stop()
    there = engine(LlguidanceCompiler(TOKENIZER))
    there.adopt(states, heard)
    heard.wait([moving.id])
    assert len(states[0].generated) >= 5
    assert heard.tokens[moving.id] == expected


def test_an_answer_whose_grammar_cannot_be_followed_fails_alone(engine: Any) -> None:
    serving = engine(Limited())
    lost, plain = asked(NAME, 0), asked(None, 0)
    heard = serve(serving, [lost, plain])
    assert heard.tokens[lost.id] == [5, 5]
    assert (heard.ends[lost.id].finish, heard.ends[lost.id].error) == ("failed", "too complex")
    assert heard.ends[plain.id].finish in ("length", "stop")
    assert serving.counters.read().running == 0


def test_what_is_no_grammar_is_refused_before_it_is_queued(engine: Any) -> None:
    pytest.importorskip("llguidance")
    serving = engine(LlguidanceCompiler(TOKENIZER))
    with pytest.raises(ConfigError, match="unclosed group"):
        serving.submit(asked(Grammar("regex", "(a"), 0), Collector())
    assert serving.counters.read().waiting == 0
