"""`GET /metrics` for Prometheus.

Latencies of requests are histograms under the names that OpenTelemetry's semantic conventions for generative AI give
them (`gen_ai_server_*`), with their buckets. What has no standard name has vLLM's words after `elastic_`, so that a
relabelling makes all of them vLLM's (`docs/grafana/vllm_relabel.yml`). Everything but the histograms and the count of
finish reasons is read when it is scraped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from elastic.engines.base import Engine
from elastic.server.fleets.views import RankViews
from elastic.server.generation.collector import Collector, Families, Histograms, Labels
from elastic.server.generation.fleet_collector import FleetCollector
from elastic.server.generation.response_stream import ChoiceStream

Operation = Literal["chat", "text_completion"]
_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
_PROVIDER = "elastic"
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TPOT_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_DURATION_S = tuple(0.01 * 2**i for i in range(14))
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_HISTOGRAMS = (
    ("time_to_first_token", "From a request's arrival to its first token.", _TTFT_S),
    ("time_per_output_token", "Per token after the first, of a request.", _TPOT_S),
    ("request_duration", "From arrival to the last token.", _DURATION_S),
)
_OF_REQUESTS = {
    "request_queue_time_seconds": ("From arrival to the first forward pass.", _DURATION_S),
    "request_prefill_time_seconds": ("From the first forward pass to the first token.", _DURATION_S),
    "request_decode_time_seconds": ("From the first token to the last.", _DURATION_S),
    "request_prompt_tokens": ("Tokens of a prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens of an answer.", _TOKENS),
    "request_max_num_generation_tokens": ("Tokens that an answer might have had.", _TOKENS),
    "request_prefill_kv_computed_tokens": ("Tokens of a prompt whose KV was not there already.", _TOKENS),
}
_UNFINISHED = {"cancelled": "abort", "failed": "error"}
"""Why answers ended that are not complete, in vLLM's words."""


class InterTokenLatency:
    """A histogram of the gaps between the tokens of answers: each costs little, as there is one for each token."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._counts = [0] * (len(_TPOT_S) + 1)
        self._sum_s = 0.0

    def observe(self, gap_s: float) -> None:
        """Count a gap. Called on the event loop."""
        self._counts[bisect_left(_TPOT_S, gap_s)] += 1
        self._sum_s += gap_s

    def collect(self) -> Iterator[Metric]:
        """Yield the histogram."""
        help = "From tokens of an answer to its next ones."
        values: Histograms = {(): (_TPOT_S, self._counts, self._sum_s)}
        yield Families(self._name).histogram("inter_token_latency_seconds", help, values)


@dataclass(eq=False)
class PromptTokens:
    """Counts tokens of prompts by whether their KV was there already, under each name that vLLM's panels ask for."""

    families: Families
    computed: int = 0
    cached: int = 0

    def observe(self, tokens: int, cached: int) -> None:
        """Count a prompt. Called on the event loop."""
        self.computed += tokens - cached
        self.cached += cached

    def collect(self) -> Iterator[Metric]:
        """Yield the counters."""
        counter, computed, cached = self.families.counter, self.computed, self.cached
        yield counter("prefix_cache_queries", "Tokens of prompts that have begun.", {(): computed + cached})
        yield counter("prefix_cache_hits", "Those whose KV was there already.", {(): cached})
        yield counter("prompt_tokens_cached", "The same.", {(): cached})
        sources: dict[Labels, float] = {("local_compute",): computed, ("local_cache_hit",): cached}
        yield counter("prompt_tokens_by_source", "Tokens of prompts by where their KV is from.", sources, "source")
        sources = {("device",): cached}
        yield counter("prompt_tokens_cached_by_source", "Those that were there, by where.", sources, "source")


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, engine: Engine, name: str, ranks: RankViews | None = None) -> None:
        """`ranks` are those of an engine that is a fleet."""
        self._name = name
        self.registry = CollectorRegistry()
        self._ttft, self._tpot, self._duration = (
            Histogram(f"gen_ai_server_{what}_seconds", help, _LABELS, buckets=buckets, registry=self.registry)
            for what, help, buckets in _HISTOGRAMS
        )
        self._of_requests = {
            what: Histogram(f"elastic_{what}", help, ("model_name",), buckets=buckets, registry=self.registry)
            for what, (help, buckets) in _OF_REQUESTS.items()
        }
        self._success = Counter(
            "elastic_request_success", "Answers by why they ended.", ("model_name", "finished_reason"),
            registry=self.registry,
        )  # fmt: skip
        self.inter_token_latency = InterTokenLatency(name)
        self._prompt_tokens = PromptTokens(Families(name))
        self.registry.register(self.inter_token_latency)
        self.registry.register(self._prompt_tokens)
        self.registry.register(Collector(engine, name))
        if ranks is not None:
            self.registry.register(FleetCollector(ranks, name))
        ProcessCollector(registry=self.registry)

    def observe(self, operation: Operation, answer: ChoiceStream) -> None:
        """Observe an answer that has ended. The times of those that failed, or that a client gave up, do not count."""
        arrived, first, last = answer.request.arrived_s, answer.first_s, answer.last
        prompt, cached = len(answer.request.prompt), answer.cached_tokens
        if answer.first is answer and cached is not None:
            self._prompt_tokens.observe(prompt, cached)
        if last is not None:  # which is cancelled, as the engine has it, where a stop string was met
            whole = "length" if last.finish == "length" else "stop" if answer.complete else None
            self._success.labels(self._name, whole or _UNFINISHED.get(last.finish or "", "error")).inc()
        if arrived is None or first is None or last is None or not answer.complete:
            return
        labels = operation, _PROVIDER, self._name
        self._ttft.labels(*labels).observe(max(0.0, first - arrived))
        self._duration.labels(*labels).observe(max(0.0, last.at_s - arrived))
        if answer.generated > 1:
            self._tpot.labels(*labels).observe(max(0.0, last.at_s - first) / (answer.generated - 1))
        scheduled = first if answer.scheduled_s is None else answer.scheduled_s
        values = {
            "request_queue_time_seconds": scheduled - arrived,
            "request_prefill_time_seconds": first - scheduled,
            "request_decode_time_seconds": last.at_s - first,
            "request_prompt_tokens": prompt,
            "request_prefill_kv_computed_tokens": prompt - (cached or 0),
            "request_generation_tokens": answer.generated,
            "request_max_num_generation_tokens": answer.request.max_tokens,
        }
        for what, value in values.items():
            self._of_requests[what].labels(self._name).observe(max(0.0, value))

    def render(self, accept: str, others: Sequence[Metrics] = ()) -> tuple[bytes, str]:
        """Return the text of a scrape and its content type, in the format that the `Accept` header asks for.

        `others` are of models beside this one: their samples are in the same families, under their names.
        """
        encode, content_type = choose_encoder(accept)
        return encode(_Together([self.registry, *(each.registry for each in others)])), content_type


@dataclass(frozen=True)
class _Together:
    """Several registries as one, for an exposition: what several say of the process is said once."""

    registries: Sequence[CollectorRegistry]

    def collect(self) -> Iterator[Metric]:
        """Yield each family once."""
        families: dict[str, Metric] = {}
        for registry in self.registries:
            for metric in registry.collect():
                family = families.setdefault(metric.name, metric)
                if family is not metric and not metric.name.startswith("process_"):
                    family.samples += metric.samples
        yield from families.values()
