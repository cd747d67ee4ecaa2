"""`elastic fleet deploy`, `intend`, `undeploy` and `status` of a server whose models are deployed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from elastic.cli import serve
from elastic.cli.inputs.deployment_options import check_deployments, make_deployments
from elastic.cli.main import main, parser
from elastic.errors import ConfigError
from elastic.planning.deployment.policies import THETA
from elastic.planning.estimate.intent import Intent
from elastic.planning.estimate.performance import Load
from support.cluster.fake_deployments import FakeDeployments
from support.serving.live_server import CONTEXT, NAME, TOKENIZER, Live, live

TOKEN = "open sesame"


@pytest.fixture
def deployments(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDeployments]:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("ELASTIC_TOKEN", TOKEN)
    made = FakeDeployments()
    made.deploy("/models/small", Intent(), name=NAME)
    yield made
    for engine in made.engines.values():
        engine.stop()


@pytest.fixture
def served(deployments: FakeDeployments) -> Iterator[Live]:
    def options(path: str) -> dict[str, Any]:
        return {"tokenizer": TOKENIZER, "max_model_len": CONTEXT}

    with live(deployments[NAME], token=TOKEN, actions=True, deployments=deployments, model_options=options) as running:
        yield running


def test_a_model_is_deployed_changed_and_ended(
    served: Live, deployments: FakeDeployments, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--latency", "1.5", "--rate", "2", "--prompt", "64", "--weights", "full,int4"]
    assert main(["fleet", "deploy", served.url, "/models/other", *asked]) == 0
    assert "other serves as TP2 PP1 full" in capsys.readouterr().out
    intent = Intent(latency_s=1.5)
    assert deployments.asked[-1] == ("deploy", "/models/other", intent, Load(64, 128, 2), ["full", "int4"])
    assert main(["fleet", "intend", served.url, "other", "--intent", "gpu-hours", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "swap cpu#a to int8: 4,096 bytes of weights" in told
    assert "planned: TP1 PP1 full to TP1 PP1 int8; it would take about 0.5 s" in told
    assert deployments.asked[-1] == ("intend", "other", Intent("gpu_hours"), None, True)
    assert deployments.replicas is None, "as many as there are"
    assert main(["fleet", "undeploy", served.url, "other"]) == 0
    assert deployments.names() == (NAME,)


def test_replicas_are_asked_for_and_leave_the_intent_as_it_is(served: Live, deployments: FakeDeployments) -> None:
    assert main(["fleet", "deploy", served.url, "/models/other", "--replicas", "2"]) == 0
    assert deployments.replicas == "2"
    assert main(["fleet", "intend", served.url, "other", "--replicas", "3", "--dry-run"]) == 0
    assert (deployments.replicas, deployments.asked[-1]) == ("3", ("intend", "other", None, None, True))
    assert main(["fleet", "intend", served.url, "other", "--replicas", "1-3", "--intent", "memory"]) == 0
    assert deployments.asked[-1] == ("intend", "other", Intent("memory"), None, False)


def test_what_is_not_said_of_the_intent_and_of_the_load_stays(served: Live, deployments: FakeDeployments) -> None:
    load = ["--rate", "2", "--prompt", "64", "--new-tokens", "32"]
    assert main(["fleet", "deploy", served.url, "/models/other", "--intent", "latency", *load]) == 0
    assert main(["fleet", "intend", served.url, "other", "--dry-run"]) == 0
    assert deployments.asked[-1] == ("intend", "other", None, None, True)
    assert main(["fleet", "intend", served.url, "other", "--rate", "5"]) == 0
    assert deployments.asked[-1] == ("intend", "other", None, Load(64, 32, 5), False)
    assert main(["fleet", "intend", served.url, "other", "--intent", "cost", "--prompt", "9"]) == 0
    assert deployments.asked[-1] == ("intend", "other", Intent("cost"), Load(9, 32, 2), False)


def test_what_the_server_refuses_is_told(served: Live, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "deploy", served.url, "/large"]) == 2
    assert "it has no place" in capsys.readouterr().err
    assert main(["fleet", "intend", served.url, "third"]) == 2
    assert "no deployment 'third'" in capsys.readouterr().err


def test_deployments_are_given_less_of_a_device(
    served: Live, deployments: FakeDeployments, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fleet", "resize", served.url, "cpu#a", "40MiB"]) == 0
    assert deployments.asked[-1] == ("resize", "cpu#a", "40MiB")
    assert "cpu#a has 0.00 MiB for models, 0.00 MiB free" in capsys.readouterr().out
    assert main(["fleet", "resize", served.url, "cpu#b", "1GiB"]) == 2
    assert "there is no device 'cpu#b'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--intent", "cost"], "--intent is for deployments; say on what: --devices DEVICES"),
        (["--harvest"], "--harvest is for deployments"),
        (["--replicas", "2"], "--replicas is for deployments"),
        (["--tolerance", "0.1"], "--tolerance is for deployments"),
        (["--theta", "0.5"], "--theta is for deployments"),
        (["--latency", "0"], "--latency is for deployments"),
        (["--devices", "cpu#a=1GiB", "--max-queue", "0"], "--max-queue does not go with --devices"),
        (["--new-tokens", "5"], "--new-tokens is for deployments"),
        (["--devices", "cpu#a=1GiB", "--prompt", "0"], "prompts and outputs of 1 token or more"),
        (["--devices", "cpu#a=1GiB", "--ranks", "2"], "--ranks does not go with --devices"),
        (["--devices", "cpu#a=1GiB", "--variants", "int4"], "--variants does not go with --devices"),
        (["--devices", "cpu#a=1GiB", "--prepack"], "--prepack does not go with --devices"),
        (["--devices", "cpu#a=1GiB", "--slo-ttft", "1"], "--slo-ttft does not go with --devices"),
        (["--devices", "cpu#a=1GiB", "--latency", "0"], "latency_s=0"),
    ],
)
def test_options_of_serve_that_cannot_be_together_are_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_deployments(parser().parse_args(["serve", "MODEL", *arguments]))


def test_serve_makes_deployments_of_its_options() -> None:
    arguments = ["serve", "MODEL", "--devices", "cpu#a=1GiB,cpu#b=2GiB", "--weights", "full, 2:4", "--harvest"]
    made = make_deployments(parser().parse_args(arguments))
    assert [device.memory_bytes >> 30 for device in made.devices()] == [1, 2]
    assert made._weights == ("full", "2:4")
    assert made._order == ("hybrid", THETA)
    made = make_deployments(parser().parse_args([*arguments, "--place-by", "packing", "--theta", "0.4"]))
    assert made._order == ("packing", 0.4)
    with pytest.raises(ConfigError, match="theta=-1"):
        make_deployments(parser().parse_args([*arguments, "--theta", "-1"]))
    assert made._harvester is not None


@pytest.mark.parametrize(
    ("arguments", "load"),
    [([], None), (["--rate", "2"], Load(512, 128, 2)), (["--prompt", "64", "--new-tokens", "9"], Load(64, 9))],
)
def test_serve_is_ready_for_the_load_that_was_said(
    arguments: list[str], load: Load | None, deployments: FakeDeployments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployments, "stop", lambda **_: None, raising=False)
    monkeypatch.setattr(deployments, "start", lambda: None, raising=False)
    monkeypatch.setattr(serve, "make_deployments", lambda _: deployments)
    unread = {"tokenizer": None, "max_model_len": None, "sampling_defaults": {}, "grammars": None}
    monkeypatch.setattr(serve, "answering", lambda *_: unread)
    command = ["serve", "/models/third", "--devices", "cpu=1GiB", "--intent", "latency"]
    options = parser().parse_args([*command, *arguments])
    with ExitStack() as stack:
        serve.deployed(options, "third", stack)
    assert deployments.asked[-1] == ("deploy", "/models/third", Intent("latency"), load, None)


@pytest.mark.parametrize(("losses", "forms"), [((), ("full",)), (("--losses", "int8=0.001"), ("full", "int8"))])
def test_no_form_is_chosen_whose_loss_nobody_has_told(losses: tuple[str, ...], forms: tuple[str, ...]) -> None:
    made = make_deployments(parser().parse_args(["serve", "MODEL", "--devices", "cpu=1GiB", *losses]))
    assert made._weights == forms
