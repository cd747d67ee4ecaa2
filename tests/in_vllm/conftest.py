"""Tests of elastic in vLLM: they need a venv of their own (`make test-vllm`), and are left out without vLLM."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM has a venv of its own: make test-vllm")

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let vLLM and what it imports warn."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Let an engine live for a module; `elastic_engine` sees to it that its places are closed."""


@pytest.fixture(scope="session")
def reference() -> list[list[int]]:
    """Tokens of vLLM without elastic, 200 of each text."""
    from support.vllm_engine.engine import TEXTS, plain_engine, run

    with plain_engine() as llm:
        return run(llm, [200] * len(TEXTS))
