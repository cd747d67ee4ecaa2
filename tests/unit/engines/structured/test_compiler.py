"""Structured output: texts of a grammar and no others, ends exactly where a text is complete."""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from elastic.assets import MODEL_DIR
from elastic.engines.base import Grammar, Request, Sampling
from elastic.engines.sampling import SamplingState, sample
from elastic.engines.structured import LlguidanceCompiler, compiler
from elastic.errors import BackendUnavailable, ConfigError

TOKENIZER = AutoTokenizer.from_pretrained(MODEL_DIR)
END = TOKENIZER.eos_token_id
VOCABULARY = len(TOKENIZER) + 39
"""More logits than the tokenizer has tokens, as in models whose embedding is padded."""
COMPILER = LlguidanceCompiler(TOKENIZER)
needs_llguidance = pytest.mark.skipif(find_spec("llguidance") is None, reason="needs the extra structured")

Logits = Callable[[list[int]], torch.Tensor]


def allowed(compiler: LlguidanceCompiler, grammar: Grammar, tokens: list[int], words: int = 66) -> set[int]:
    """The tokens that may come after these."""
    matcher, mask = compiler.matcher(grammar), torch.full((words,), -1, dtype=torch.int32)
    for token in tokens:
        matcher.accept(token)
    matcher.fill_mask(mask)
    return set(np.flatnonzero(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")).tolist())


def answer(grammar: Grammar, logits: Logits, seed: int, max_tokens: int) -> tuple[list[int], bool]:
    """Tokens of an answer drawn at temperature 1, and whether it ended in time, without its end token."""
    request = Request((1,), max_tokens, Sampling(1.0), (END,), grammar=grammar)
    state, tokens = SamplingState(request, seed, matcher=COMPILER.matcher(grammar)), []
    for _ in range(max_tokens):
        (chosen,) = sample(logits(tokens), [state])
        assert chosen.error is None
        if chosen.token == END:
            return tokens, True
        tokens.append(chosen.token)
        state.append(chosen.token)
    return tokens, False


def noise(seed: int) -> Logits:
    """A model that says anything, ends rather often."""
    source = torch.Generator().manual_seed(seed)

    def logits(_: list[int]) -> torch.Tensor:
        scores = torch.randn(1, VOCABULARY, generator=source) * 3
        scores[0, END] += 6
        return scores

    return logits


@lru_cache
def shipped_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR)


LEAVES = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -3, "maximum": 120},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 9.5},
        {"type": "string", "maxLength": 6},
        {"type": "string", "pattern": "^[a-c]{1,3}-[0-9]+$", "maxLength": 8},
        {"enum": ["red", "grün", 3, None, 'quote"d']},
        {"const": {"fixed": [1, "two"]}},
    ]
)


def _extended(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "b", "long name", "ü", 'q"uote'])
    properties = st.dictionaries(names, inner, max_size=3)
    return st.one_of(
        st.builds(
            lambda held, needed: {
                "type": "object",
                "properties": held,
                "required": sorted(set(held) & needed),
                "additionalProperties": False,
            },
            properties,
            st.sets(names),
        ),
        st.builds(
            lambda item, least, more: {"type": "array", "items": item, "minItems": least, "maxItems": least + more},
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    )


SCHEMAS = st.recursive(LEAVES, _extended, max_leaves=5)


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is of one of `SCHEMAS`, by the words of the JSON schema standard."""
    if "anyOf" in schema:
        return any(conforms(value, option) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return any(json.dumps(value) == json.dumps(one) for one in schema.get("enum", [schema.get("const")]))
    match schema["type"], value:
        case "object", dict():
            held = schema["properties"]
            return set(schema["required"]) <= set(value) <= set(held) and all(
                conforms(one, held[name]) for name, one in value.items()
            )
        case "array", list():
            return schema["minItems"] <= len(value) <= schema["maxItems"] and all(
                conforms(one, schema["items"]) for one in value
            )
        case "string", str():
            return len(value) <= schema["maxLength"] and bool(re.search(schema.get("pattern", ""), value))
        case "integer", int():
            return not isinstance(value, bool) and schema["minimum"] <= value <= schema["maximum"]
        case "number", int() | float():
            return not isinstance(value, bool) and 0 < value <= schema["maximum"]
        case "boolean", bool():
            return True
        case "null", None:
            return True
    return False


@needs_llguidance
@settings(deadline=None, max_examples=40)
@given(SCHEMAS, st.integers(0, 2**32))
def test_answers_are_of_their_schema(schema: dict[str, Any], seed: int) -> None:
    tokens, ended = answer(Grammar("json_schema", json.dumps(schema)), noise(seed), seed, 300)
    if ended:
        assert conforms(json.loads(TOKENIZER.decode(tokens)), schema)


@needs_llguidance
@pytest.mark.slow
@settings(deadline=None, max_examples=8, phases=[Phase.explicit, Phase.generate])
@given(SCHEMAS, st.integers(0, 2**32))
def test_answers_of_a_model_are_of_their_schema(schema: dict[str, Any], seed: int) -> None:
    cache = None

    def logits(tokens: list[int]) -> torch.Tensor:
        nonlocal cache
        with torch.inference_mode():
            out = shipped_model()(torch.tensor([tokens[-1:] or [1]]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        return out.logits[:, -1].float()

    tokens, ended = answer(Grammar("json_schema", json.dumps(schema)), logits, seed, 100)
    if ended:
        assert conforms(json.loads(TOKENIZER.decode(tokens)), schema)


TEXTS = {
    Grammar("regex", "(ab|c)*x?"): re.compile("(ab|c)*x?").fullmatch,
    Grammar("regex", r"^[0-9]{2,3}(\.[0-9])?$"): re.compile(r"[0-9]{2,3}(\.[0-9])?").fullmatch,
    Grammar("lark", 'start: "(" start ")" | "."'): lambda text: text.count("(") == text.count(")") and "." in text,
}


@needs_llguidance
@pytest.mark.parametrize("grammar", TEXTS, ids=lambda grammar: grammar.text)
@pytest.mark.parametrize("seed", range(8))
def test_an_end_is_allowed_exactly_where_the_text_is_complete(grammar: Grammar, seed: int) -> None:
    tokens, ended = answer(grammar, noise(seed), seed, 30)
    assert TEXTS[grammar](TOKENIZER.decode(tokens)) or not ended
    for length in range(len(tokens) + 1):
        may_end = END in allowed(COMPILER, grammar, tokens[:length])
        text = TOKENIZER.decode(tokens[:length])
        complete = bool(TEXTS[grammar](text)) if grammar.kind == "regex" else text.endswith("." + ")" * text.count("("))
        assert may_end == complete, text


@needs_llguidance
def test_after_the_end_only_the_end_may_come() -> None:
    grammar = Grammar("regex", "a")
    (a,) = TOKENIZER.encode("a", add_special_tokens=False)
    assert allowed(COMPILER, grammar, [a]) == {END}
    assert allowed(COMPILER, grammar, [a, END]) == {END}


@needs_llguidance
def test_each_end_token_of_a_model_may_end_an_answer() -> None:
    ends = LlguidanceCompiler(TOKENIZER, (END, 5))
    (a,) = TOKENIZER.encode("a", add_special_tokens=False)
    assert allowed(ends, Grammar("regex", "a"), [a]) == {END, 5}


@needs_llguidance
@pytest.mark.parametrize("words", [1, 64, 66, 100])
def test_a_mask_may_have_another_size_than_the_tokenizer(words: int) -> None:
    every = allowed(COMPILER, Grammar("regex", "[^\x00]*"), [], words)
    assert every <= set(range(min(32 * words, len(TOKENIZER))))
    assert len(every) > 8 * min(words, 64)


@needs_llguidance
@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("json_schema", "{"), "not JSON"),
        (Grammar("json_schema", "[" * 100_000), "not JSON"),
        (Grammar("json_schema", "3"), "object or boolean"),
        (Grammar("json_schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Grammar("json_schema", '{"type": "integer", "minimum": 3, "maximum": 2}'), "3.*2"),
        (Grammar("json_schema", '{"$ref": "#"}'), "makes none"),
        (Grammar("regex", "(ab"), "unclosed group"),
        (Grammar("regex", r"a(?=b)"), "look-around"),
        (Grammar("lark", "start: foo"), "foo"),
        (Grammar("lark", 'start: start "a"'), "makes none"),
    ],
    ids=lambda value: value.text[:30] if isinstance(value, Grammar) else None,
)
def test_what_makes_no_grammar_is_refused_with_the_reason(grammar: Grammar, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        COMPILER.matcher(grammar)


@needs_llguidance
def test_spaces_between_the_parts_of_a_json_text_end() -> None:
    (space,) = TOKENIZER.encode("\n", add_special_tokens=False)
    (bracket,) = TOKENIZER.encode("[", add_special_tokens=False)
    default = Grammar("json_schema", '{"type": "array"}')
    compact = Grammar("json_schema", '{"type": "array", "x-guidance": {"whitespace_flexible": false}}')
    assert space in allowed(COMPILER, default, [bracket] + [space] * 63)
    assert space not in allowed(COMPILER, default, [bracket] + [space] * 64)
    assert space not in allowed(COMPILER, compact, [bracket])


@needs_llguidance
def test_a_matcher_that_was_led_astray_says_so_and_harms_no_other() -> None:
    grammar, mask = Grammar("regex", "a"), torch.zeros(64, dtype=torch.int32)
    astray, other = COMPILER.matcher(grammar), COMPILER.matcher(grammar)
    astray.accept(TOKENIZER.encode("b", add_special_tokens=False)[0])
    with pytest.raises(ConfigError, match="cannot be followed"):
        astray.fill_mask(mask)
    other.fill_mask(mask)
    assert mask.any()


@pytest.mark.parametrize("cached", [0, "2", True, 1.5])
def test_a_compiler_keeps_a_number_of_grammars(cached: Any) -> None:
    with pytest.raises(ConfigError, match=f"cached={cached!r} cannot be; it must be a whole number, at least 1"):
        LlguidanceCompiler(TOKENIZER, cached=cached)


@needs_llguidance
def test_matchers_are_made_by_many_threads_of_few_kept_grammars() -> None:
    compiler, (a,) = LlguidanceCompiler(TOKENIZER, cached=2), TOKENIZER.encode("a", add_special_tokens=False)
    grammars = [Grammar("regex", "a" * length) for length in range(1, 6)]

    def complete(number: int) -> bool:
        length = number % 5
        return allowed(compiler, grammars[length], [a] * (length + 1)) == {END}

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(complete, range(200)))


@needs_llguidance
def test_a_grammar_is_compiled_once_while_a_request_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    as_it_is = compiler.compile_grammar

    def compile_grammar(grammar: Grammar, vocabulary: Any) -> Any:
        compiled.append(grammar.text)
        return as_it_is(grammar, vocabulary)

    monkeypatch.setattr(compiler, "compile_grammar", compile_grammar)
    grammars, texts = LlguidanceCompiler(TOKENIZER, cached=2), [f"a{{{count}}}" for count in range(1, 6)]
    requests = [Request((1,), 9, grammar=Grammar("regex", text)) for text in texts]
    for request in [*requests, *(replace(request, max_tokens=8) for request in requests)]:
        assert request.grammar is not None
        grammars.matcher(request.grammar)
    assert compiled == texts
    requests.clear()
    del request
    gc.collect()
    grammars.matcher(Grammar("regex", texts[0]))
    grammars.matcher(Grammar("regex", texts[-1]))
    assert compiled == [*texts, texts[0]], "of those that are in no request the last ones are kept"


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = LlguidanceCompiler(TOKENIZER)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(BackendUnavailable, match=r"elastic-llm\[structured\]"):
        compiler.matcher(Grammar("regex", "a"))


def test_a_tokenizer_without_an_end_token_needs_one_told() -> None:
    class Endless:
        eos_token_id = None

    with pytest.raises(ConfigError, match="end_tokens"):
        LlguidanceCompiler(Endless())
