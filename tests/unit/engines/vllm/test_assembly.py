"""The model of one rank without vLLM: the scheduler's side hears of what changes in it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import elastic
from elastic import ConfigError
from elastic.controller.policies.precision import PrecisionPolicy
from elastic.engines.vllm.assembly import ElasticModel
from elastic.engines.vllm.client.settings import EngineSettings
from elastic.engines.vllm.model.graphs import CapturedGraphs
from support.architectures import build


def stub_channel(told: list[str], name: str) -> Any:
    """Return the worker's end of a KV connector, as far as it is told of changes."""
    return SimpleNamespace(
        changed=lambda: told.append(f"{name} changed"), wake=lambda: told.append(f"{name} woken"), close=lambda: None
    )


def test_its_channel_hears_of_pages_and_of_jobs_and_an_earlier_one_does_not() -> None:
    settings, told = EngineSettings(64 << 20), list[str]()
    made = ElasticModel(
        build("llama-gqa"), settings, torch.device("cpu"), instance="told", is_packable=lambda *_: False, find_files=str
    )
    with closing(made) as model:
        model.channel = stub_channel(told, "earlier")
        model.channel = stub_channel(told, "present")
        model.kv.pool.notify()
        assert told == ["present changed"]
        told.clear()
        model.runtime.release([1])
        assert {*told} == {"present changed", "present woken"}


class Joined(nn.Module):
    """A feed-forward network with two matrices in one, as an engine lays them."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]), requires_grad=False)
        self.down_proj = mlp.down_proj


def test_a_profile_is_checked_against_the_files_not_against_joined_matrices(tmp_path: Path) -> None:
    """The layers of an engine have other names and shapes, so that no profile could ever be of them."""
    build("llama-gqa").save_pretrained(tmp_path)
    joined = build("llama-gqa")
    for layer in joined.model.layers:
        layer.mlp = Joined(layer.mlp)

    def start(profile: Path) -> ElasticModel:
        return ElasticModel(
            joined,
            EngineSettings(64 << 20, "balanced", ("int4",), order=str(profile)),
            torch.device("cpu"),
            instance="ordered",
            is_packable=lambda _, parameter: parameter.ndim == 2,
            find_files=lambda: str(tmp_path),
        )

    ids = torch.arange(32).view(2, 16)
    profile = elastic.profile(build("llama-gqa"), ids, path=tmp_path / "own.json")
    assert profile.order != (0, 1, 2), "or it could be the default"
    with closing(start(tmp_path / "own.json")) as model:
        controller = model.runtime.controller
        assert controller is not None
        assert isinstance(controller.policy, PrecisionPolicy)
        assert tuple(step.layer for step in controller.policy._path) == profile.order
    elastic.profile(build("llama-gqa", seed=1), ids, path=tmp_path / "others.json")
    with pytest.raises(ConfigError, match="the profile is of another model: the weights of 3 of 3 layers differ"):
        start(tmp_path / "others.json")


class Runner:
    """A model runner of vLLM that has captured graphs; it is its own dispatcher."""

    keys_initialized = True

    @property
    def cudagraph_dispatcher(self) -> Runner:
        return self


def test_steps_look_for_moved_weights_after_commits_alone() -> None:
    """There are hundreds of addresses, and most steps come after none."""
    settings, looks, runner = EngineSettings(64 << 20), list[int](), Runner()
    made = ElasticModel(
        build("llama-gqa"), settings, torch.device("cpu"), instance="g", is_packable=lambda *_: False, find_files=str
    )

    def addresses() -> tuple[int | None, ...]:
        looks.append(made.gate.commits)
        return made.addresses()

    def replayed(steps: int) -> set[bool]:
        seen = set()
        for _ in range(steps):
            made.begin_forward()
            seen.add(runner.keys_initialized)
            made.end_forward()
        return seen

    with closing(made) as model:
        model.graphs = CapturedGraphs(runner, addresses, model.gate)
        model.graphs.note_capture()
        assert replayed(5) == {True}
        model.runtime.release([1])
        assert replayed(5) == {False}
        model.runtime.restore()
        assert replayed(5) == {True}
    assert len(looks) == 1 + len({*looks}) <= 4, "once at the capture, and once for what each commit left"
