"""Options for planners have the bytes of estimates: what is placed has room for the requests that it says."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from transformers import LlamaConfig

from elastic.errors import ConfigError
from elastic.estimation.estimate import Estimator
from elastic.estimation.model_layout import layout_of
from elastic.estimation.options import options
from elastic.estimation.placement import ModelSpace, place_models
from elastic.planning.deployment.devices import DeviceState
from elastic.planning.deployment.placing import Deployment, place
from elastic.planning.estimate.configuration import Configuration
from elastic.planning.estimate.devices import PAGE_BYTES, SHEETS, Device, several
from elastic.planning.estimate.performance import Load
from elastic.planning.estimate.ranking import RankBytes, judge
from support import architectures

LOAD = Load(prompt=100, new=28, rate=50.0)


@pytest.fixture(scope="module")
def estimator() -> Estimator:
    layout = layout_of(architectures.build("qwen2-sliding"))
    return Estimator(layout, several(SHEETS["l40s"], 4, 64 << 20), LOAD, 128, None, 0)


def test_a_budget_of_what_is_needed_has_room_for_the_requests_and_hardly_more(estimator: Estimator) -> None:
    for option in options(estimator, "memory", ("full", "int8"), ("full", "int8")):
        if not option.estimate.fits:
            continue
        states = [DeviceState(device.name, device.memory_bytes) for device in estimator.devices]
        placed = place([option], states)
        assert isinstance(placed, Deployment)
        for requests in (1, 5, 40):
            need = option.need(placed.stages[0].layers, requests)
            kind = estimator.devices[0].kind
            ranks = [several(kind, 1, option.need(stage.layers, requests))[0] for stage in placed.stages]
            room = estimator.candidate_on(
                option.configuration,
                [stage.layers for stage in placed.stages],
                [rank for rank in ranks for _ in range(option.configuration.tp)],
                requests,
            )
            assert room.requests == requests
            tight = [several(kind, 1, need - 2 * PAGE_BYTES[kind.type] * len(placed.stages[0].layers) - 4096)[0]]
            less = estimator.candidate_on(
                option.configuration,
                [stage.layers for stage in placed.stages],
                [rank for rank in [*tight, *ranks[1:]] for _ in range(option.configuration.tp)],
                requests,
            )
            assert less.requests < requests


def test_ranks_that_are_alike_are_counted_once_and_have_the_bytes_of_each(
    estimator: Estimator, monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration, layers = Configuration(2, 2), range(len(estimator.layout.decoder.layers))
    stages, asked = [layers[:-1], layers[-1:]], list[str]()
    devices = [replace(each, memory_bytes=each.memory_bytes + n // 3) for n, each in enumerate(estimator.devices)]
    each = [estimator.rank(device, stages[n // 2], configuration, 1) for n, device in enumerate(devices)]
    count = Estimator.rank

    def noting(self: Estimator, device: Device, *arguments: Any) -> RankBytes:
        asked.append(device.name)
        return count(self, device, *arguments)

    monkeypatch.setattr(Estimator, "rank", noting)
    assert list(estimator.candidate_on(configuration, stages, devices, 1).ranks) == each
    assert asked == [devices[n].name for n in (0, 2, 3)]


def test_what_is_placed_serves_the_rate_that_it_was_placed_for(estimator: Estimator) -> None:
    """The room for keys and values bounds how many run at a time, and so the rate: a plan without it would not."""
    best = next(each for each in options(estimator, "cost", ("full",)) if each.estimate.fits)
    placed = place([best], [DeviceState(device.name, device.memory_bytes) for device in estimator.devices])
    assert isinstance(placed, Deployment)
    assert placed.estimate.rate >= LOAD.rate
    assert placed.estimate.running == placed.requests >= 1
    assert all(0 < share < 1 for share in placed.busy)
    starved = estimator.candidate_on(
        best.configuration, [s.layers for s in placed.stages], estimator.devices, placed.requests
    )
    assert judge(starved, LOAD).requests == placed.requests


def test_short_requests_that_come_faster_than_prompts_could_be_computed_one_by_one_are_placed() -> None:
    model = LlamaConfig(max_position_embeddings=512)
    load = Load(prompt=4, new=8, rate=80.0)
    ((_, outcome),) = place_models({"a": model}, "1*a6000", ModelSpace(load, weights=("full",))).models
    assert isinstance(outcome, Deployment)
    assert outcome.estimate.rate > load.rate
    assert outcome.busy[0] < 1


def test_models_share_what_is_worked_out_of_the_same_directory_and_fill_devices() -> None:
    model = architectures.build("llama-gqa")
    found = place_models(
        dict.fromkeys("abcd", model), several(SHEETS["l40s"], 2, 32 << 20), ModelSpace(LOAD, "memory", ("full",))
    )
    assert [name for name, _ in found.models] == list("abcd")
    taken = sum(outcome.nbytes for _, outcome in found.models if isinstance(outcome, Deployment))
    assert sum(state.free_bytes for state in found.states) == 2 * (32 << 20) - taken
    assert found.basis == "data sheet"


def test_a_load_that_is_no_share_of_the_time_is_named() -> None:
    for load in (math.nan, -0.5):
        with pytest.raises(ConfigError, match=rf"loads: l40s#0={load} cannot be; it must be a share of the time"):
            place_models({}, several(SHEETS["l40s"], 1), ModelSpace(LOAD), loads={"l40s#0": load})
