"""How many characters of text one token can stand for: what bounds a text by the tokens that fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_COMPOSED = 4
"""Characters that Unicode composes into one, at most: U+1F82 is the longest canonical decomposition."""
_KEEPING = {"ByteLevel", "Metaspace", "Digits", "Punctuation", "UnicodeScripts", "Split"}
_GROWING = {"Prepend", "NFD", "NFKD", "ByteLevel", "Lowercase"}
_COMPOSING = {"NFC", "NFKC"}
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def longest_token(tokenizer: Any) -> int | None:
    """The most characters of a text that one token of a tokenizer stands for; None where that is not certain.

    It is certain where no character is lost: BPE that falls back to bytes, with normalizers and pre-tokenizers that
    are known to remove nothing. A word that is unknown as a whole, a run of unknown characters, spaces that are dropped
    or taken in by a special token would make one token of any number of characters.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    kinds = json.loads(backend.to_str())
    vocabulary = tokenizer.get_vocab()
    if not _has_all_bytes(kinds, vocabulary):
        return None
    if any(token["lstrip"] or token["rstrip"] for token in kinds["added_tokens"]):
        return None
    if not all(_keeps(step) for step in _steps(kinds["pre_tokenizer"])):
        return None
    normalizers = list(_steps(kinds["normalizer"]))
    if not all(_normalizes_safely(step) for step in normalizers):
        return None
    composed = _COMPOSED if any(step["type"] in _COMPOSING for step in normalizers) else 1
    return composed * max(map(len, vocabulary))


def _steps(of: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, those of sequences one by one."""
    if of is None:
        return
    inner = of.get("normalizers") or of.get("pretokenizers") if of["type"] == "Sequence" else None
    if inner is None:
        yield of
        return
    for step in inner:
        yield from _steps(step)


def _has_all_bytes(kinds: dict[str, Any], vocabulary: dict[str, int]) -> bool:
    """Whether whatever has no token of its own becomes bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    if kinds["model"]["type"] != "BPE":
        return False
    if kinds["model"]["byte_fallback"]:
        return all(byte in vocabulary for byte in _BYTES)
    levels = (step["type"] for of in ("normalizer", "pre_tokenizer") for step in _steps(kinds[of]))
    return "ByteLevel" in levels and all(byte in vocabulary for byte in ByteLevel.alphabet())


def _keeps(step: dict[str, Any]) -> bool:
    return step["type"] in _KEEPING and step.get("behavior") != "Removed"


def _normalizes_safely(step: dict[str, Any]) -> bool:
    """Whether a normalizer leaves at least as many characters, but for what it composes."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(step["content"]) >= len(pattern)
    return step["type"] in _GROWING | _COMPOSING
