"""The model of one rank without vLLM: the scheduler's side hears of what changes in it."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import Any

import torch

from elastic.engines.vllm.assembly import ElasticModel
from elastic.engines.vllm.client.settings import EngineSettings
from support.architectures import build


def stub_channel(told: list[str], name: str) -> Any:
    """Return the worker's end of a KV connector, as far as it is told of changes."""
    return SimpleNamespace(
        changed=lambda: told.append(f"{name} changed"), wake=lambda: told.append(f"{name} woken"), close=lambda: None
    )


def test_its_channel_hears_of_pages_and_of_jobs_and_an_earlier_one_does_not() -> None:
    settings, told = EngineSettings(64 << 20), list[str]()
    made = ElasticModel(
        build("llama-gqa"), settings, torch.device("cpu"), instance="told", is_packable=lambda *_: False
    )
    with closing(made) as model:
        model.channel = stub_channel(told, "earlier")
        model.channel = stub_channel(told, "present")
        model.kv.pool.notify()
        assert told == ["present changed"]
        told.clear()
        model.runtime.release([1])
        assert {*told} == {"present changed", "present woken"}
