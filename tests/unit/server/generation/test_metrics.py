"""The metrics that vLLM's public dashboards read are there, after the relabelling that ships."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from support.serving.fake_engine import FakeEngine
from support.serving.live_server import NAME, app_for

RELABELLING = Path(__file__).parents[4] / "docs" / "grafana" / "vllm_relabel.yml"
HISTOGRAMS = (
    "e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds",
    "request_time_per_output_token_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens",
    "request_max_num_generation_tokens",
)  # fmt: skip
OTHERS = (
    "num_requests_running", "num_requests_waiting", "prompt_tokens_total", "generation_tokens_total",
    "request_success_total", "num_preemptions_total",
)  # fmt: skip
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
    assert labels["model_name"] == NAME
    assert value >= 0


def test_the_values_are_those_of_the_answers(samples: dict[str, Any]) -> None:
    for name, expected in {
        "vllm:inter_token_latency_seconds_count": 2,
        "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:request_time_per_output_token_seconds_count": 1,
        "vllm:request_generation_tokens_sum": 4,
        "vllm:request_prompt_tokens_sum": 2,
        "vllm:request_success_total": 2,
    }.items():
        assert samples[name][1] == expected
    assert samples["vllm:request_success_total"][0]["finished_reason"] == "length"


def test_the_use_of_the_kv_cache_is_renamed_too() -> None:
    rules = yaml.safe_load(RELABELLING.read_text())["metric_relabel_configs"]
    assert relabelled("elastic_kv_cache_usage_perc", {}, rules)[0] == "vllm:kv_cache_usage_perc"
