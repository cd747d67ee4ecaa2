"""Parameters are read from files run by run: the same bytes and checksums as of the whole, in any piece."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from elastic.memory.checkpoint_file import Checkpoint
from elastic.memory.checksum import RunningDigest, digest
from elastic.weights.shards import stored
from elastic.weights.shards.stored import StoredParameter, find_stored


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=6))
@settings(max_examples=20)
def test_a_checksum_is_the_same_however_bytes_come(counts: list[int]) -> None:
    data = torch.randint(256, (sum(counts),), dtype=torch.uint8)
    running = RunningDigest()
    for part in data.split(counts):
        running.update(part)
    assert running.value == digest(data)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
    """A file with a matrix of a narrower dtype, and one whose experts are apart."""
    matrix = torch.randn(60, 70).to(torch.bfloat16)
    gate, up = torch.randn(3, 20, 30), torch.randn(3, 20, 30)
    apart = {f"e.{i}.{name}": of[i].clone() for i in range(3) for name, of in (("gate", gate), ("up", up))}
    save_file({"matrix": matrix, **apart}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    checkpoint.blocks["experts"] = [
        (f"e.{i}.{name}", (i, 20 * j, 0)) for i in range(3) for j, name in enumerate(("gate", "up"))
    ]
    return checkpoint, {"matrix": matrix.float(), "experts": torch.cat((gate, up), 1)}


def found(checkpoint: Checkpoint, name: str, like: torch.Tensor) -> StoredParameter:
    parameter = find_stored(checkpoint, name, like.shape, like.dtype)
    assert parameter is not None
    return parameter


@pytest.mark.parametrize("name", ["matrix", "experts"])
@pytest.mark.parametrize("dim", [0, 1])
def test_any_rows_are_read_piece_by_piece(files: Any, name: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "CHUNK_BYTES", 500)
    checkpoint, expected = files
    whole = expected[name]
    parameter = found(checkpoint, name, whole)
    assert torch.equal(parameter.whole(), whole)
    inside = find_stored(checkpoint, f"base_model.model.{name}", whole.shape, whole.dtype)
    assert inside == parameter, "a model inside an adapter has longer names"
    assert parameter.digest() == digest(whole)
    for rows in (range(1), range(1, whole.shape[dim] - 1), range(whole.shape[dim])):
        of = whole.narrow(dim, rows.start, len(rows))
        target = torch.full(of.shape, torch.nan)
        parameter.read(target, dim, rows)
        assert torch.equal(target, of)
        turned = torch.full(of.movedim(dim, 0).shape, torch.nan)
        parameter.read(turned.movedim(0, dim), dim, rows)
        assert torch.equal(turned.movedim(0, dim), of)
        assert parameter.digest(dim, rows) == digest(of.movedim(dim, 0))


def test_what_is_not_there_as_it_should_be_is_not_found(files: Any) -> None:
    checkpoint, _ = files
    assert find_stored(None, "matrix", (60, 70), torch.float32) is None
    assert find_stored(checkpoint, "other", (60, 70), torch.float32) is None
    assert find_stored(checkpoint, "matrix", (70, 60), torch.float32) is None
    assert find_stored(checkpoint, "matrix", (60, 70), torch.float16) is None, "not all of its values"
    checkpoint.blocks["experts"].pop()
    assert find_stored(checkpoint, "experts", (3, 40, 30), torch.float32) is None
