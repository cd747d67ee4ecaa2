"""Budgets against what a device has, and what a container leaves of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic
from elastic.config import Place
from elastic.errors import CapacityError, ConfigError
from elastic.memory import places
from elastic.memory.backends.cgroup import memory_left, memory_limit
from elastic.memory.backends.memfd import MemfdBackend
from elastic.memory.places import close_place, free_bytes, open_place, require_memory, total_bytes
from support.architectures import build

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


@pytest.mark.parametrize("architecture", ["qwen3", "llama-gqa"])
@pytest.mark.parametrize("budget", [0, 65536, 262144])
def test_a_budget_that_is_too_small_names_the_least_that_suffices(budget: int, architecture: str, wrapped: Any) -> None:
    model = build(architecture)
    with pytest.raises(CapacityError, match="place cpu#small is too small for this model") as refused:
        elastic.wrap(model, places=[f"cpu#small={budget}"])
    told = re.search(r"at least ([\d,]+) bytes in pages of ([\d,]+)", str(refused.value))
    assert told is not None
    least, page = (int(number.replace(",", "")) for number in told.groups())
    with pytest.raises(CapacityError, match=f"at least {least:,} bytes"):
        elastic.wrap(model, places=[f"cpu#small={least - page}"])
    assert wrapped(model, [f"cpu#small={least}"]).elastic.status().places[0].budget_bytes == least


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (0, "page_bytes of place cpu#odd=0 cannot be; it must be whole bytes above 0, a multiple of 4096 on a CPU"),
        (1, "page_bytes=1 must be a multiple of 4096 on place cpu#odd; give 4096"),
        (5120, "page_bytes=5120 must be a multiple of 4096 on place cpu#odd; give 8192"),
    ],
)
def test_a_page_size_that_cannot_be_names_one_that_can(page: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        elastic.wrap(build("llama-gqa"), places=[f"cpu#odd=8MiB/{page}"])
    with pytest.raises(ConfigError, match=f"page_bytes={page} must be a multiple of 4096"):
        MemfdBackend(page)


def test_a_place_may_have_a_longer_name_than_the_system_gives_a_memory_file() -> None:
    pool = open_place(Place.parse(f"cpu#{'x' * 300}=1MiB"))
    assert len(pool.name) == 304
    close_place(pool)


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


@pytest.mark.parametrize(
    ("listed", "files", "left"),
    [
        ("0::/a\n", {"a/memory.max": "900", "a/memory.current": "500", "a/memory.stat": "inactive_file 30\n"}, 430),
        ("0::/a\n", {"a/memory.max": "900", "memory.max": "700", "memory.current": "650"}, 50),
        ("0::/a\n", {"a/memory.max": "900"}, 900),
        ("0::/a\n", {"a/memory.max": "900", "a/memory.current": "950"}, 0),
        (
            "4:memory:/\n",
            {
                "memory/memory.limit_in_bytes": "90",
                "memory/memory.usage_in_bytes": "80",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 70",
            },
            80,
        ),
    ],
)
def test_what_a_group_has_in_use_is_not_free(listed: str, files: dict[str, str], left: int, tmp_path: Path) -> None:
    groups(tmp_path, listed, files)
    assert memory_left(tmp_path / "cgroup", tmp_path / "mount") == left


def test_places_of_one_device_that_have_no_budget_share_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "free_bytes", lambda device: 64 << 20)
    model = build("llama-gqa")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    elastic.wrap(model, places=["cpu#a", "cpu#b", "cpu#c=1MiB"])
    try:
        a, b, _ = (pool.budget_pages * pool.page_bytes for pool in model.elastic.pools)
        assert abs(a - weights - (16 << 20)) <= 4 << 20
        assert abs(b - (16 << 20)) <= 4 << 20
    finally:
        elastic.unwrap(model)


def test_without_groups_there_is_no_bound(tmp_path: Path) -> None:
    assert memory_limit(tmp_path / "nowhere", tmp_path) is None
