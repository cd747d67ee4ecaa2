"""Other kinds of models and of serving: what works keeps plain vLLM's tokens while pages come and go."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    GraniteMoeHybridConfig,
    MixtralConfig,
    Qwen3Config,
)

from support.vllm_engine.engine import MODEL, elastic_engine, require_plain_tokens, scheduler

SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
SLIDING = ["sliding_attention", "sliding_attention", "full_attention"] * 2
STATES: dict[str, Any] = {
    "layer_types": ["mamba", "mamba", "attention"] * 2, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32,
    "mamba_n_groups": 1, "mamba_expand": 2, "num_local_experts": 0, "shared_intermediate_size": 256,
    "position_embedding_type": "nope",
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "experts": lambda **sizes: MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2),
    "sliding": lambda **sizes: Gemma3TextConfig(**sizes, head_dim=32, sliding_window=64, layer_types=SLIDING),
    "states": lambda **sizes: GraniteMoeHybridConfig(**sizes, **STATES),
    "full": lambda **sizes: Qwen3Config(**sizes, head_dim=32),
}


def make_model(kind: str, path: Path) -> str:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](vocab_size=len(tokenizer), **SIZES))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_a_kind_of_model(kind: str, tmp_path: Path) -> None:
    require_plain_tokens(make_model(kind, tmp_path), "32MiB", block_size=16 if kind == "states" else 32)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"enable_chunked_prefill": True, "max_num_batched_tokens": 16, "max_num_seqs": 8}, id="chunked"),
        pytest.param({"dtype": "bfloat16"}, id="bfloat16"),
        pytest.param({"enable_lora": True, "max_lora_rank": 8}, id="lora"),
        pytest.param({"enable_prefix_caching": True}, id="prefixes"),
    ],
)
def test_a_way_of_serving(options: dict[str, Any]) -> None:
    require_plain_tokens(MODEL, "24MiB", **options)


def test_speculative_decoding() -> None:
    """In a process of its own: what vLLM imports for it keeps another engine of the process from starting."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    with ProcessPoolExecutor(1, get_context("spawn")) as child:
        child.submit(require_plain_tokens, MODEL, "24MiB", only_elastic={"speculative_config": drafts}).result()


def test_another_connector_beside_ours() -> None:
    from support.vllm_engine.counting_connector import CountingConnector

    theirs = {
        "kv_connector": "CountingConnector",
        "kv_connector_module_path": CountingConnector.__module__,
        "kv_role": "kv_both",
    }
    require_plain_tokens(MODEL, "24MiB", only_elastic={"connector": theirs})
    assert {"load", "save"} <= set(CountingConnector.calls)


def test_figures_beside_another_connector() -> None:
    """A server looks the connectors up by name where it logs them: it died with its first step."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    from support.vllm_engine.counting_connector import CountingConnector

    module, role = CountingConnector.__module__, "kv_both"
    theirs = {"kv_connector": "CountingConnector", "kv_connector_module_path": module, "kv_role": role}
    with elastic_engine("24MiB", connector=theirs) as llm:
        figures = scheduler(llm).connector.get_kv_connector_stats().to_dict()
    assert MultiConnector.build_kv_connector_stats(figures).to_dict() == figures
    assert figures["ElasticConnector"]["usable_blocks"] > 0
