"""Other kinds of models and of serving: what works keeps plain vLLM's tokens while pages come and go."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    GraniteMoeHybridConfig,
    MixtralConfig,
    Qwen3Config,
)

import elastic.vllm
from elastic.engines.vllm.linear import is_packable
from elastic.engines.vllm.model.decoder import find_decoder
from elastic.quant.variants.packed_weight import PackedSource
from elastic.weights.proxy.tensor import WeightProxy
from support.vllm_engine.engine import (
    MIXED,
    MODEL,
    elastic_engine,
    require_plain_tokens,
    restore_all,
    run,
    scheduler,
)

SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
SLIDING = ["sliding_attention", "sliding_attention", "full_attention"] * 2
STATES: dict[str, Any] = {
    "layer_types": ["mamba", "mamba", "attention"] * 2, "mamba_n_heads": 16, "mamba_d_head": 16, "mamba_d_state": 32,
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


def layers_of(llm: Any) -> list[Any]:
    """The decoder layers of an engine in this process."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return list(find_decoder(executor.driver_worker.worker.model_runner.get_model()).layers)


def value(weight: Any) -> torch.Tensor:
    """What is in a parameter's slot, plain."""
    return weight.source.value() if isinstance(weight, WeightProxy) else weight


def require_packed_and_released(llm: Any) -> None:
    """Pack two layers, and release one of them: all of its matrices, experts too, become pages to give."""
    rt, layers = elastic.vllm.runtime(llm), layers_of(llm)
    matrices = [module for i in (1, 3) for module in layers[i].modules() if is_packable_module(module)]
    full = [value(module.weight).clone() for module in matrices]
    nbytes = sum(parameter.nbytes for parameter in layers[1].parameters() if parameter.ndim > 1)
    assert rt.release([1]).released_bytes >= nbytes
    restore_all(rt)
    assert rt.swap([1, 3], "int8").released_bytes > 0
    assert matrices
    for module, before in zip(matrices, full, strict=True):
        assert isinstance(module.weight.source, PackedSource)
        assert 0 < (value(module.weight) - before).abs().max() < before.abs().max() / 100
    assert run(llm, [20] * 4) == run(llm, [20] * 4)


def is_packable_module(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and is_packable(module, weight)


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_a_kind_of_model(kind: str, tmp_path: Path) -> None:
    require_plain_tokens(
        make_model(kind, tmp_path),
        "32MiB",
        block_size=16 if kind == "states" else 32,
        only_elastic={"variants": ("int8",)},
        then=require_packed_and_released,
    )


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"enable_chunked_prefill": True, "max_num_batched_tokens": 16, "max_num_seqs": 8}, id="chunked"),
        pytest.param({"dtype": "bfloat16"}, id="bfloat16"),
        pytest.param({"enable_prefix_caching": True}, id="prefixes"),
    ],
)
def test_a_way_of_serving(options: dict[str, Any]) -> None:
    require_plain_tokens(MODEL, "24MiB", **options)


@pytest.mark.parametrize(
    "drafts",
    [
        pytest.param({"method": "ngram", "prompt_lookup_max": 3}, id="ngram"),
        pytest.param({"method": "draft_model", "model": MODEL}, id="model"),
    ],
)
def test_speculative_decoding(drafts: dict[str, Any]) -> None:
    """In a process of its own: what vLLM imports for it keeps another engine of the process from starting."""
    with ProcessPoolExecutor(1, get_context("spawn")) as child:
        speculative = {"speculative_config": {**drafts, "num_speculative_tokens": 3}}
        child.submit(require_plain_tokens, MODEL, "32MiB", only_elastic=speculative).result()


def make_adapter(path: Path) -> str:
    """Make a LoRA adapter of rank 4 for some matrices of all layers, in the files of peft's."""
    config = AutoConfig.from_pretrained(MODEL)
    hidden, keys = config.hidden_size, config.hidden_size * config.num_key_value_heads // config.num_attention_heads
    shapes = {"self_attn.q_proj": (hidden, hidden), "self_attn.v_proj": (keys, hidden)}
    shapes["mlp.down_proj"] = hidden, config.intermediate_size
    generator, tensors = torch.Generator().manual_seed(0), {}
    for layer in range(config.num_hidden_layers):
        for name, (outputs, inputs) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(4, inputs, generator=generator) / 5
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator) / 5
    save_file(tensors, path / "adapter_model.safetensors")
    names = [name.partition(".")[2] for name in shapes]
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": names, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return str(path)


def test_adapters_beside_layers_that_come_and_go(tmp_path: Path) -> None:
    """Every other request has one: vLLM wraps each linear layer, and adds the adapter's part from memory of its own."""
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("some", 1, make_adapter(tmp_path))

    def pack(llm: Any) -> None:
        assert run(llm, [20]) != run(llm, [20], adapters=[adapter]), "it changes something"
        elastic.vllm.runtime(llm).swap([1, 2], "int4")
        packed = run(llm, MIXED, adapters=[None, adapter])
        assert packed == run(llm, MIXED, adapters=[None, adapter])

    options = {"enable_lora": True, "max_lora_rank": 8}
    ours = {"variants": ("int4",)}
    require_plain_tokens(MODEL, "24MiB", only_elastic=ours, adapters=[None, adapter], then=pack, **options)


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
