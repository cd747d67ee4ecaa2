"""The text of single tokens, as reports of log-probabilities name them."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

_SPACE = "\u2581"
"""How SentencePiece writes a space."""


def _bytes_of_letters() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for: printable ones stand for themselves."""
    alphabet = sorted(ByteLevel.alphabet())
    own = {letter: ord(letter) for letter in alphabet if ord(letter) < 256}
    others = [byte for byte in range(256) if byte not in own.values()]
    return own | dict(zip([letter for letter in alphabet if letter not in own], others, strict=True))


class TokenTexts:
    """Text and bytes of each token of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {token: str(text) for token, text in tokenizer.added_tokens_decoder.items()}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = json.dumps(json.loads(backend.to_str())["decoder"]) if backend is not None else ""
        self._letters = _bytes_of_letters() if '"ByteLevel"' in decoder else {}
        self._sentence_piece = '"ByteFallback"' in decoder or '"Metaspace"' in decoder
        self.of = lru_cache(maxsize=65_536)(self._of)
        """`of(token)`: its text, and the bytes that it stands for. Bytes that are no text: `bytes:\\xe2\\x82`."""

    def _of(self, token: int) -> tuple[str, bytes]:
        data = self._bytes(token)
        try:
            return data.decode(), data
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(piece, str):
            return b""  # an id between the words that the vocabulary has
        if self._letters:
            return bytes(self._letters[letter] for letter in piece if letter in self._letters)
        if self._sentence_piece:
            is_byte = len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
            return bytes([int(piece[3:5], 16)]) if is_byte else piece.replace(_SPACE, " ").encode()
        return str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False)).encode()
