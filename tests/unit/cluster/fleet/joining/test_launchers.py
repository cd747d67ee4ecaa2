"""What may start the ranks of a fleet, and what is told where that goes wrong."""

from __future__ import annotations

from typing import Any

import pytest

from elastic import ConfigError
from elastic.cluster.fleet.fleet import Fleet
from support.cluster.fake_rank import FakeLauncher


class NoLauncher:
    name = "none"

    def start(self, spec: object) -> None:
        """There is no `close`."""


@pytest.mark.parametrize("launch", [None, 5, NoLauncher(), "threads"])
def test_what_is_no_launcher_is_refused_in_words(launch: Any) -> None:
    with pytest.raises(ConfigError, match=r"launch=.* must be one of local, in-process, ray, or a"):
        Fleet("no model", launch=launch)


def test_an_error_of_a_start_is_told_also_where_its_end_fails() -> None:
    def make(_: object) -> Any:
        raise ConfigError("there is no such model")

    launcher = FakeLauncher(make)
    fleet, close = Fleet("no model", launch=launcher), launcher.close

    def fail() -> None:
        raise RuntimeError("it cannot be closed")

    launcher.close = fail  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="no such model") as told:
        fleet.start()
    assert "it cannot be closed" in told.value.__notes__[0]
    launcher.close = close  # type: ignore[method-assign]
    fleet.stop()
    assert launcher.closed
