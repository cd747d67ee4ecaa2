"""`GET /metrics` for Prometheus.

Latencies of requests are histograms under the names that OpenTelemetry's semantic conventions for generative AI give
them (`gen_ai_server_*`), with their buckets. The state of scheduler and cache has no standard name: each server has its
own prefix before much the same words. Elastic's are vLLM's words after `elastic_` (docs/serving.md has the table).
Everything but the histograms is read when it is scraped.
"""

from __future__ import annotations

from typing import Literal

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder

from elastic.engines.base import Engine
from elastic.server.generation.collector import Collector
from elastic.server.generation.response_stream import ChoiceStream

Operation = Literal["chat", "text_completion"]
_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
_PROVIDER = "elastic"
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TPOT_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_DURATION_S = tuple(0.01 * 2**i for i in range(14))
_HISTOGRAMS = (
    ("time_to_first_token", "From a request's arrival to its first token.", _TTFT_S),
    ("time_per_output_token", "Per token after the first, of a request.", _TPOT_S),
    ("request_duration", "From arrival to the last token.", _DURATION_S),
)


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._name = name
        self._registry = CollectorRegistry()
        self._ttft, self._tpot, self._duration = (
            Histogram(f"gen_ai_server_{what}_seconds", help, _LABELS, buckets=buckets, registry=self._registry)
            for what, help, buckets in _HISTOGRAMS
        )
        self._registry.register(Collector(engine, name))
        ProcessCollector(registry=self._registry)

    def observe(self, operation: Operation, answer: ChoiceStream) -> None:
        """Observe an answer that has ended. Failed ones and those that a client gave up do not count."""
        arrived, first, last = answer.request.arrived_s, answer.first_s, answer.last
        if arrived is None or first is None or last is None or not answer.complete:
            return
        labels = operation, _PROVIDER, self._name
        self._ttft.labels(*labels).observe(max(0.0, first - arrived))
        self._duration.labels(*labels).observe(max(0.0, last.at_s - arrived))
        if answer.generated > 1:
            self._tpot.labels(*labels).observe(max(0.0, last.at_s - first) / (answer.generated - 1))

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return the text of a scrape and its content type, in the format that the `Accept` header asks for."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type
