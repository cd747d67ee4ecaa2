"""A user's own connector that copies blocks in and out of the KV cache, whose pages come and go beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import elastic.vllm
from support.vllm_engine.copying_connector import BLOCK, CopyingConnector
from support.vllm_engine.engine import (
    LONG_TEXTS,
    come_back,
    coordinator,
    counted_preemptions,
    elastic_engine,
    plain_engine,
    run,
    sector_bytes,
)

THEIRS = {
    "kv_connector": "CopyingConnector",
    "kv_connector_module_path": CopyingConnector.__module__,
    "kv_role": "kv_both",
}
LENGTHS = [60] * len(LONG_TEXTS)


def generate(llm: Any, **options: Any) -> list[list[int]]:
    return run(llm, LENGTHS, texts=LONG_TEXTS, **options)


def full_blocks(llm: Any, texts: Sequence[str] = LONG_TEXTS) -> int:
    return sum((len(llm.get_tokenizer().encode(text)) - 1) // BLOCK for text in texts)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    with plain_engine() as llm:
        return generate(llm)


@pytest.fixture
def llm(plain: list[list[int]]) -> Iterator[Any]:
    CopyingConnector.kept.clear()
    CopyingConnector.loaded = 0
    with elastic_engine("20MiB", connector=THEIRS) as engine:
        yield engine


def test_what_it_copied_is_used_while_sectors_come_and_go(llm: Any, plain: list[list[int]]) -> None:
    rt = elastic.vllm.runtime(llm)

    def change(step: int) -> None:
        if step % 12 == 2:
            rt.kv.resize(3 * sector_bytes(llm))
        elif step % 12 == 6:
            rt.release([1, 3])
        elif step % 12 == 9:
            rt.kv.resize("max")
            rt.restore()
        coordinator(llm).capacity.check()

    with counted_preemptions(llm) as preempted:
        assert generate(llm) == plain
        assert CopyingConnector.loaded == 0
        assert generate(llm) == plain
        assert CopyingConnector.loaded == full_blocks(llm)
        rt.release([2])
        for _ in range(3):
            assert generate(llm, each_step=change) == plain
    assert CopyingConnector.loaded == 4 * full_blocks(llm)
    assert preempted == []
    rt.kv.resize("max")
    rt.check()


def test_it_finds_nothing_that_other_weights_computed(llm: Any, plain: list[list[int]]) -> None:
    rt = elastic.vllm.runtime(llm)
    assert generate(llm) == plain
    rt.swap(range(6), "int4")
    packed = generate(llm)
    assert packed != plain
    assert CopyingConnector.loaded == 0
    assert generate(llm) == packed
    assert CopyingConnector.loaded == full_blocks(llm)
    rt.restore()
    come_back(rt)
    assert generate(llm) == plain
    assert CopyingConnector.loaded == 2 * full_blocks(llm)
    rt.check()
