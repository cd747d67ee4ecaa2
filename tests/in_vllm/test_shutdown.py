"""An engine that has ended has left nothing in the process that another could trip over."""

from __future__ import annotations

import gc
import tempfile
from collections import Counter
from pathlib import Path

import pytest

import elastic.vllm
from support.vllm_engine.engine import elastic_engine, run, side, wait_for


def elastic_mappings() -> Counter[str]:
    """Count the mappings of the pages of each engine."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return Counter(line.split()[5] for line in lines if "memfd:cpu#vllm" in line)


def test_the_kv_cache_goes_with_its_engine_and_has_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = elastic_mappings()
    with elastic_engine("64MiB") as llm:
        run(llm, [4])
        assert elastic_mappings() - before
        elastic.vllm.runtime(llm).release([1])
        assert side(llm)._wakes() > 0
        assert not list(tmp_path.glob("elastic*"))
    del llm
    gc.collect()
    wait_for(lambda: not elastic_mappings() - before)
