"""Continuous batching on a GPU: what the engine writes on one stream and reads on another is in order."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

import elastic
from elastic.engines.base import Request
from elastic.engines.continuous import ContinuousEngine
from support import architectures
from support.serving.generations import prompts, serve


@pytest.mark.cuda
def test_requests_go_on_after_a_forward_pass_that_failed(simulator: ModuleType, wrapped: Any) -> None:
    model = architectures.build("llama-gqa", device="cuda:0")
    wrapped(model, [elastic.Place("cuda:0", torch.device("cuda:0"), 1 << 30)])
    asked = prompts([9, 40], architectures.VOCAB)
    with ContinuousEngine(model, block_tokens=8, max_batch_tokens=64) as engine:
        before = [Request(p, 6) for p in asked]
        expected = serve(engine, before)

        def fail(*_: Any) -> None:
            handle.remove()
            raise RuntimeError("half way")

        handle = model.model.layers[1].register_forward_hook(fail)
        failed = Request(asked[1], 6)
        assert serve(engine, [failed]).ends[failed.id].finish == "failed"
        again = [Request(p, 6) for p in asked]
        heard = serve(engine, again)
    for old, new in zip(before, again, strict=True):
        assert heard.tokens[new.id] == expected.tokens[old.id]
