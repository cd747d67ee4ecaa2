"""What estimates are made of, measured on a GPU: seconds of layers, and the bytes that batches take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.estimation.model_layout import layout_of
from elastic.estimation.profile import measure_fingerprints
from elastic.estimation.profiles.store import ProfileKey, ProfileStore
from support import architectures

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("no_violations")]


def test_costs_are_measured_on_a_gpu_and_found_again_for_it(tmp_path: Path) -> None:
    model: Any = architectures.build("llama-gqa")
    model.save_pretrained(tmp_path / "model")
    profile = measure_fingerprints(tmp_path / "model", device="cuda:0", context=32, step_tokens=16, most_s=0.01)
    (kind,) = layout_of(model).kinds
    assert (profile.device, profile.layers.keys()) == ("cuda", {(kind.name, "full")})
    assert 0 < profile.activations["full"] < 10, "of what formulas say"
    store = ProfileStore(tmp_path / "profiles", beside=False)
    store.save(tmp_path / "model", profile)
    assert store.load(tmp_path / "model", "cuda") == profile
    assert store.load(tmp_path / "model", "cpu") is None
    assert ProfileKey.here(tmp_path / "model", "cuda").device == torch.cuda.get_device_name()
