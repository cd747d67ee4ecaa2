"""Models that are deployed by intents on GPUs, read from their files there: each answers as by itself."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from elastic.cluster.deployment.deployments import Deployments
from elastic.engines.base import Request
from elastic.planning.estimate.performance import Load
from support import architectures
from support.serving.generations import prompts, same_unless_close, serve

OPTIONS: dict[str, Any] = {
    "kind": "h100",
    "weights": ("full",),
    "launch": "in-process",
    "fleet": {"engine": {"block_tokens": 8, "max_batch_tokens": 64}, "beat_timeout_s": 60},
    "replanning": None,
}
PROMPTS, TOKENS = prompts([5, 40, 17], architectures.VOCAB), 20


@pytest.mark.cuda
def test_two_models_share_gpus_and_one_leaves(tmp_path: Path, simulator: ModuleType) -> None:
    names = ("qwen3", "llama-gqa")
    for name in names:
        architectures.build(name).save_pretrained(tmp_path / name)
    with Deployments("cuda:0=256MiB,cuda:1=256MiB", **OPTIONS) as running:
        for name in names:
            running.deploy(tmp_path / name, "memory", load=Load(32, 32, 1.0), name=name)
        for name in names:
            heard = serve(running[name], [Request(p, TOKENS, id=f"{len(p)}", ignore_eos=True) for p in PROMPTS])
            model = architectures.build(name)
            assert all(len(heard.tokens[f"{len(p)}"]) == TOKENS for p in PROMPTS)
            assert all(same_unless_close(model, p, heard.tokens[f"{len(p)}"]) for p in PROMPTS)
            running[name].check()
        taken = sum(device.memory_bytes - device.free_bytes for device in running.devices())
        running.remove("qwen3")
        assert 0 < sum(device.memory_bytes - device.free_bytes for device in running.devices()) < taken
        assert running.names() == ("llama-gqa",)
