"""The entry point that vLLM calls in each of its processes, before a model is built."""

from __future__ import annotations

from contextlib import suppress


def register() -> None:
    """Make `quantization="elastic"` and our connector known to vLLM; nothing changes for engines without them.

    The connector is asked for by its module, but vLLM looks it up by name for its figures beside those of others.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.model_executor.layers.quantization import register_quantization_config

    from elastic.engines.vllm.client.settings import CONNECTOR
    from elastic.engines.vllm.linear import ElasticConfig

    register_quantization_config("elastic")(ElasticConfig)
    name = CONNECTOR["kv_connector"]
    with suppress(ValueError):  # it was asked before
        KVConnectorFactory.register_connector(name, CONNECTOR["kv_connector_module_path"], name)
