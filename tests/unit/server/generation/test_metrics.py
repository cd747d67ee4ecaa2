"""The metrics that vLLM's public dashboards read are there, after the relabelling that ships."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from elastic.engines.base import Listener, Output, Request
from support.serving.fake_engine import FakeEngine
from support.serving.live_server import NAME, app_for

RELABELLING = Path(__file__).parents[4] / "docs" / "grafana" / "vllm_relabel.yml"
HISTOGRAMS = (
    "e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds",
    "request_time_per_output_token_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens",
    "request_max_num_generation_tokens", "request_prefill_kv_computed_tokens", "iteration_tokens_total",
)  # fmt: skip
OTHERS = (
    "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "prompt_tokens_total",
    "prompt_tokens_by_source_total", "prompt_tokens_cached_total", "prompt_tokens_cached_by_source_total",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "generation_tokens_total", "request_success_total",
    "num_preemptions_total",
)  # fmt: skip
OF_HTTP = ("http_requests_total", "http_request_duration_seconds_sum", "http_request_duration_seconds_count")
READ = [f"vllm:{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")]
READ += [f"vllm:{name}" for name in OTHERS]
"""What the panels of vLLM's dashboards ask for, but the use of the KV cache, which only a wrapped model has."""


def relabelled(name: str, labels: dict[str, str], rules: list[dict[str, Any]]) -> tuple[str, dict[str, str]]:
    """A sample after rules of Prometheus: each matches the whole of a value."""
    sample = {"__name__": name, **labels}
    for rule in rules:
        value = ";".join(sample.get(label, "") for label in rule["source_labels"])
        if match := re.fullmatch(rule["regex"], value):
            sample[rule["target_label"]] = match.expand(re.sub(r"\$(\d)", r"\\\1", rule["replacement"]))
    return sample.pop("__name__"), sample


@pytest.fixture(scope="module")
def samples() -> dict[str, tuple[dict[str, str], float]]:
    """Relabelled name -> labels and value of one of its samples, after two completions."""
    rules = yaml.safe_load(RELABELLING.read_text())["metric_relabel_configs"]
    with TestClient(app_for(FakeEngine())) as client:
        for most in (3, 1):
            asked = {"prompt": "x", "max_tokens": most, "temperature": 0, "ignore_eos": True}
            assert client.post("/v1/completions", json=asked).status_code == 200
        text = client.get("/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name, labels = relabelled(sample.name, sample.labels, rules)
            found[name] = labels, sample.value
    return found


@pytest.mark.parametrize("name", READ)
def test_what_vllms_dashboards_read_is_there(samples: dict[str, Any], name: str) -> None:
    labels, value = samples[name]
    assert (labels["model_name"], labels["engine"]) == (NAME, "0")
    assert value >= 0


@pytest.mark.parametrize("name", OF_HTTP)
def test_what_they_read_of_the_http_server_is_there(samples: dict[str, Any], name: str) -> None:
    labels, value = samples[name]
    assert (labels["handler"], labels["method"]) == ("/v1/completions", "POST")
    assert value > 0


def test_the_values_are_those_of_the_answers(samples: dict[str, Any]) -> None:
    for name, expected in {
        "vllm:inter_token_latency_seconds_count": 2,
        "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:request_time_per_output_token_seconds_count": 1,
        "vllm:request_generation_tokens_sum": 4,
        "vllm:request_prompt_tokens_sum": 2,
        "vllm:request_success_total": 2,
        "vllm:prefix_cache_queries_total": 2,
        "vllm:iteration_tokens_total_sum": 4,
        "vllm:iteration_tokens_total_count": 4,
        "http_requests_total": 2,
    }.items():
        assert samples[name][1] == expected
    assert samples["vllm:request_success_total"][0]["finished_reason"] == "length"


def test_the_use_of_the_kv_cache_is_renamed_too() -> None:
    rules = yaml.safe_load(RELABELLING.read_text())["metric_relabel_configs"]
    name, labels = relabelled("elastic_kv_cache_usage_perc", {"rank": "r1"}, rules)
    assert (name, labels["engine"]) == ("vllm:kv_cache_usage_perc", "r1")


def totals(client: TestClient, name: str, label: str) -> dict[str, float]:
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {s.labels[label]: s.value for family in families for s in family.samples if s.name == name}


def test_tokens_of_prompts_are_told_apart_by_where_they_are_from() -> None:
    asked = {"prompt": [1, 2, 3, 4], "max_tokens": 1, "temperature": 0}
    with TestClient(app_for(FakeEngine())) as client:
        for _ in range(2):
            client.post("/v1/completions", json={**asked, "n": 2})
        sources = totals(client, "elastic_prompt_tokens_by_source_total", "source")
        assert sources == {"local_compute": 5, "local_cache_hit": 3}, "answers of one request have one prompt"
        waiting = totals(client, "elastic_num_requests_waiting_by_reason", "reason")
        assert waiting == {"capacity": 0, "deferred": 0}


def test_why_answers_ended_that_are_not_complete() -> None:
    class Failing(FakeEngine):
        def submit(self, request: Request, listener: Listener) -> None:
            listener(Output(request.id, (), "cancelled" if len(request.prompt) > 1 else "failed", "it broke"))

    with TestClient(app_for(Failing())) as client:
        for prompt in ([1], [1, 2]):
            client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 3})
        assert totals(client, "elastic_request_success_total", "finished_reason") == {"error": 1, "abort": 1}
        assert totals(client, "elastic_http_requests_total", "status") == {"5xx": 2}
        client.post("/elsewhere", json={})
        client.get("/health")
        assert totals(client, "elastic_http_requests_total", "handler") == {"/v1/completions": 2, "none": 1}
