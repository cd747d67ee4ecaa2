"""The entry point that vLLM calls in each of its processes, before a model is built."""

from __future__ import annotations


def register() -> None:
    """Make `quantization="elastic"` known to vLLM. Changes nothing for engines that do not ask for it."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    from elastic.engines.vllm.linear import ElasticConfig

    register_quantization_config("elastic")(ElasticConfig)
