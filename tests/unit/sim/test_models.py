"""Several models in one scenario, on devices that they share."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from elastic.errors import ConfigError
from elastic.sim.core.clock import VirtualClock
from elastic.sim.core.host import ComputeTurn, SharedDevices, SharedHost
from elastic.sim.run import Run
from elastic.sim.scenario import parse_scenario

REQUESTS = {"arrivals": "poisson", "lengths": "fixed", "prompt_tokens": 64, "answer_tokens": 16, "rate": 2}


def model(name: str, chunk: float, devices: list[int]) -> dict[str, Any]:
    steps = {"token": 1e-4, "chunk": chunk}
    return {"name": name, "fleet": {"instances": 2}, "memory": {"kv_tokens": 3200}, "steps": steps, "devices": devices}


def played(quick: list[int], slow: list[int], **changes: Any) -> Run:
    """Play a quick model and a slow one, of two instances each that are at these devices."""
    values = {
        "duration_s": 20,
        "models": [model("quick", 0.01, quick), model("slow", 0.05, slow)],
        "requests": [{**REQUESTS, "name": f"to {name}", "model": name} for name in ("quick", "slow")],
    }
    run = Run(parse_scenario({**values, **changes}))
    run.play()
    assert run.report.requests["completed"] == run.report.requests["arrived"] > 50
    return run


def test_models_on_the_same_devices_take_turns_there() -> None:
    apart, together = played([0, 1], [2, 3]), played([0, 1], [1, 0])
    for name, least, most in (("to quick", 1.5, 9.0), ("to slow", 1.0, 1.5)):
        ratio = together.report.by_source[name].mean / apart.report.by_source[name].mean
        assert least < ratio < most, name


def test_an_instance_on_several_devices_keeps_all_of_them_busy() -> None:
    apart, both = played([0, 1], [2, 3]), played([0, 1], [0, 1, 2, 3])
    assert both.report.by_source["to quick"].mean > 1.2 * apart.report.by_source["to quick"].mean
    assert both.report.by_source["to slow"].mean > apart.report.by_source["to slow"].mean


def test_requests_go_to_the_instances_of_their_model() -> None:
    run = played([0, 1], [2, 3])
    steps = {name: each.scheduler.steps for fleet in run.fleets for name, each in fleet.instances.items()}
    assert set(steps) == {"quick r0", "quick r1", "slow r0", "slow r1"}
    assert min(steps.values()) > 0
    assert run.report.by_source["to quick"].mean < 0.03 < run.report.by_source["to slow"].mean


def test_a_request_to_no_model_and_models_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model = '' must be one of quick, slow"):
        played([0, 1], [2, 3], requests=[REQUESTS])
    with pytest.raises(ConfigError, match="same name"):
        played([0, 1], [2, 3], models=[model("quick", 0.01, [0, 1])] * 2)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 1000,
}


def sheet_model(name: str, memory: str, devices: list[int]) -> dict[str, Any]:
    of_sheet = {"device": "a100-40gb", "memory": memory, "config": dict(LLAMA)}
    return {"name": name, "fleet": {"instances": 2}, "model": of_sheet, "devices": devices}


def scenario_of(*models: dict[str, Any]) -> dict[str, Any]:
    return {"duration_s": 1, "models": list(models), "requests": [{**REQUESTS, "model": models[0]["name"]}]}


def test_models_on_one_device_have_no_more_memory_than_it_has() -> None:
    parse_scenario(scenario_of(sheet_model("a", "20GB", [0, 1]), sheet_model("b", "20GB", [1, 2])))
    parse_scenario(scenario_of(sheet_model("a", "30GB", [0, 1]), sheet_model("b", "30GB", [2, 3])))
    with pytest.raises(ConfigError, match=r"device 1 has 37.25 GiB, of which a has 18.00 GiB, b has 20.00 GiB"):
        parse_scenario(scenario_of(sheet_model("a", "18GiB", [0, 1]), sheet_model("b", "20GiB", [1, 2])))
    with pytest.raises(ConfigError, match=r"device 0 has 37.25 GiB, of which a has 38.00 GiB; give less"):
        parse_scenario(scenario_of(sheet_model("a", "38GiB", [0, 1])))
    alone = sheet_model("a", "41GiB", [])
    del alone["devices"]
    with pytest.raises(
        ConfigError, match=r"model.memory: a device of a100-40gb has 37.25 GiB, not 41.00 GiB; give less"
    ):
        parse_scenario(scenario_of(alone))


def test_a_step_begins_when_all_of_its_devices_are_free_and_no_two_wait_for_each_other() -> None:
    clock, done = VirtualClock(), []
    turns = [ComputeTurn(SharedHost(clock)) for _ in range(3)]
    for name, numbers in (("a", (0, 1)), ("b", (1, 2)), ("c", (2, 0)), ("d", (0,))):
        ended = partial(lambda name: done.append((name, clock.now)), name)
        SharedDevices(clock, [turns[number] for number in numbers]).compute(1.0, ended)
    clock.run()
    assert done == [("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", 4.0)]
