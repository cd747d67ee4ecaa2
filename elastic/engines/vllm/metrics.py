"""The figures of the KV capacity in vLLM's own log and `/metrics`, as those of a KV connector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

GAUGES = {
    "usable_blocks": "KV blocks that requests may have now",
    "taken_blocks": "KV blocks that live requests have, or were promised",
    "mapped_sectors": "Sectors of KV blocks mapped at every rank",
}
COUNTERS = {
    "moved_blocks": "KV blocks moved out of the way of a shrink",
    "capacity_changes": "Times that sectors were mapped or unmapped",
}


class CapacityStats(KVConnectorStats):  # type: ignore[misc]
    """The last values of the gauges, and what was counted since they were told before."""

    data: dict[str, int]

    def aggregate(self, other: CapacityStats) -> CapacityStats:
        """Join with later figures."""
        counted = {name: self.data.get(name, 0) + other.data.get(name, 0) for name in COUNTERS}
        return CapacityStats({**self.data, **other.data, **counted})

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM logs."""
        return dict(self.data)

    def reset(self) -> None:
        """Forget the figures."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether there is nothing to log."""
        return not self.data


class CapacityPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The figures for Prometheus, as `elastic:usable_blocks` and so on.

    Those of an engine before are unregistered, as vLLM does with its own.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        for collector in list(REGISTRY._collector_to_names):
            if getattr(collector, "_name", "").startswith("elastic:"):
                REGISTRY.unregister(collector)

        def make(kind: Any, name: str, text: str) -> Any:
            metric = kind(name=f"elastic:{name}", documentation=text, labelnames=labelnames)
            return create_metric_per_engine(metric, self.per_engine_labelvalues)

        self._gauges = {name: make(metric_types[Gauge], name, text) for name, text in GAUGES.items()}
        self._counters = {name: make(metric_types[Counter], name, text) for name, text in COUNTERS.items()}

    def observe(self, transfer_stats_data: Mapping[str, int], engine_idx: int = 0) -> None:
        """Take in figures that were told."""
        for name, gauge in self._gauges.items():
            if name in transfer_stats_data:
                gauge[engine_idx].set(transfer_stats_data[name])
        for name, counter in self._counters.items():
            counter[engine_idx].inc(transfer_stats_data.get(name, 0))
