from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.cluster.shared_launcher import SharedLauncher


@pytest.fixture(scope="session")
def launcher() -> Iterator[SharedLauncher]:
    """Of two ranks at first."""
    one = SharedLauncher(2)
    yield one
    one.end()
