"""Room that ranks by themselves keep: whether any may is asked once at a look."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic.cluster.fleet.groups.caps.staging import Staging

NAMES = ("r0", "r1", "r2")


@pytest.mark.parametrize(("tight", "kept"), [(False, dict.fromkeys(NAMES, 7)), (True, {})])
def test_all_keep_room_or_none_by_one_look_at_the_queue(
    tight: bool, kept: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, int | None]] = []
    asked: list[int] = []
    ranks: Any = SimpleNamespace(serving=lambda: [SimpleNamespace(name=name) for name in NAMES], set_caps=told.append)
    staging = Staging(ranks)

    def is_tight(_: Staging) -> bool:
        asked.append(1)
        return tight

    monkeypatch.setattr(Staging, "_is_tight", is_tight)
    monkeypatch.setattr(Staging, "_cap_of", lambda *_: 7)
    staging.keep(NAMES)
    assert staging.caps == kept
    assert told == ([kept] if kept else [])
    assert len(asked) == 1
