"""What `estimate.py` estimates and measures: six shapes of models of three kinds, forms of weights, and requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from common import SEED

FORMS = ("full", "int8", "int4", "2:4")
DEGREES = ((1, 1), (1, 2), (2, 1))
"""TP x PP."""
STEP_TOKENS, CONTEXT = 128, 512
Point = tuple[int, int, int]
"""Requests at a time, tokens of each one's prompt, and of its answer."""
POINTS: tuple[Point, ...] = ((1, 90, 10), (1, 301, 10), (2, 110, 10), (8, 61, 10))
"""Fingerprints are measured at none of these."""
SIZES = {"deep": (24, 512), "wide": (8, 768)}
"""Layers, and the width of hidden states: more bytes than caches hold."""


def at_rest(pp: int) -> Point:
    """Return what is served before bytes are taken at rest: two short requests of each instance, one to each stage."""
    return 2 * pp, 8, 4


def answer_tokens(point: Point) -> int:
    """Return the tokens of each answer: prompts are computed in turn, so of several the first waits for the last."""
    batch, _, new = point
    return new + 4 * (batch - 1)


def config(kind: str, layers: int, hidden: int) -> Any:
    """Return the config of a model; weights are random."""
    shape = {
        "vocab_size": 2048,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    if kind == "llama":
        return transformers.LlamaConfig(**shape, intermediate_size=3 * hidden)
    if kind == "qwen3_moe":
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
        return transformers.Qwen3MoeConfig(**shape, **experts, head_dim=hidden // 8)
    types = [("full_attention" if layer % 3 == 2 else "sliding_attention") for layer in range(layers)]
    sliding = {"layer_types": types, "sliding_window": 128, "head_dim": hidden // 8}
    return transformers.Gemma3TextConfig(**shape, **sliding, intermediate_size=3 * hidden)


def shapes(*, quick: bool) -> dict[str, Any]:
    """Return the configs by name."""
    kinds = ("llama", "qwen3_moe", "gemma3")
    if quick:
        return {kind: config(kind, 6, 256) for kind in kinds}
    return {f"{kind} {size}": config(kind, *sizes) for kind in kinds for size, sizes in SIZES.items()}


def save(made: Any, folder: Path) -> Path:
    """Write a model with random weights.

    In deep layers of a random model all tokens are alike, and a few experts get them all. Trained ones share them out:
    so do these, where tokens are as large as what layers add to them.
    """
    torch.manual_seed(SEED)
    model = transformers.AutoModelForCausalLM.from_config(made)
    if getattr(made, "num_experts", 0):
        torch.nn.init.normal_(model.get_input_embeddings().weight)
    model.save_pretrained(folder)
    return folder
