"""`elastic vllm-args`: what a shell makes of its output are the options of vLLM's own command."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elastic.cli.main import main
from elastic.cli.vllm_args import to_arguments
from elastic.engines.vllm import support
from elastic.errors import ConfigError


@pytest.fixture(autouse=True)
def known_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "require_vllm", lambda: "0.32.0")
    monkeypatch.setattr(support, "worker_name", lambda: "worker")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    """The options that a shell would give to vLLM."""
    assert main(["vllm-args", *arguments]) == 0
    words = capsys.readouterr().out.split()
    return dict(zip(words[::2], words[1::2], strict=True))


def test_the_words_are_options_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    words = printed(
        capsys,
        "--budget",
        "30GiB",
        "--policy",
        "balanced",
        "--variants",
        "int4",
        "--slo-ttft",
        "2",
        "--page-bytes",
        "2MiB",
    )
    assert words["--quantization"] == "elastic"
    assert words["--worker-cls"] == "worker"
    settings = json.loads(words["--additional-config"])["elastic"]
    assert (settings["budget_bytes"], settings["variants"], settings["slo"]["ttft_s"]) == (30 << 30, ["int4"], 2.0)
    assert settings["page_bytes"] == 2 << 20


def test_a_connector_of_the_user_is_one_of_two(capsys: pytest.CaptureFixture[str]) -> None:
    theirs = '{"kv_connector":"OffloadingConnector","kv_role":"kv_both"}'
    words = printed(capsys, "--budget", "1GiB", "--connector", theirs, "--no-promise", "--no-moves")
    config: dict[str, Any] = json.loads(words["--kv-transfer-config"])
    first, second = config["kv_connector_extra_config"]["connectors"]
    assert first["kv_connector_extra_config"] == {"promise": False, "move_blocks": False}
    assert second == json.loads(theirs)


@pytest.mark.parametrize("wrong", ["no json", "[1]", "{}"])
def test_a_connector_that_is_none_is_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vllm-args", "--budget", "1GiB", "--connector", wrong]) == 2
    assert "--connector" in capsys.readouterr().err


def test_a_time_that_cannot_be_kept_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vllm-args", "--budget", "1GiB", "--slo-ttft", "0"]) == 2
    assert "ttft_s" in capsys.readouterr().err


def test_a_value_with_spaces_is_refused() -> None:
    with pytest.raises(ConfigError, match="spaces"):
        to_arguments({"additional_config": {"order": "my profile.json"}})
