"""A KV connector of a user's own that keeps the blocks of prompts in host memory, and copies them into others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

from support.vllm_engine.engine import PLAIN

BLOCK = PLAIN["block_size"]


@dataclass
class BlockCopies(KVConnectorMetadata):
    """What is copied around a step: (hash of a block's tokens and all before, block id)."""

    loads: list[tuple[bytes, int]] = field(default_factory=list)
    saves: list[tuple[bytes, int]] = field(default_factory=list)


class CopyingConnector(KVConnectorBase_V1, SupportsHMA):
    """Stands beside ours in vLLM's `MultiConnector`, in an engine of one process."""

    kept: ClassVar[dict[bytes, list[torch.Tensor]]] = {}
    """Hash -> the block in each layer."""
    loaded: ClassVar[int] = 0
    """Blocks that were copied into the cache."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._caches: list[torch.Tensor] = []
        self._requests: dict[str, Any] = {}
        self._loads: list[tuple[bytes, int]] = []

    # -- beside the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        blocks = 0
        for key in request.block_hashes[: (request.num_tokens - 1) // BLOCK]:
            if key not in self.kept:
                break
            blocks += 1
        return max(0, blocks * BLOCK - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._requests[request.request_id] = request
        if num_external_tokens:
            begin = request.num_computed_tokens // BLOCK
            ids = blocks.get_block_ids()[0]
            numbers = range(begin, begin + num_external_tokens // BLOCK)
            self._loads += [(request.block_hashes[number], ids[number]) for number in numbers]

    def build_connector_meta(self, scheduler_output: Any) -> BlockCopies:
        copies, self._loads = BlockCopies(self._loads), []
        for new in scheduler_output.scheduled_new_reqs:
            computed = new.num_computed_tokens + scheduler_output.num_scheduled_tokens[new.req_id]
            keys = self._requests.pop(new.req_id).block_hashes[: computed // BLOCK]
            copies.saves += zip(keys, new.block_ids[0], strict=False)
        return copies

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    # -- in the worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        copies = self._get_connector_metadata()
        for key, block in copies.loads:
            for cache, kept in zip(self._caches, self.kept[key], strict=True):
                cache[block] = kept
            type(self).loaded += 1

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None:
        copies = self._get_connector_metadata()
        for key, block in copies.saves:
            self.kept[key] = [cache[block].clone() for cache in self._caches]
