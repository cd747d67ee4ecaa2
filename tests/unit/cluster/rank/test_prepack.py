"""Ranks whose weights are prepacked serve side by side, and keep all of their layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.cluster.fleet.fleet import Fleet
from elastic.engines.base import Request
from elastic.runtime import options
from support.serving.generations import prompts, same_unless_close, serve
from support.weights.prepacked import any_layout, wide_llama


def test_ranks_serve_prepacked_and_drop_no_layer_that_could_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "prepacked_layout", any_layout)
    plain = wide_llama()
    plain.save_pretrained(tmp_path)
    places = [[f"cpu#prepacked{rank}=16MiB"] for rank in range(2)]
    with Fleet(tmp_path, ranks=places, launch="in-process", wrap={"prepack": True}) as fleet:
        for _ in range(2):
            asked = [Request(prompt, 10) for prompt in prompts([5, 20, 30], 96)]
            heard = serve(fleet, asked)
            assert all(same_unless_close(plain, r.prompt, heard.tokens[r.id]) for r in asked)
            dropped = fleet.drop(layers={"r0": [2], "r1": [0]})
            assert dropped.status == "deferred"
            assert "layers.0 is prepacked, which others cannot read; wrap its model without prepack" in dropped.why
            assert not any(rank.dropped for rank in fleet.status().ranks)
