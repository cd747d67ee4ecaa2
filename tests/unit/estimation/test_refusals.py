"""Models that the engine refuses: estimates say so from the config alone, in its words, and count their bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t

import elastic
from elastic.cli.main import main
from elastic.engines.continuous import ContinuousEngine
from elastic.errors import ConfigError
from elastic.estimation.device_list import parse_devices
from elastic.estimation.estimate import Estimator
from elastic.estimation.model_layout import layout_of
from elastic.estimation.placement import ModelSpace, place_models
from elastic.planning.deployment.placing import Refusal
from elastic.planning.estimate.configuration import FULL, Configuration
from elastic.planning.estimate.performance import Load
from support import architectures
from support.serving.generations import SERVED

OTHERS: dict[str, Any] = {
    "bert": lambda: t.BertConfig(**architectures.SMALL),
    "not-causal": lambda: t.LlamaConfig(**architectures.GQA, is_causal=False),
    "diff-llama": lambda: t.DiffLlamaConfig(**architectures.GQA),
    "moshi": lambda: t.MoshiConfig(**{**architectures.GQA, "ffn_dim": 48}, sliding_window=16),
    "doge": lambda: t.DogeConfig(**architectures.GQA),
    "afmoe": lambda: t.AfmoeConfig(**architectures.GQA, **architectures.MOE, head_dim=8, sliding_window=16),
    "llama-dynamic": lambda: t.LlamaConfig(**architectures.GQA, rope_parameters=DYNAMIC),
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
FALCON = t.FalconConfig(**architectures.SMALL)
WORDS = "FalconForCausalLM attends by code of its own"


def engine_says(config: Any) -> str:
    """What the engine has against a real model, wrapped; "": nothing."""
    model = t.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    elastic.wrap(model, places=["cpu#refusals=64MiB/4KiB"])
    try:
        with ContinuousEngine(model):
            return ""
    except ConfigError as error:
        return str(error)
    finally:
        elastic.unwrap(model)


@pytest.mark.parametrize("name", [*architectures.CONFIGS, *OTHERS])
def test_an_estimate_refuses_what_the_engine_refuses_in_its_words(name: str) -> None:
    make = architectures.CONFIGS.get(name) or OTHERS[name]
    said = engine_says(make())
    assert bool(said) == (name not in SERVED | {"afmoe", "llama-dynamic"})
    estimates = elastic.estimate(make(), "cpu=1GiB", load=Load(16, 4), weights="full")
    assert {each.why_not for each in estimates} == {said}


def test_a_model_is_asked_as_it_is_and_stays_so() -> None:
    """One in training, that is wrapped, or of weights that are elsewhere is asked without them."""
    random = torch.get_rng_state()
    model = architectures.build("gpt-oss").train()
    drawn = torch.get_rng_state()
    assert layout_of(model).refusal == ""
    assert torch.equal(torch.get_rng_state(), drawn)
    assert model.training
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    model.eval()
    elastic.wrap(model, places=["cpu#asked=64MiB/4KiB"])
    try:
        model.elastic.release([1])
        assert layout_of(model).refusal == ""
    finally:
        elastic.unwrap(model)
    torch.set_rng_state(random)
    layout_of(architectures.CONFIGS["gpt-oss"]()).refusal  # noqa: B018
    assert torch.equal(torch.get_rng_state(), random)


class Quantized(torch.nn.Parameter):
    """A parameter of another library's kind, whose module reads more of it than there is without data."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty_like:
            raise NotImplementedError("no kernel for meta")
        return super().__torch_function__(func, types, args, kwargs or {})


class QuantizedLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight.codes)  # type: ignore[arg-type]


@pytest.mark.parametrize("places", [None, ["cpu#asked=64MiB/4KiB"]])
def test_a_model_that_another_library_quantized_or_holds_tensors_of_is_tried_by_its_config(places: Any) -> None:
    model = architectures.build("llama-gqa")
    up_proj = model.model.layers[0].mlp.up_proj
    up_proj.weight = Quantized(up_proj.weight.detach(), requires_grad=False)
    up_proj.weight.codes = up_proj.weight.detach().as_subclass(torch.Tensor)
    up_proj.__class__ = QuantizedLinear
    held = layout_of(model).fixed
    if places:
        elastic.wrap(model, places=places)
        model.elastic.release([1])
    else:
        model.derived = torch.ones(1, requires_grad=True) * 2  # no copy can be made of what was computed
    try:
        layout = layout_of(model)
        assert (layout.refusal, layout.fixed) == ("", held)
        assert elastic.estimate(model, "cpu=1GiB", load=Load(16, 4), weights="full")[0].fits
    finally:
        if places:
            elastic.unwrap(model)


class OnHost(t.LlamaForCausalLM):
    def forward(self, input_ids: Any, cache: Any = None, use_cache: Any = None, **inputs: Any) -> Any:
        return super().forward(torch.from_numpy(input_ids.numpy()), cache=cache, use_cache=use_cache, **inputs)


class WithSize(t.LlamaForCausalLM):
    def __init__(self, config: Any, size: int) -> None:
        super().__init__(config)


class NoPositions(t.LlamaForCausalLM):
    def forward(self, input_ids: Any, cache: Any = None, use_cache: Any = None) -> Any:
        return super().forward(input_ids)


@pytest.mark.parametrize(
    ("kind", "size", "words"),
    [(OnHost, (), ""), (WithSize, (4,), ""), (NoPositions, (), "got an unexpected keyword argument")],
)
def test_what_only_a_model_without_data_cannot_do_is_not_held_against_it(kind: Any, size: Any, words: str) -> None:
    said = layout_of(kind(architectures.CONFIGS["llama-gqa"](), *size)).refusal
    assert words in said
    assert bool(said) == bool(words)


def test_what_is_refused_has_bytes_and_as_planned_all_figures() -> None:
    (refused,) = elastic.estimate(FALCON, "h100", weights="full", load=Load(16, 4))
    (planned,) = elastic.estimate(FALCON, "h100", weights="full", load=Load(16, 4), planned=True)
    assert refused.why_not.startswith(WORDS)
    assert (planned.fits, planned.ranks, planned.requests) == (True, refused.ranks, refused.requests)
    assert planned.memory_bytes > sum(p.nbytes for p in layout_of(FALCON).model.parameters())
    by_paper = elastic.estimate(FALCON, "h100", weights="full", load=Load(16, 4), method="paper")
    assert by_paper[0].why_not == refused.why_not


def test_what_is_refused_has_no_place_unless_shapes_are_what_is_asked_for() -> None:
    placed = [
        place_models({"falcon": FALCON}, "2*h100", ModelSpace(Load(16, 4), **options)).models[0][1]
        for options in ({}, {"planned": True}, {"any_model": True})
    ]
    assert [isinstance(each, Refusal) for each in placed] == [True, False, False]
    assert WORDS in str(placed[0])


def test_commands_say_why_once_and_what_it_would_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FALCON.save_pretrained(tmp_path)
    command = [str(tmp_path), "--devices", "2*h100", "--prompt", "16", "--new-tokens", "4"]
    for name, seen in (("estimate", "TP1 PP1 full, MiB"), ("place", "no place")):
        assert main([name, *command]) == 2
        out = capsys.readouterr().out
        assert out.count(WORDS) == 1
        assert seen in out
        assert main([name, *command, "--planned"]) == 0
        assert WORDS not in capsys.readouterr().out
    assert main(["estimate", *command, "--json"]) == 2
    first = json.loads(capsys.readouterr().out)["configurations"][0]
    assert first["why_not"].startswith(WORDS)
    assert first["ranks"][0]["layers"] > 0


@pytest.mark.parametrize(
    ("configuration", "words"),
    [
        (Configuration(2, 2, "int4"), "not shared by ranks"),
        (Configuration(2, 2, FULL), ""),
        (Configuration(1, 2, "int8"), ""),
        (Configuration(2, 1, "int8"), "not shared by ranks"),
        (Configuration(1, 1, "int8"), ""),
        (Configuration(4, 1, FULL), ""),
        (Configuration(1, 3, FULL), ""),
    ],
)
def test_what_a_fleet_cannot_have_is_said_in_words(configuration: Configuration, words: str) -> None:
    layout = layout_of(architectures.CONFIGS["llama-gqa"]())
    ours, planned = (
        Estimator(layout, parse_devices("4*h100"), Load(16, 4), 64, None, planned=planned).refusal(configuration)
        for planned in (False, True)
    )
    assert words in ours
    assert bool(words) == bool(ours)
    assert planned == ""
