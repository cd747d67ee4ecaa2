"""The baseline that reshards by way of host memory: requests go on as ever, and all that ranks have has been there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import reshard_through_host
import torch

import elastic
from elastic.cluster.fleet.fleet import Fleet
from elastic.engines.base import Request
from elastic.engines.continuous.engine import ContinuousEngine
from elastic.engines.executor.kv_exchange import KVExchange
from elastic.types import Fetch, Restore
from elastic.weights.model import ModelWeights
from support import architectures
from support.serving.generations import Collector, prompts, same_unless_close
from support.wrapped_model import small

pytestmark = pytest.mark.slow


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Have ranks of this process go through host memory; count the bytes that go there and come back to their rank."""
    for owner, name in ((KVExchange, "locate"), (ModelWeights, "source"), (ContinuousEngine, "_put_together")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(reshard_through_host, "_files", {})
    reshard_through_host.install()
    count, host_file = Counter[str](), reshard_through_host.HostFile

    class Counted(host_file):  # type: ignore[valid-type, misc]
        def write(self, content: torch.Tensor) -> tuple[int, ...]:
            count["written"] += content.numel()
            return super().write(content)  # type: ignore[no-any-return]

        def read(self, pages: tuple[int, ...], content: torch.Tensor) -> None:
            count["read back"] += content.numel()
            super().read(pages, content)

    monkeypatch.setattr(reshard_through_host, "HostFile", Counted)
    return count


def test_requests_go_on_while_all_goes_through_host_memory(written: Counter[str], tmp_path: Path) -> None:
    plain = architectures.build("qwen3")
    plain.save_pretrained(tmp_path)
    models = [architectures.build("qwen3") for _ in range(2)]
    for number, model in enumerate(models):
        elastic.wrap(model, places=small(4 << 20, f"cpu#{number}"), shards=2, checkpoint=tmp_path)
    heard, asked = Collector(), [Request(prompt, 120) for prompt in prompts([5, 40, 70], architectures.VOCAB)]
    with Fleet.of(*models, engine={"block_tokens": 8, "max_batch_tokens": 64}, beat_timeout_s=60) as fleet:
        for request in asked:
            fleet.submit(request, heard)
        for request in asked:
            heard.wait_for_tokens(request.id, 5)
        up = fleet.reshard(["r0", "r1"], tp=2, **reshard_through_host.FORM)
        went_up = Counter(written)
        down = fleet.reshard("r0", tp=1, **reshard_through_host.FORM)
        heard.wait([request.id for request in asked])
        fleet.check()
        assert (up.status, down.status) == ("applied", "applied"), (up.why, down.why)
        assert fleet.status().totals.recomputed_tokens == 0
        events = [event for model in models for event in model.elastic.events()]
    for request in asked:
        assert same_unless_close(plain, request.prompt, heard.tokens[request.id])
    assert went_up["read back"] > 0
    assert went_up["written"] >= went_up["read back"] + up.moved_bytes
    assert written["written"] - went_up["written"] >= down.moved_bytes > 0
    assert not any(isinstance(event.action, Fetch) for event in events), "weights came from the other rank"
    assert sum(isinstance(event.action, Restore) for event in events) > 2
    for model in models:
        elastic.unwrap(model)
