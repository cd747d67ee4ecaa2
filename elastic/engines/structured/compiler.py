"""Grammars over the vocabulary of a Hugging Face tokenizer, by llguidance.

llguidance, and not xgrammar, because it refuses what it cannot hold: of a schema with `uniqueItems`, `not`, or with
`required` but no `properties`, xgrammar 0.2.8 makes a grammar of other texts without a word. It also needs no other
package, and reads Lark's notation.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import torch

from elastic.engines.base import Grammar
from elastic.engines.stopping import end_tokens
from elastic.errors import BackendUnavailable, ConfigError, require, require_whole
from elastic.memory.pages.finalizers import call_at_death

logger = logging.getLogger(__name__)

JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Between the parts of a JSON text, if the schema's `x-guidance` has nothing else: no answer of endless spaces."""


class LlguidanceMatcher:
    """What may come next in one answer: a `TokenMatcher`. After the end only end tokens may."""

    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher = matcher
        self.accept: Callable[[int], None] = matcher.consume_token
        """Goes on by a token that `fill_mask` allowed."""
        self._own = torch.zeros(words, dtype=torch.int32)

    def fill_mask(self, mask: torch.Tensor) -> None:
        """Write which tokens may come next, one bit each: [words], int32; those that the tokenizer has not may not."""
        self._matcher.unsafe_compute_mask_ptr(self._own.data_ptr(), self._own.nbytes)
        if self._matcher.is_error():
            raise ConfigError(f"the grammar cannot be followed: {_reason(self._matcher.get_error())}; simplify it")
        words = min(len(mask), len(self._own))
        mask[:words] = self._own[:words]
        mask[words:] = 0


class LlguidanceCompiler:
    """Makes matchers of JSON schemas, regular expressions and grammars: a `GrammarCompiler`. Thread-safe.

    What is not exactly supported (see llguidance's documentation of JSON schemas) is refused. What is compiled is kept
    while the grammar that it was asked for by lives, as in a request, and of others the last used `cached`.
    """

    def __init__(self, tokenizer: Any, end_tokens: Sequence[int] = (), *, cached: int = 128) -> None:
        """Read nothing yet: the vocabulary is, for about a second, when the first grammar comes.

        `tokenizer`: a fast one. `end_tokens`: those that may end an answer; none: the tokenizer's own.
        """
        require_whole(cached, "cached")
        own = tokenizer.eos_token_id
        self._tokenizer, self._cached = tokenizer, cached
        self._ends = list(end_tokens) or [token for token in (own,) if token is not None]
        require(bool(self._ends), "end_tokens", end_tokens, "given, as the tokenizer has no end token")
        self._lock = Lock()
        self._vocabulary: Any = None
        self._matchers: OrderedDict[Grammar, Any] = OrderedDict()
        self._of_live: dict[int, Any] = {}  # by the ids of grammars

    def matcher(self, grammar: Grammar) -> LlguidanceMatcher:
        """Return a new matcher at the beginning of an answer.

        Raises `ConfigError` for a grammar that makes none, `BackendUnavailable` without llguidance.
        """
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = read_vocabulary(self._tokenizer, self._ends)
            compiled = self._of_live.get(id(grammar), self._matchers.get(grammar))
        if compiled is None:
            compiled = compile_grammar(grammar, self._vocabulary)
        with self._lock:
            if id(grammar) not in self._of_live:
                self._of_live[id(grammar)] = compiled
                call_at_death(grammar, self._of_live.pop, id(grammar), None)
            self._matchers[grammar] = compiled
            self._matchers.move_to_end(grammar)
            if len(self._matchers) > self._cached:
                self._matchers.popitem(last=False)
            copy = compiled.deep_copy()
        return LlguidanceMatcher(copy, -(-self._vocabulary.vocab_size // 32))


def compiler_of(model: Any, tokenizer: Any) -> LlguidanceCompiler | None:
    """Make the compiler for answers of a model, if they can end; only the configurations of `model` are read."""
    ends = [*end_tokens(model), *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]
    return LlguidanceCompiler(tokenizer, tuple(dict.fromkeys(ends))) if ends else None


def read_vocabulary(tokenizer: Any, end_tokens: list[int]) -> Any:
    """Return llguidance's form of a tokenizer's vocabulary."""
    try:
        from llguidance.hf import from_tokenizer
    except ImportError as error:
        raise BackendUnavailable(f"{error}; structured output needs: pip install 'elastic-llm[structured]'") from error
    try:
        return from_tokenizer(tokenizer, eos_token=end_tokens)
    except ValueError as error:
        kind = type(tokenizer).__name__
        raise ConfigError(f"structured output cannot be had with this tokenizer, a {kind}: {error}") from error


def compile_grammar(grammar: Grammar, vocabulary: Any) -> Any:
    """Return llguidance's matcher of a grammar. Raises `ConfigError` with its reason if it makes none."""
    from llguidance import LLMatcher

    if grammar.kind == "json_schema":
        source = LLMatcher.grammar_from_json_schema(_schema(grammar.text))
    elif grammar.kind == "regex":
        source = LLMatcher.grammar_from_regex(grammar.text)
    else:
        source = LLMatcher.grammar_from_lark(grammar.text)
    matcher = LLMatcher(vocabulary, source, log_level=0)
    matcher.compute_bitmask()  # shows whether there is a text at all, and copies need not search so far again
    if matcher.is_error():
        raise ConfigError(f"grammar: this {grammar.kind} makes none: {_reason(matcher.get_error())}")
    for warning in matcher.get_grammar_warnings():
        logger.warning("grammar: %s", warning)
    return matcher


def _schema(text: str) -> str:
    """Return a JSON schema with a limit for whitespace."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"grammar: the JSON schema is not JSON: {error}") from error
    if isinstance(schema, dict):
        schema.setdefault("x-guidance", {"whitespace_pattern": JSON_WHITESPACE})
    return json.dumps(schema)


def _reason(error: str) -> str:
    """Return what an error of llguidance says first; the rest of it describes the matcher's state."""
    return " ".join(error.partition("<state>")[0].split())[:300]
