"""Budgets against what a device has, and what a container leaves of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import elastic
from elastic.config import Place
from elastic.errors import ConfigError
from elastic.memory.backends.cgroup import memory_limit
from elastic.memory.places import free_bytes, require_memory, total_bytes

CPU = torch.device("cpu")


def test_a_budget_above_the_memory_is_refused_with_both_numbers() -> None:
    total = total_bytes(CPU)
    require_memory([Place("cpu", CPU, total)])
    with pytest.raises(ConfigError, match=f"budgets of {total + 1:,} bytes together; cpu has {total:,}"):
        require_memory([Place("cpu", CPU, total + 1)])


def test_budgets_on_one_device_count_together() -> None:
    total = total_bytes(CPU)
    with pytest.raises(ConfigError, match=r"places=\['cpu#a', 'cpu#b'\] have budgets of"):
        require_memory([Place("cpu#a", CPU, total), Place("cpu#b", CPU, 1)])


def test_wrap_refuses_it_with_the_model_as_it_was(assets: Any) -> None:
    model, _ = assets
    with pytest.raises(ConfigError, match="cpu has"):
        elastic.wrap(model, places=["cpu=900TiB"])
    assert not hasattr(model, "elastic")


def test_no_more_is_free_than_there_is() -> None:
    assert 0 < free_bytes(CPU) <= total_bytes(CPU)


def test_a_budget_is_whole_bytes() -> None:
    for wrong in (-1, 1.5, "1GiB", True):
        with pytest.raises(ConfigError, match="budget of place cpu="):
            Place("cpu", CPU, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", ["9" * 400 + "GiB", "9" * 5000, 2**63, "8388608TiB"])
def test_a_size_that_no_machine_has_is_no_size(size: int | str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        elastic.Place.parse(f"cpu={size}")


def groups(tmp_path: Path, listed: str, limits: dict[str, str]) -> int | None:
    own, mount = tmp_path / "cgroup", tmp_path / "mount"
    own.write_text(listed)
    for file, text in limits.items():
        (mount / file).parent.mkdir(parents=True, exist_ok=True)
        (mount / file).write_text(text)
    return memory_limit(own, mount)


@pytest.mark.parametrize(
    ("listed", "limits", "limit"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "1000\n", "memory.max": "5000\n"}, 1000),
        ("0::/a/b\n", {"a/b/memory.max": "max\n"}, None),
        ("0::/of/the/host\n", {"memory.max": "77\n"}, 77),
        (
            "4:cpu,memory:/a\n0::/\n",
            {"memory/a/memory.limit_in_bytes": "9\n", "memory/memory.limit_in_bytes": "12\n"},
            9,
        ),
        ("3:cpu:/a\n", {"memory/memory.limit_in_bytes": "12\n"}, None),
    ],
)
def test_the_lowest_bound_of_the_groups_is_found(
    listed: str, limits: dict[str, str], limit: int | None, tmp_path: Path
) -> None:
    assert groups(tmp_path, listed, limits) == limit


def test_without_groups_there_is_no_bound(tmp_path: Path) -> None:
    assert memory_limit(tmp_path / "nowhere", tmp_path) is None
