"""A KV connector of a user's own: it moves nothing, and counts the calls of the steps."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA


class NoMetadata(KVConnectorMetadata):
    """Nothing to tell."""


class CountingConnector(KVConnectorBase_V1, SupportsHMA):
    """Stands beside ours in vLLM's `MultiConnector`."""

    calls: ClassVar[list[str]] = []

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.calls.append("load")

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self.calls.append("save")

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> NoMetadata:
        return NoMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None
