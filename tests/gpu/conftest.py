from __future__ import annotations

import os
from collections.abc import Iterator
from types import ModuleType

import pytest

from gpu import simulator as simulated


@pytest.fixture
def simulator() -> Iterator[ModuleType]:
    """The simulated driver, with no violations yet. The test is skipped on a real one."""
    if not simulated.loaded():
        pytest.skip("the driver is not simulated")
    simulated.clear()
    yield simulated
    simulated.schedule(os.environ.get("SIMCUDA_SCHED", "lazy"))
    assert simulated.violations() == []
