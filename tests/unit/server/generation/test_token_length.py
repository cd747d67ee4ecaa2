"""The characters of the longest token: a bound that no text which fits is beyond, or none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from elastic.server.generation.token_length import longest_token
from support.serving.live_server import TOKENIZER

LETTERS = "abc\u00e9 \u03b1\u1f00"
MARKS = "\u0313\u0300\u0345"
"""With an alpha before them, one character: the most that are composed."""
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(normalizer: Any = None, before: Any = None, special: Any = None, lacks: str = "") -> Any:
    """Byte-level BPE with one merge."""
    vocabulary = {byte: i for i, byte in enumerate([*(b for b in BYTES if b != lacks), "ab"])}
    made = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([before, level]) if before else level
    if normalizer:
        made.normalizer = normalizer
    if special:
        made.add_special_tokens([special])
    return PreTrainedTokenizerFast(tokenizer_object=made)


def byte_fallback(lacks: str = "") -> Any:
    """BPE over characters, with bytes for the others; a space is `▁`."""
    names = [name for name in (f"<0x{byte:02X}>" for byte in range(256)) if name != lacks]
    vocabulary = {name: i for i, name in enumerate([*names, "▁", "a", "b", "ab"])}
    made = Tokenizer(models.BPE(vocabulary, [("a", "b")], byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return PreTrainedTokenizerFast(tokenizer_object=made)


SPLIT = pre_tokenizers.Split(Regex(r"\s+"), "isolated")
LOSSLESS = {
    "the model inside": TOKENIZER,
    "byte level": byte_level(),
    "split first": byte_level(before=SPLIT),
    "composed": byte_level(normalizers.NFC()),
    "byte fallback": byte_fallback(),
}
LOSING = {
    "spaces dropped": byte_level(before=pre_tokenizers.WhitespaceSplit()),
    "splits removed": byte_level(before=pre_tokenizers.Split(" ", "removed")),
    "ends stripped": byte_level(normalizers.Strip()),
    "accents stripped": byte_level(normalizers.StripAccents()),
    "runs replaced": byte_level(normalizers.Replace(Regex(" +"), " ")),
    "shortened": byte_level(normalizers.Replace("aaaa", "b")),
    "a special token takes in spaces": byte_level(special=AddedToken("<s>", lstrip=True)),
    "a byte without a token": byte_level(lacks="c"),
    "a byte without a fallback": byte_fallback(lacks="<0xCE>"),
    "unknown words": PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    ),
    "no vocabulary to look at": object(),
}


@settings(max_examples=80, deadline=None)
@given(st.text(LETTERS + MARKS, max_size=60) | st.sampled_from(["ab" * 40, f"\u03b1{MARKS}" * 9]))
def test_no_text_is_longer_than_its_tokens_allow(text: str) -> None:
    for name, tokenizer in LOSSLESS.items():
        longest = longest_token(tokenizer)
        assert longest is not None, name
        assert len(text) <= longest * len(tokenizer.encode(text)), name


@pytest.mark.parametrize("name", LOSING)
def test_where_characters_may_be_lost_there_is_no_bound(name: str) -> None:
    assert longest_token(LOSING[name]) is None
