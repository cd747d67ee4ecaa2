from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from types import ModuleType

import pytest

from elastic.memory.background import janitor
from gpu import simulator as simulated
from support.child_process import wait_for_the_janitor


@pytest.fixture
def simulator() -> Iterator[ModuleType]:
    """The simulated driver, with no violations yet. The test is skipped on a real one.

    Pages that earlier tests left are given back before: tests count calls of the driver.
    """
    if not simulated.loaded():
        pytest.skip("the driver is not simulated")
    gc.collect()
    janitor.start()
    wait_for_the_janitor()
    simulated.clear()
    yield simulated
    simulated.schedule(os.environ.get("SIMCUDA_SCHED", "lazy"))
    assert simulated.violations() == []
