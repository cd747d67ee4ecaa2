"""The most characters of text that one token can stand for: it bounds a text by the tokens that fit."""

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
    """Return the most characters of a text that one token of a tokenizer stands for; None where that is not certain.

    It is certain where no character is lost: BPE that falls back to bytes, with normalizers and pre-tokenizers that
    are known to remove nothing. A word that is unknown as a whole, a run of unknown characters, spaces that are dropped
    or taken in by a special token would make one token of any number of characters.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts = json.loads(backend.to_str())
    vocabulary = tokenizer.get_vocab()
    if not _has_all_bytes(parts, vocabulary):
        return None
    if any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"]):
        return None
    splitters = list(_steps(parts["pre_tokenizer"]))
    if any(step["type"] not in _KEEPING or step.get("behavior") == "Removed" for step in splitters):
        return None
    normalizers = list(_steps(parts["normalizer"]))
    if not all(_normalizes_safely(step) for step in normalizers):
        return None
    composed = _COMPOSED if any(step["type"] in _COMPOSING for step in normalizers) else 1
    return composed * max(map(len, vocabulary))


def _steps(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer, those of sequences one by one."""
    if part is None:
        return
    inner = part.get("normalizers") or part.get("pretokenizers") if part["type"] == "Sequence" else None
    if inner is None:
        yield part
        return
    for step in inner:
        yield from _steps(step)


def _has_all_bytes(parts: dict[str, Any], vocabulary: dict[str, int]) -> bool:
    """Tell whether all text without a token of its own becomes bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    if parts["model"]["type"] != "BPE":
        return False
    if parts["model"]["byte_fallback"]:
        return all(byte in vocabulary for byte in _BYTES)
    types = (step["type"] for name in ("normalizer", "pre_tokenizer") for step in _steps(parts[name]))
    return "ByteLevel" in types and all(byte in vocabulary for byte in ByteLevel.alphabet())


def _normalizes_safely(step: dict[str, Any]) -> bool:
    """Tell whether a normalizer leaves at least as many characters, but for what it composes."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(step["content"]) >= len(pattern)
    return step["type"] in _GROWING | _COMPOSING
