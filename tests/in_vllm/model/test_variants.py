"""int4 in vLLM is int4 in Hugging Face's model: fused matrices have the rows of the separate ones, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import elastic
import elastic.vllm
from support.vllm_engine.engine import MODEL, TEXTS, plain_engine, run

LAYERS = [2, 5, 9]
TOKENS = 64
TIE = 0.02
"""Logits that are closer are rounded either way; int4 itself moves them by far more."""
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def packed_matrices(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The values of the packed matrices of a layer, by the name of the module."""
    return {
        name.rpartition(".")[2]: module.weight.source.value()
        for name, module in layer.named_modules()
        if hasattr(getattr(module, "weight", None), "source")
    }


def test_int4_is_that_of_hugging_face() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    elastic.wrap(model, places=["cpu#hf=256MiB"], variants=["int4"])
    try:
        model.elastic.swap(LAYERS, "int4")
        expected = [generate(model, tokenizer(text, return_tensors="pt").input_ids) for text in TEXTS]
        with plain_engine(**elastic.vllm.options("32MiB", variants=("int4",))) as llm:
            runtime = elastic.vllm.runtime(llm)
            runtime.swap(LAYERS, "int4")
            same_values(llm, model)
            found = run(llm, [TOKENS] * len(TEXTS))
        for text, ours, theirs in zip(TEXTS, found, expected, strict=True):
            same_but_for_ties(model, tokenizer(text).input_ids, ours, theirs)
    finally:
        elastic.unwrap(model)


def generate(model: Any, ids: torch.Tensor) -> list[int]:
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    return [int(token) for token in out[0, ids.shape[1] :]]


def same_but_for_ties(model: Any, prompt: list[int], ours: list[int], theirs: list[int]) -> None:
    """Tokens differ first where two were as likely: products of a batch, and of fused matrices, are rounded apart."""
    first = next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
    if first is None:
        return
    with torch.no_grad():
        logits = model(torch.tensor([prompt + theirs[:first]])).logits[0, -1]
    assert logits[theirs[first]] - logits[ours[first]] < TIE, f"token {first}"


def same_values(llm: Any, model: Any) -> None:
    """Every fused matrix has the rows of the separate ones, bit for bit."""

    def compare(worker: Any) -> None:
        for index in LAYERS:
            ours = packed_matrices(worker.model_runner.get_model().model.layers[index])
            theirs = packed_matrices(model.model.layers[index])
            assert set(ours) == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
            for name, value in ours.items():
                assert torch.equal(value, torch.cat([theirs[part] for part in FUSED.get(name, (name,))]))

    llm.collective_rpc(compare)
