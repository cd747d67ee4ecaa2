"""Calls in the text of answers: however it is divided, the same calls and the same content; no text is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic.server.tools.base import Parsed, ToolParser
from elastic.server.tools.forced import ArgumentsParser, ListParser
from elastic.server.tools.formats import TOOL_FORMATS

Call = tuple[str, Any]

names = st.text("abcXYZ_09", min_size=1, max_size=8).map(lambda name: "f" + name)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(st.text("abc", min_size=1, max_size=4), values, max_size=3)
calls = st.lists(st.tuples(names, arguments), min_size=1, max_size=3)
words = st.text('abc {}[]"<>:,;\n', max_size=20)


def read(parser: ToolParser, text: str, cuts: Sequence[int]) -> tuple[str, list[Call]]:
    """The content and the calls of a text that comes in pieces."""
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return joined([*(parser.push(piece) for piece in pieces), parser.flush()])


def raw(parser: ToolParser, text: str, cuts: Sequence[int]) -> tuple[str, list[list[str]]]:
    """The same, with arguments as they are written: they may break off."""
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return as_written([*(parser.push(piece) for piece in pieces), parser.flush()])


def joined(parts: Sequence[Parsed]) -> tuple[str, list[Call]]:
    content, found = as_written(parts)
    return content, [(name, json.loads(told)) for name, told in found]


def as_written(parts: Sequence[Parsed]) -> tuple[str, list[list[str]]]:
    found: list[list[str]] = []
    for delta in (delta for part in parts for delta in part.calls):
        if delta.name is not None:
            assert delta.index == len(found)
            found.append([delta.name, ""])
        assert delta.index == len(found) - 1
        found[-1][1] += delta.arguments
    return "".join(part.content for part in parts), found


def cuts(data: st.DataObject, text: str) -> list[int]:
    return sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))


def as_json(call: Call, key: str = "arguments", **options: Any) -> str:
    return json.dumps({"name": call[0], key: call[1]}, **options)


def hermes(told: list[Call]) -> str:
    return "\n".join(f"<tool_call>\n{as_json(call)}\n</tool_call>" for call in told)


def llama(told: list[Call]) -> str:
    return "; ".join(as_json(call, "parameters", ensure_ascii=False) for call in told)


def mistral(told: list[Call]) -> str:
    return "[TOOL_CALLS]" + json.dumps([{"name": name, "arguments": given} for name, given in told])


def mistral_by_name(told: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}" for name, given in told)


def pythonic(told: list[Call]) -> str:
    return "[" + ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in given.items())})" for n, given in told) + "]"


def a_list(told: list[Call]) -> str:
    return json.dumps([{"name": name, "parameters": given} for name, given in told], indent=1)


WRITTEN: list[tuple[str, Callable[[], ToolParser], Callable[[list[Call]], str]]] = [
    ("hermes", TOOL_FORMATS["hermes"].make, hermes),
    ("llama3_json", TOOL_FORMATS["llama3_json"].make, llama),
    ("llama3_json with its tag", TOOL_FORMATS["llama3_json"].make, lambda told: "<|python_tag|>" + llama(told)),
    ("mistral", TOOL_FORMATS["mistral"].make, mistral),
    ("mistral by name", TOOL_FORMATS["mistral"].make, mistral_by_name),
    ("pythonic", TOOL_FORMATS["pythonic"].make, pythonic),
    ("a list", ListParser, a_list),
]
EACH = pytest.mark.parametrize(("make", "write"), [row[1:] for row in WRITTEN], ids=[row[0] for row in WRITTEN])


@EACH
@settings(max_examples=40)
@given(told=calls, data=st.data())
def test_calls_are_what_was_written(
    make: Callable[[], ToolParser], write: Callable[[list[Call]], str], told: list[Call], data: st.DataObject
) -> None:
    text = write(told)
    assert read(make(), text, cuts(data, text)) == ("", told)


@pytest.mark.parametrize("name", TOOL_FORMATS)
@given(text=words, data=st.data())
@example(text='{"name": 5', data=None)
@example(text="[f(x)]", data=None)
def test_text_without_calls_is_content(name: str, text: str, data: st.DataObject | None) -> None:
    content, told = read(TOOL_FORMATS[name].make(), text, [] if data is None else cuts(data, text))
    assert told == [] or name in ("pythonic", "llama3_json")
    if not told:
        assert content == text or name == "llama3_json"
        assert content.strip() == text.strip()


@given(before=words, told=calls, data=st.data())
def test_content_before_hermes_calls_is_told(before: str, told: list[Call], data: st.DataObject) -> None:
    text = before + hermes(told)
    content, got = read(TOOL_FORMATS["hermes"].make(), text, cuts(data, text))
    assert (content, got) == (before.rstrip(), told)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>no JSON</tool_call> and on",
        '<tool_call>{"arguments": {}}</tool_call>',
        "say <tool_call>",
        "a < b <too",
        "[TOOL_CALLS] nothing here",
    ],
)
@given(data=st.data())
def test_what_turns_out_to_be_no_call_is_content(text: str, data: st.DataObject) -> None:
    make = TOOL_FORMATS["mistral" if "[" in text else "hermes"].make
    content, told = read(make(), text, cuts(data, text))
    assert told == []
    assert content.split() == text.split()


def test_a_calls_name_is_told_before_its_arguments_are_complete() -> None:
    parser = TOOL_FORMATS["hermes"].make()
    told = [parser.push(piece) for piece in ('<tool_call>{"name": "f"', ', "arguments": {"a', '": 1}', "}</tool_call>")]
    assert [[(delta.name, delta.arguments) for delta in part.calls] for part in told] == [
        [("f", "")],
        [(None, '{"a')],
        [(None, '": 1}')],
        [],
    ]


def test_a_call_that_breaks_off_keeps_what_was_told() -> None:
    parser = TOOL_FORMATS["hermes"].make()
    parts = [parser.push('<tool_call>{"name": "f", "arguments": {"a": '), parser.flush()]
    assert "".join(part.content for part in parts) == ""
    assert [delta.arguments for part in parts for delta in part.calls] == ['{"a": ']


def test_arguments_before_the_name_and_as_text() -> None:
    swapped = '<tool_call>{"arguments": {"a": [1]}, "name": "f"}</tool_call>'
    assert read(TOOL_FORMATS["hermes"].make(), swapped, [20, 30]) == ("", [("f", {"a": [1]})])
    as_text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert read(TOOL_FORMATS["hermes"].make(), as_text, [35, 45]) == ("", [("f", {"a": 1})])
    without = '<tool_call>{"name": "f"}</tool_call>'
    assert read(TOOL_FORMATS["hermes"].make(), without, []) == ("", [("f", {})])


def test_the_arguments_of_a_named_function_are_the_whole_text() -> None:
    assert read(ArgumentsParser("f"), '{"a": 1}', [3]) == ("", [("f", {"a": 1})])


HALF = r"\ud83d"
SURROGATES = [
    ("pythonic", rf'[f(x="{HALF}\ude00")]', ("f", {"x": "😀"})),
    ("pythonic", f'[f(x="a{HALF}")]', ("f", {"x": "a\ufffd"})),
    ("hermes", f'<tool_call>{{"name": "f{HALF}", "arguments": {{}}}}</tool_call>', ("f\ufffd", {})),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": "[\\"{HALF}\\"]"}}</tool_call>', ("f", ["\ufffd"])),
    ("llama3_json", rf'{{"name": "f{HALF}\ude00", "parameters": {{}}}}', ("f😀", {})),
]


@pytest.mark.parametrize(("name", "text", "call"), SURROGATES)
@given(data=st.data())
def test_escaped_surrogates_become_characters(name: str, text: str, call: Call, data: st.DataObject) -> None:
    content, told = read(TOOL_FORMATS[name].make(), text, cuts(data, text))
    assert (content, told) == ("", [call])
    json.dumps(told, ensure_ascii=False).encode()


FRAGMENTS = {
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": [1]}}', " ", "\n", "tail", "{", "<"],
    "llama3_json": ["<|python_tag|>", '{"name": "f", "parameters": {"a": [1]}}', ";", " ", "tail", "{"],
    "mistral": ["[TOOL_CALLS]", '[{"name": "f", "arguments": {}}]', 'f[ARGS]{"a": 1}', "{}", ",", " ", "tail", "["],
    "pythonic": [
        "<|python_start|>",
        "<|python_end|>",
        "[f(x=1)]",
        "[f(x=')]'), g()]",
        "[f(1)]",
        " ",
        "\n",
        "tail",
        "<|",
    ],
}


@pytest.mark.parametrize(
    ("name", "text", "cut"),
    [
        ("llama3_json", "<|python_tag|> <|python_tag|>", 15),
        ("mistral", "[TOOL_CALLS]{}[TOOL_CALLS][TOOL_CALLS]", 13),
    ],
)
def test_marks_with_no_call_behind_are_content_however_they_come(name: str, text: str, cut: int) -> None:
    make = TOOL_FORMATS[name].make
    assert raw(make(), text, [cut]) == raw(make(), text, [])


@pytest.mark.parametrize("name", TOOL_FORMATS)
@given(data=st.data())
@settings(max_examples=150)
def test_an_answer_is_the_same_however_it_is_cut(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS[name]), max_size=8)))
    make = TOOL_FORMATS[name].make
    assert raw(make(), text, cuts(data, text)) == raw(make(), text, [])


BEHIND = [
    ("<|python_start|>[f(x=1)]<|python_end|>", ""),
    ("[f(x=1)]\n<|python_end|>\n", ""),
    ("[f(x=1)] and", "and"),
    ("[f(x=1)]<|python_end|> and <|python_end|>", "and <|python_end|>"),
    ("[f(x=1)] <|python", "<|python"),
]


@pytest.mark.parametrize(("text", "content"), BEHIND)
@given(data=st.data())
def test_text_behind_pythonic_calls_is_content(text: str, content: str, data: st.DataObject) -> None:
    assert read(TOOL_FORMATS["pythonic"].make(), text, cuts(data, text)) == (content, [("f", {"x": 1})])


def test_space_behind_a_hermes_call_parts_words() -> None:
    text = 'a <tool_call>{"name": "f"}</tool_call> tail'
    for where in ([], [len(text) - 5], list(range(len(text)))):
        assert read(TOOL_FORMATS["hermes"].make(), text, where) == ("a tail", [("f", {})])


UNMARKED = [
    ("llama3_json", '{"name": "text", "population": 7}', "<|python_tag|>", [("text", {})]),
    ("pythonic", "[point(x=1), f(y=2)]", "<|python_start|>", [("point", {"x": 1}), ("f", {"y": 2})]),
]


@pytest.mark.parametrize(("name", "text", "tag", "called"), UNMARKED)
@given(data=st.data())
def test_what_names_no_tool_is_content_unless_a_tag_says_that_it_is_a_call(
    name: str, text: str, tag: str, called: list[Call], data: st.DataObject
) -> None:
    make = TOOL_FORMATS[name].make
    assert read(make({"f"}), text, cuts(data, text)) == (text, [])
    assert read(make({"f", *dict(called)}), text, cuts(data, text)) == ("", called)
    assert read(make({"f"}), tag + text, cuts(data, tag + text)) == ("", called)


def test_a_call_behind_one_that_broke_off_has_a_number_of_its_own() -> None:
    parser = TOOL_FORMATS["mistral"].make()
    text = '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, 5[TOOL_CALLS][{"name": "g", "arguments": {}}]'
    parts = [parser.push(text), parser.flush()]
    assert [(delta.name, delta.index) for part in parts for delta in part.calls if delta.name] == [("f", 0), ("g", 1)]
