"""The table of paths: never changed, saved and read back, forced; and measured without a look at the numbers."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch

from elastic import ConfigError
from elastic.quant.formats import autotune
from elastic.quant.formats.autotune import measure
from elastic.quant.formats.base import KernelTarget, MatrixShape, PackedTensors, format_of
from elastic.quant.formats.integer import Integers, round_to_nearest
from elastic.quant.formats.kernel_table import BUCKETS, KernelTable, MatmulSpec, bucket_of, default
from support.integer_matrices import pack

CONFIG, MATRIX = Integers(4, 64), MatrixShape(32, 128)
TARGET = KernelTarget.of(torch.device("cpu"))
PATHS: dict[str, Any] = {name: lambda x, parts: x for name in ("packed", "expanded", "reference")}


def parts() -> PackedTensors:
    return pack(CONFIG, round_to_nearest(torch.randn(32, 128), CONFIG), TARGET)


def product(dtype: torch.dtype = torch.float32, extras: tuple[str, ...] = ()) -> MatmulSpec:
    return MatmulSpec(CONFIG, MATRIX, extras, dtype, TARGET)


def test_tokens_go_by_the_next_larger_bucket() -> None:
    assert [bucket_of(tokens) for tokens in (0, 1, 2, 3, 9, 512, 513, 10**6)] == [1, 1, 2, 4, 16, 512, 512, 512]


def test_what_was_never_measured_goes_by_the_default() -> None:
    table = KernelTable()
    assert table.path(product(), 1, PATHS) is PATHS["packed"]
    assert table.path(product(), 1000, PATHS) is PATHS["expanded"]
    assert default({"reference": PATHS["reference"]}, 1) == "reference"


@pytest.mark.parametrize("lacking", ["compiled", "triton", "sparse"])
def test_a_path_that_another_machine_had_goes_by_the_default(lacking: str) -> None:
    table = KernelTable()
    table.add(product(), {1: lacking, 512: lacking})
    assert table.path(product(), 1, PATHS) is PATHS["packed"]
    assert table.path(product(), 512, PATHS) is PATHS["expanded"]


def test_entries_are_added_and_never_changed() -> None:
    table, other = KernelTable(), KernelTable()
    table.add(product(), {1: "reference"})
    table.add(product(), {1: "packed", 2: "expanded"})
    assert table.chosen(product()) == {1: "reference", 2: "expanded"}
    other.add(product(), {1: "packed", 4: "packed"})
    other.add(product(torch.bfloat16), {1: "packed"})
    table.merge(other)
    assert table.chosen(product()) == {1: "reference", 2: "expanded", 4: "packed"}
    assert table.chosen(product(torch.bfloat16)) == {1: "packed"}
    assert table.path(product(), 1, PATHS) is PATHS["reference"]
    assert table.only([product()]).chosen(product(torch.bfloat16)) == {}


def test_measuring_fills_what_is_missing_and_only_that() -> None:
    table = KernelTable()
    table.add(product(), {4: "reference"})
    chosen = measure(table, CONFIG, parts(), MATRIX, TARGET, torch.float32, buckets=(1, 4, 512))
    assert chosen.keys() == {1, 4, 512}
    assert chosen[4] == "reference"
    assert {chosen[1], chosen[512]} <= {"compiled", "packed", "expanded", "expanded_float32"}
    measure(table, CONFIG, parts(), MATRIX, TARGET, torch.float32)
    assert table.chosen(product()).keys() == set(BUCKETS)
    assert {bucket: table.chosen(product())[bucket] for bucket in chosen} == chosen


def test_a_table_survives_json_and_its_products_survive_pickling() -> None:
    table = KernelTable()
    table.add(product(), {1: "packed", 512: "expanded"})
    table.add(product(torch.bfloat16, ("input_scale", "order")), {8: "dynamic"})
    read = KernelTable.from_json(json.loads(json.dumps(table.to_json())))
    assert read.to_json() == table.to_json()
    assert read.chosen(product()) == {1: "packed", 512: "expanded"}
    assert pickle.loads(pickle.dumps(product())) == product()


@pytest.mark.parametrize(
    "change",
    [
        {"format": "Floats"},
        {"config": {"bits": 5}},
        {"config": {"width": 4}},
        {"dtype": "float33"},
        {"dtype": "nn"},
        {"target": {"device": "cpu"}},
        {"matrix": None},
        {"paths": {"1": "magic"}},
        {"paths": {"3": "packed"}},
        {"paths": {"one": "packed"}},
        {"paths": ["packed"]},
    ],
)
def test_a_damaged_table_is_refused(change: dict[str, Any]) -> None:
    table = KernelTable()
    table.add(product(), {1: "packed"})
    with pytest.raises(ConfigError):
        KernelTable.from_json([{**table.to_json()[0], **change}])


def test_a_path_can_be_forced_for_a_while() -> None:
    table = KernelTable()
    with table.forced("reference"):
        assert table.path(product(), 1, PATHS) is PATHS["reference"]
        with table.forced("dynamic"), pytest.raises(ConfigError, match="dynamic"):
            table.path(product(), 1, PATHS)
        assert table.path(product(), 1, PATHS) is PATHS["reference"]
    assert table.path(product(), 1, PATHS) is PATHS["packed"]
    with pytest.raises(ConfigError, match="magic"), table.forced("magic"):
        pass


def test_the_format_has_the_paths_that_a_table_may_name() -> None:
    made = format_of(CONFIG)(CONFIG, MATRIX, TARGET).paths(parts())
    table = KernelTable()
    table.add(product(), dict(zip(BUCKETS, made, strict=False)))
    assert set(table.chosen(product()).values()) == set(made)


def test_products_that_round_activations_have_to_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "elastic.quant.formats.autotune._fastest",
        lambda paths, *_: {512: "dynamic" if "dynamic" in paths else "packed"},
    )
    for dynamic, expected in ((False, "packed"), (True, "dynamic")):
        config = Integers(CONFIG.bits, CONFIG.group_size, CONFIG.symmetric, dynamic)
        assert measure(KernelTable(), config, parts(), MATRIX, TARGET, torch.float32, buckets=(512,)) == {512: expected}


def test_measuring_leaves_the_program_its_random_numbers() -> None:
    """A seed before `wrap` gives a sampled answer the same tokens, whether kernels were measured or in a file."""
    before = torch.get_rng_state()
    packed = pack(CONFIG, round_to_nearest(torch.zeros(32, 128), CONFIG), TARGET)
    measure(KernelTable(), CONFIG, packed, MATRIX, TARGET, torch.float32, buckets=(1,))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("rebinds", [False, True])
def test_parts_are_bound_before_products_are_timed_as_they_are_served(
    rebinds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Path:
        """Notes when parts are bound, and when it is called with some."""

        def __call__(self, x: torch.Tensor, parts: PackedTensors) -> torch.Tensor:
            return self.bind(parts)(x)

        def bind(self, parts: PackedTensors) -> Any:
            bound.append(timed)
            return lambda x: x

    def take(ways: dict[str, Any], *_: Any, **__: Any) -> dict[str, float]:
        nonlocal timed
        timed = True
        for _ in range(2):
            ways["packed"]()
        timed = False
        return {"packed": 1.0}

    bound, timed = list[bool](), False
    monkeypatch.setattr(autotune, "race", take)
    half = {"packed": torch.zeros(autotune.ROTATED_BYTES // 2, dtype=torch.int8)}
    autotune._fastest({"packed": Path()}, half, MATRIX, torch.float32, [1, 2], rebinds)
    assert bound == ([True] * 4 if rebinds else [False] * 2)


def test_products_beside_other_processes_are_judged_by_one_thread_and_by_those_of_more_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With two threads a product may take 100 ms where others compute; of one thread a slice of time may be lost."""
    alone = {1: {"compiled": 1e-5, "expanded": 3e-5}, 2: {"compiled": 4e-3, "expanded": 3e-5}}
    alone[4] = {"compiled": 2e-5, "expanded": 4e-5}
    together = {8: {"compiled": 3e-2, "expanded": 2e-2}}
    bounds = []

    def measured(ways: dict[str, Any], *_: Any, lower_bounds: dict[str, float] | None = None) -> dict[str, float]:
        tokens = ways["compiled"]().shape[0]
        if lower_bounds is not None:
            bounds.append(lower_bounds["compiled"])
        return (alone if torch.get_num_threads() == 1 else together)[tokens]

    monkeypatch.setattr(autotune, "race", measured)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        ways: dict[str, Any] = dict.fromkeys(["compiled", "expanded"], lambda x, parts: x)
        packed = {"packed": torch.zeros(1, dtype=torch.int8)}
        chosen = autotune._fastest(ways, packed, MATRIX, torch.float32, [1, 2, 4], False)
        assert chosen == {1: "compiled", 2: "compiled", 4: "compiled"}
        assert bounds == [0.0, 1e-5, 4e-3]
        alone[4] = {"compiled": 3e-3, "expanded": 2.5e-3}
        chosen = autotune._fastest(ways, packed, MATRIX, torch.float32, [4, 8], False)
        assert chosen == {4: "expanded", 8: "expanded"}
    finally:
        torch.set_num_threads(threads)


def test_of_paths_that_are_as_fast_as_each_other_the_first_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "race", lambda *_, **__: {"compiled": 1.04, "packed": 1.0, "expanded": 0.9999})
    ways: dict[str, Any] = dict.fromkeys(["compiled", "packed", "expanded"], lambda x, parts: x)
    packed = {"packed": torch.zeros(1, dtype=torch.int8)}
    assert autotune._fastest(ways, packed, MATRIX, torch.float32, [1], False) == {1: "compiled"}
