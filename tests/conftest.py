from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs this may have it ignored, by children too
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of children: more threads than cores wait for each other busily
torch.set_num_threads(1)
settings.register_profile(
    "untimed", settings(), deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("quick", settings.get_profile("untimed"), max_examples=10, stateful_step_count=20)
settings.load_profile("untimed")  # a busy machine is no failure

import poison  # noqa: E402

poison.install()

import elastic  # noqa: E402
from elastic.memory import places  # noqa: E402
from support.isolation.leftovers import close_leftovers  # noqa: E402

FAILED = pytest.StashKey[bool]()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="few hypothesis examples, and no test marked slow")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--quick"):
        settings.load_profile("quick")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


def pytest_collection_finish() -> None:
    """What was imported stays: the collection after each test need not look through it again."""
    gc.freeze()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return "cuda:0" if request.param == "cuda" else "cpu"


@pytest.fixture(autouse=True, scope="module")
def only_new_objects_are_collected() -> Iterator[None]:
    """What a module has imported stays too: without this, collections are two fifths of the suite's time."""
    yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Note at a test whether it failed, before its fixtures end."""
    report = yield
    item.stash[FAILED] = report.failed or item.stash.get(FAILED, False)
    return report


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test closes what it opened; what one leaves is closed here, so that only itself fails for it.

    One that has failed already cannot be blamed for what it did not come to close.
    """
    yield
    if places._open or not request.config.getoption("--quick"):
        gc.collect()
    left = close_leftovers()
    assert not left or request.node.stash.get(FAILED, False), f"places still open: {left}"


def small_places(device: torch.device) -> list[elastic.Place]:
    """Memory for a tiny model; the pages of a GPU have the size that its driver wants."""
    if device.type == "cpu":
        return [elastic.Place("cpu", device, 64 << 20, page_bytes=4096)]
    return [elastic.Place(str(device), device, 1 << 30)]


@pytest.fixture
def wrapped() -> Iterator[Any]:
    """wrap(model, **options), unwrapped when the test ends."""
    models: list[Any] = []

    def wrap(model: Any, places: Any = None, **options: Any) -> Any:
        device = next(model.parameters()).device
        models.append(elastic.wrap(model, places=places or small_places(device), **options))
        return model

    yield wrap
    for model in models:
        if getattr(model, "elastic", None) is not None:
            model.elastic.check()
            elastic.unwrap(model)


@pytest.fixture(scope="session")
def launcher() -> Iterator[Any]:
    """Starts ranks as processes, from one fork server for all tests: it imports torch and transformers once."""
    from support.cluster.shared_launcher import SharedLauncher

    shared = SharedLauncher(2)
    yield shared
    shared.end()


@pytest.fixture
def assets() -> Any:
    """The trained model that ships with Elastic, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from elastic.assets import MODEL_DIR

    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval().requires_grad_(False)
    return model, AutoTokenizer.from_pretrained(MODEL_DIR)
