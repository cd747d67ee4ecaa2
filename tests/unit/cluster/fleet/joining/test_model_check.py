"""Ranks with another model are refused, and told what differs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic import ConfigError
from elastic.cluster.control.messages import ModelFacts
from elastic.cluster.fleet.joining.model_check import require_same_model

KNOWN = ModelFacts((1, 2, 3), 4, 100, 512, (0,), ("int4",))


def test_the_same_model_is_taken() -> None:
    require_same_model("r1", replace(KNOWN), KNOWN)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"digests": (1, 9, 3)}, "weights of its layer 1 are others"),
        ({"digests": (1, 2)}, "2 layers, the fleet's 3"),
        ({"fixed_digest": 5}, "embedding, norm or head"),
        ({"vocabulary": 99}, "99 tokens, the fleet's 100"),
        ({"variants": ()}, "variants"),
        ({"longest": 9}, "longest text is 9"),
        ({"end_tokens": (1,)}, r"end tokens are \(1,\)"),
    ],
)
def test_another_one_is_refused_in_words(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        require_same_model("r1", replace(KNOWN, **change), KNOWN)
    assert "'r1' is refused" in str(caught.value)
