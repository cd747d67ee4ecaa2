"""Tests of fleets on Ray: they need a venv of their own (`make test-ray`), and are left out without Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="Ray has a venv of its own: make test-ray")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let Ray and what it imports warn."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session", autouse=True)
def cluster() -> Iterator[None]:
    """Ray on this machine, with more CPUs than it has: ranks of a tiny model need little."""
    ray.init(num_cpus=6, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=True)
    yield
    ray.shutdown()
