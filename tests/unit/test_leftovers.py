"""What a test leaves open does not have the tests after it fail."""

from __future__ import annotations

import pytest

import elastic
from elastic import StateError
from elastic.engines.continuous import ContinuousEngine
from elastic.memory import places
from support import architectures
from support.isolation.leftovers import close_leftovers
from support.wrapped_model import small


def test_what_serves_ends_and_its_places_can_be_opened_anew() -> None:
    model = architectures.build("llama-gqa")
    elastic.wrap(model, places=small(2 << 20))
    engine = ContinuousEngine(model)
    engine.start()
    places.open_place(small(1 << 20, "cpu#left"))
    assert sorted(close_leftovers()) == ["cpu", "cpu#left"]
    assert not hasattr(model, "elastic")
    with pytest.raises(StateError, match="stopped"):
        engine.start()
    elastic.wrap(model, places=small(4 << 20))
    elastic.unwrap(model)
    assert close_leftovers() == []
