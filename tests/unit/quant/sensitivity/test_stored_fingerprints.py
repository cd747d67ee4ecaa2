"""A checkpoint's files have the fingerprints of the model that transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from elastic import ConfigError
from elastic.quant.sensitivity.profile_file import fingerprint
from elastic.quant.sensitivity.stored_fingerprints import stored_fingerprints
from elastic.weights.decoder import find_decoder
from support.architectures import CONFIGS, build


@pytest.mark.parametrize("name", list(CONFIGS))
def test_files_have_the_fingerprints_of_the_model(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)
    layers = find_decoder(AutoModelForCausalLM.from_pretrained(tmp_path)).layers
    assert stored_fingerprints(tmp_path) == tuple(map(fingerprint, layers))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_whatever_dtype_files_and_model_have(dtype: torch.dtype, tmp_path: Path) -> None:
    build("mixtral", dtype).save_pretrained(tmp_path)
    for loaded in (torch.float32, dtype):
        layers = find_decoder(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=loaded)).layers
        assert stored_fingerprints(tmp_path) == tuple(map(fingerprint, layers))


def test_files_without_a_weight_of_a_layer_are_refused(tmp_path: Path) -> None:
    build("llama-gqa").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(ConfigError, match=r"no model\.layers\.3\..* whether a profile is of this model"):
        stored_fingerprints(tmp_path)
