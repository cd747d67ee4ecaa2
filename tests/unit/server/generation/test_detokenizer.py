"""Text in pieces is the text: no half characters, no lost spaces, nothing after a stop string."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from elastic.assets import MODEL_DIR
from elastic.server.generation.detokenizer import REPLACEMENT, Detokenizer, StopStrings

WORDS = ["▁", "▁a", "b", "▁▁", "\n", "▁été", "日本", "!"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentence_pieces() -> Any:
    """A tokenizer like Llama 2's: words carry their space, what is no word is bytes."""
    vocabulary = {piece: i for i, piece in enumerate(["<unk>", "<s>", "</s>", *BYTES, *WORDS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


BYTE_LEVEL = AutoTokenizer.from_pretrained(MODEL_DIR)
SENTENCE_PIECES = sentence_pieces()
FIRST_BYTE = 3
FIRST_WORD = FIRST_BYTE + 256


def as_bytes(text: str) -> list[int]:
    return [FIRST_BYTE + byte for byte in text.encode()]


def split(tokens: list[int], data: st.DataObject) -> list[list[int]]:
    """The tokens in groups of any size, as they come from an engine."""
    groups = []
    while tokens:
        size = data.draw(st.integers(1, min(40, len(tokens))))
        groups.append(tokens[:size])
        tokens = tokens[size:]
    return groups


def pieces(tokenizer: Any, prompt: list[int], groups: list[list[int]]) -> list[str]:
    text = Detokenizer(tokenizer, prompt)
    return [*(text.push(group) for group in groups), text.flush()]


def decoded(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@given(st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=200), st.data())
def test_pieces_of_any_tokens_are_all_of_the_text(tokens: list[int], data: st.DataObject) -> None:
    assert "".join(pieces(BYTE_LEVEL, [], split(tokens, data))) == decoded(BYTE_LEVEL, tokens)


@given(st.text(max_size=60), st.data())
def test_no_piece_of_a_text_has_half_a_character(text: str, data: st.DataObject) -> None:
    tokens = BYTE_LEVEL.encode(text)
    got = pieces(BYTE_LEVEL, [], split(tokens, data))
    assert "".join(got) == text
    assert REPLACEMENT in text or not any(REPLACEMENT in piece for piece in got)


@given(st.lists(st.sampled_from([*WORDS, "😀", "é", "한", "z"]), max_size=40), st.data())
def test_words_keep_their_spaces_and_bytes_become_characters(words: list[str], data: st.DataObject) -> None:
    tokens = [t for w in words for t in ([FIRST_WORD + WORDS.index(w)] if w in WORDS else as_bytes(w))]
    got = pieces(SENTENCE_PIECES, [], split(tokens, data))
    assert "".join(got) == decoded(SENTENCE_PIECES, tokens)
    assert not any(REPLACEMENT in piece for piece in got)


@given(st.lists(st.integers(0, FIRST_WORD + len(WORDS) - 1), max_size=120), st.data())
def test_bytes_that_are_no_text_lose_no_word(tokens: list[int], data: st.DataObject) -> None:
    got = "".join(pieces(SENTENCE_PIECES, [], split(tokens, data)))
    assert got.replace(REPLACEMENT, "").count("日本") == tokens.count(FIRST_WORD + WORDS.index("日本"))


def test_a_first_word_after_a_prompt_keeps_its_space() -> None:
    for prompt, expected in (([], "a"), ([FIRST_WORD + 2], " a"), ([1], "a")):
        assert "".join(pieces(SENTENCE_PIECES, prompt, [[FIRST_WORD + 1]])) == expected


def test_special_tokens_without_a_role_are_left_out_too() -> None:
    tokenizer = copy.deepcopy(BYTE_LEVEL)
    tokenizer.add_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<tool_call>", special=False)])
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") not in tokenizer.all_special_ids
    tokens = tokenizer.encode("a<|im_start|>b<tool_call>c")
    assert "".join(pieces(tokenizer, [], [tokens])) == decoded(tokenizer, tokens) == "ab<tool_call>c"
    assert Detokenizer(tokenizer, [], skip_special=False).push(tokens) == "a<|im_start|>b<tool_call>c"


def test_a_prompt_that_ends_inside_a_character() -> None:
    euro = as_bytes("€")
    assert "".join(pieces(SENTENCE_PIECES, euro[:2], [euro[2:]])) == "€"


def test_a_piece_is_there_as_soon_as_its_character_is() -> None:
    tokens = BYTE_LEVEL.encode("x€y")
    text = Detokenizer(BYTE_LEVEL, [])
    assert [text.push([token]) for token in tokens] == ["x", "", "", "€", "y"]


def test_endless_nonsense_costs_no_more_and_more() -> None:
    text = Detokenizer(BYTE_LEVEL, [])
    half = BYTE_LEVEL.encode("€")[0]
    said = "".join(text.push([half]) for _ in range(1000))
    assert said + text.flush() == REPLACEMENT * 1000
    assert len(text._window) <= 64


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_stops_cut_where_a_search_in_the_whole_text_would(text: str, words: list[str], data: st.DataObject) -> None:
    stops, rest, got = StopStrings(words), text, ""
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        got += stops.push(rest[:size])
        rest = rest[size:]
        if stops.found:
            break
    got += stops.flush()
    seen = text[: len(text) - len(rest)]
    cuts = [seen.find(word) for word in words if word in seen]
    assert got == (seen[: min(cuts)] if cuts else text)
    assert (stops.found is not None) == any(word in text for word in words)


class Looked(str):
    """A stop string that counts how often it is looked at."""

    looks = 0

    def __getitem__(self, key: Any) -> str:
        Looked.looks += 1
        return super().__getitem__(key)

    def startswith(self, *arguments: Any) -> bool:
        Looked.looks += 1
        return super().startswith(*arguments)


def test_a_long_stop_string_costs_no_more_than_a_short_one() -> None:
    text = "ab" * 100

    def looks(length: int) -> int:
        stops = StopStrings([Looked("ab" * (length // 2) + "c"), Looked("b" * length)])
        Looked.looks = 0
        assert "".join(stops.push(character) for character in text) + stops.flush() == text
        return Looked.looks

    assert looks(256) <= 2 * looks(4) <= 8 * len(text)
