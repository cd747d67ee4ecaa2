"""Fleets of a path and places on GPUs, as users start them: ranks are threads of this process, or processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from elastic.assets import MODEL_DIR
from elastic.cluster.fleet.fleet import Fleet
from elastic.engines.base import Request
from support.serving.generations import Collector, same_unless_close

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("no_violations")]
TWO_DEVICES = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="there is one CUDA device")
ON_ONE_AND_TWO = pytest.mark.parametrize(
    "devices", [(0, 0), pytest.param((0, 1), marks=TWO_DEVICES)], ids=["one", "two"]
)
PROMPTS = [tuple(range(5, 5 + length)) for length in (6, 40)]
TOKENS = 12
CLOSE = 0.05
"""Of logits in float16, which the model is in on a GPU."""


@pytest.fixture
def options(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Options of a fleet; what its processes do with the simulated driver breaks no rule either."""
    log = tmp_path / "violations"
    environment = {"SIMCUDA_LOG": str(log), "SIMCUDA_SCHED": os.environ.get("SIMCUDA_SCHED", "lazy")}
    yield {"replace": False, "beat_timeout_s": 60, "environment": environment}
    assert not log.exists(), log.read_text()


def served(fleet: Fleet, heard: Collector, turn: str) -> list[list[int]]:
    """What the fleet goes on with after each prompt."""
    requests = [Request(prompt, TOKENS, ignore_eos=True, id=f"{turn} {len(prompt)}") for prompt in PROMPTS]
    for request in requests:
        fleet.submit(request, heard)
    heard.wait([request.id for request in requests])
    return [heard.tokens[request.id] for request in requests]


def assert_plain(answers: list[list[int]]) -> None:
    """Assert that answers are those of the plain model."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float16)
    for prompt, got in zip(PROMPTS, answers, strict=True):
        assert len(got) == TOKENS
        assert same_unless_close(model, prompt, got, CLOSE)


def ranks(devices: tuple[int, ...]) -> list[list[str]]:
    return [[f"cuda:{device}#{label}=512MiB"] for device, label in zip(devices, "ab", strict=True)]


@pytest.mark.slow
@ON_ONE_AND_TWO
@pytest.mark.parametrize("launch", ["in-process", "local"])
def test_ranks_drop_layers_that_each_other_has_and_restore_them(
    launch: str, devices: tuple[int, ...], options: dict[str, Any]
) -> None:
    """Their weights, keys and values go from device to device, also between processes."""
    heard = Collector()
    with Fleet(str(MODEL_DIR), ranks=ranks(devices), launch=launch, **options) as fleet:
        answers = served(fleet, heard, "whole")
        assert fleet.drop(need="3MiB").freed_bytes > 0
        answers += served(fleet, heard, "in two stages")
        assert fleet.restore().fetched_bytes > 0
        answers += served(fleet, heard, "whole again")
        wires = [wire for rank in fleet.status().ranks for wire in fleet.look(rank.name).wires]
        assert sum(wire.copied_bytes for wire in wires) > 0
        assert sum(wire.read_bytes for wire in wires) == 0
        fleet.check()
    for turn in range(3):
        assert_plain(answers[turn * len(PROMPTS) :][: len(PROMPTS)])


@pytest.mark.slow
@ON_ONE_AND_TWO
def test_ranks_read_no_more_than_their_share_of_the_model(devices: tuple[int, ...], options: dict[str, Any]) -> None:
    heard = Collector()
    with Fleet(str(MODEL_DIR), ranks=ranks(devices), pp=2, launch="in-process", **options) as fleet:
        assert_plain(served(fleet, heard, "shared"))
        fleet.check()
