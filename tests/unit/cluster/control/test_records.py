"""Records of other processes are taken whole, or refused in words that name the field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest

from elastic.cluster.control.connection import queue_pair
from elastic.cluster.control.messages import Hello, Refused
from elastic.cluster.control.records import require_record
from elastic.cluster.launch.base import await_hello
from elastic.errors import StateError
from support.cluster.fake_rank import FakeRank


@dataclass(frozen=True)
class Inner:
    seconds: float
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer:
    count: int
    kind: Literal["a", "b"]
    inner: Inner | None = None
    pair: tuple[int, str] = (0, "")
    pages: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


class Unlike:
    """Raises whatever is asked of it, as an array does for its truth."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise ValueError("it has no words")


WHOLE = Outer(1, "a", Inner(1, ("x", "y")), (2, "z"), {3: (4,)})


@pytest.mark.parametrize("record", [WHOLE, replace(WHOLE, inner=None), FakeRank("r0").hello])
def test_what_is_whole_is_taken(record: Any) -> None:
    assert require_record(record, Refused, type(record)) is record


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (replace(WHOLE, count="1"), r"Outer.count of '1'"),
        (replace(WHOLE, count=True), r"Outer.count of True"),
        (replace(WHOLE, count=1.0), r"Outer.count of 1.0"),
        (replace(WHOLE, kind="c"), r"Outer.kind of 'c'"),
        (replace(WHOLE, kind=[]), r"Outer.kind of \[\]"),
        (replace(WHOLE, kind=Unlike()), r"Outer.kind of <Unlike instance at"),
        (replace(WHOLE, inner=Unlike()), r"Outer.inner of <Unlike instance at"),
        (replace(WHOLE, inner=5), r"Outer.inner of 5"),
        (replace(WHOLE, inner=Inner(1, ("x", 2))), r"Outer.inner.names\[1\] of 2"),  # type: ignore[arg-type]
        (replace(WHOLE, inner=Inner(None)), r"Outer.inner.seconds of None"),  # type: ignore[arg-type]
        (replace(WHOLE, pair=(1,)), r"Outer.pair of 1 parts"),
        (replace(WHOLE, pages={3: (None,)}), r"Outer.pages\[0\] of None"),
        (replace(WHOLE, pages={"3": ()}), r"Outer.pages of '3'"),
        (Outer.__new__(Outer), r"Outer.count of nothing"),
        ("GET /", r"it began with a str; it must be another program"),
    ],
)
def test_what_is_not_whole_is_refused_by_the_name_of_the_field(wrong: object, words: str) -> None:
    with pytest.raises(StateError, match=words):
        require_record(wrong, Outer)


def test_a_launcher_says_which_rank_began_with_something_else() -> None:
    ours, theirs = queue_pair()
    theirs.send("GET /")
    with pytest.raises(StateError, match="rank 'r7' began with a str; it must be another program"):
        await_hello(ours, None, "r7", timeout_s=60)


def test_a_hello_of_another_version_is_refused() -> None:
    hello = FakeRank("r0").hello
    with pytest.raises(StateError, match=r"a Hello.kv of None; install the same version of elastic on both sides"):
        require_record(replace(hello, kv=None), Hello)  # type: ignore[arg-type]
