from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from types import ModuleType

import pytest

from elastic.memory.pages.background import janitor
from gpu import simulator as simulated
from support.child_process import wait_for_the_janitor


@pytest.fixture
def simulator(no_violations: ModuleType | None) -> ModuleType:
    """The simulated driver, for what tests ask of it. The test is skipped on a real one."""
    if no_violations is None:
        pytest.skip("the driver is not simulated")
    return no_violations


@pytest.fixture
def no_violations() -> Iterator[ModuleType | None]:
    """The simulated driver, where there is one, which is to report no violation of the test.

    Pages that earlier tests left are given back before: tests count calls of the driver.
    """
    if not simulated.loaded():
        yield None
        return
    gc.collect()
    janitor.start()
    wait_for_the_janitor()
    simulated.clear()
    yield simulated
    simulated.schedule(os.environ.get("SIMCUDA_SCHED", "lazy"))
    assert simulated.violations() == []
