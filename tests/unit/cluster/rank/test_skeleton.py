"""A model without the data of its decoder layers is the one that is loaded as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t

from elastic.cluster.rank.skeleton import load_skeleton
from support.architectures import SMALL

SIZES = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "rotary_dim": 8}
CONFIGS: dict[str, Any] = {
    "gptj": lambda: t.GPTJConfig(**SIZES),
    "codegen": lambda: t.CodeGenConfig(**SIZES),
    "gemma3": lambda: t.Gemma3TextConfig(**SMALL | {"head_dim": 8}),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_buffers_that_no_file_has_are_those_of_a_loaded_model(tmp_path: Path, name: str, dtype: str) -> None:
    t.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=getattr(torch, dtype)).save_pretrained(tmp_path)
    loaded = t.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    skeleton, _ = load_skeleton(str(tmp_path), torch.device("cpu"), dtype)
    expected, buffers = dict(loaded.named_buffers()), dict(skeleton.named_buffers())
    assert buffers.keys() == expected.keys() != set()
    assert [n for n, b in buffers.items() if b.dtype != expected[n].dtype or not torch.equal(b, expected[n])] == []
