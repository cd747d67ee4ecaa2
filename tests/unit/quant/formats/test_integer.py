"""The options of integer formats."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.errors import ConfigError
from elastic.quant.formats.integer import Integers


@pytest.mark.parametrize(
    "options",
    [{"bits": 4.0}, {"bits": 5}, {"group_size": 32.0}, {"group_size": 24}, {"symmetric": "no"}, {"dynamic": 1}],
)
def test_what_is_of_another_type_is_refused_by_its_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}="):
        Integers(**{"bits": 4, **options})
