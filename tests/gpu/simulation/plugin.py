"""Plugin of pytest for `make simulate`: tests run under several schedules, and fail when they broke a rule of CUDA."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu import simulator
from gpu.simulation import triton_interpreter

TESTS = Path(__file__).parents[2]
NOT_SIMULATED = {
    "test_words_are_those_of_torchs_packing_kernel": "the kernel is computed by what it is compared with",
}
"""Part of a test's name -> why it says nothing here."""
ONE_SCHEDULE = (
    "gpu/quant",
    "gpu/simulation/test_rules",  # which choose schedules themselves
    "integration/test_generate.py",  # once a model is wrapped
    "unit/engines/sampling",
    "unit/memory/backends/test_base.py",
    "unit/quant",
)
"""Files and folders whose tests queue all that they do on one stream: it is in the same order under each schedule."""
LONGEST = "tests/laws/"
"""What takes minutes, and so begins first: two of them side by side would be left at the end."""
MAY_NEED_A_GPU = re.compile(r"mark\.cuda|\bdevice\b")
"""What stands in each file with tests marked `cuda`: the mark, or the fixture that has it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--schedules", default="lazy", help="under which each test runs, such as 'lazy random:1'")


def pytest_configure() -> None:
    if not simulator.loaded():
        raise pytest.UsageError("gpu.simulation.plugin is for the simulated CUDA driver: run `make simulate`")
    triton_interpreter.install()


def pytest_report_header(config: pytest.Config) -> str:
    schedules, devices = config.getoption("--schedules"), os.environ.get("SIMCUDA_DEVICES", "1")
    return f"simulated CUDA: schedules {schedules}, devices {devices}"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Import no file without tests marked `cuda`: to import all takes longer than most tests."""
    needless = collection_path.suffix == ".py" and not MAY_NEED_A_GPU.search(collection_path.read_text())
    return needless or None  # None: others decide


@pytest.hookimpl(trylast=True)  # so that names end with the schedule
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    schedules = metafunc.config.getoption("--schedules").split()
    inside = metafunc.definition.path.relative_to(TESTS).as_posix()
    one = any(inside.startswith(each) for each in ONE_SCHEDULE)
    metafunc.parametrize("cuda_schedule", schedules[:1] if one else schedules, indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for part, reason in NOT_SIMULATED.items():
            if part in item.name:
                item.add_marker(pytest.mark.skip(reason=f"not simulated: {reason}"))
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))  # one worker's, which gives what follows away


@pytest.fixture(autouse=True)
def cuda_schedule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """When queued work runs, in child processes too."""
    monkeypatch.setenv("SIMCUDA_SCHED", request.param)
    simulator.schedule(request.param)


@pytest.fixture(autouse=True)
def no_rule_of_cuda_is_broken(cuda_schedule: None) -> Iterator[None]:
    """What a test breaks on purpose it clears itself."""
    yield
    broken = simulator.violations()
    simulator.clear()
    if broken:
        pytest.fail(f"simulated CUDA: {len(broken)} violations\n" + "\n".join(broken[:6]), pytrace=False)
