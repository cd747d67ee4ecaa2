"""Plugin of pytest for `make simulate`: a test fails when a rule of CUDA was broken while it ran."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from gpu import simulator

NOT_SIMULATED = {
    "test_words_are_those_of_torchs_packing_kernel": "the kernel is computed by what it is compared with",
    "test_paths_on_cuda[dtype1": "Triton's interpreter cannot multiply bfloat16",
}
"""Part of a test's name -> why it says nothing here."""


def pytest_configure() -> None:
    if not simulator.loaded():
        raise pytest.UsageError("gpu.simulation.plugin is for the simulated CUDA driver: run `make simulate`")


def pytest_report_header() -> str:
    schedule, devices = os.environ.get("SIMCUDA_SCHED", "lazy"), os.environ.get("SIMCUDA_DEVICES", "1")
    return f"simulated CUDA: schedule {schedule}, devices {devices}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for part, reason in NOT_SIMULATED.items():
            if part in item.name:
                item.add_marker(pytest.mark.skip(reason=f"not simulated: {reason}"))


@pytest.fixture(autouse=True)
def no_rule_of_cuda_is_broken() -> Iterator[None]:
    """What a test breaks on purpose it clears itself."""
    yield
    broken = simulator.violations()
    simulator.clear()
    if broken:
        pytest.fail(f"simulated CUDA: {len(broken)} violations\n" + "\n".join(broken[:6]), pytrace=False)
