"""`elastic.estimate` and the command: what is ranked, what does not fit, and why."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import elastic
from elastic.assets import MODEL_DIR
from elastic.cli.main import main
from elastic.cli.predictions import estimate as command
from elastic.engines.base import Request
from elastic.engines.continuous import ContinuousEngine
from elastic.errors import ConfigError
from elastic.estimation.activations import bound_bytes, peak_bytes
from elastic.estimation.device_list import parse_devices
from elastic.estimation.estimate import estimate
from elastic.estimation.model_layout import layout_of
from elastic.estimation.profile import CostProfile, measure_fingerprints
from elastic.estimation.profiles.store import device_name
from elastic.planning.estimate.configuration import FULL, Configuration
from elastic.planning.estimate.intent import OBJECTIVES
from elastic.planning.estimate.layer_cost import LayerCost
from elastic.planning.estimate.performance import Handovers
from elastic.planning.measured_cost import LinearLatency
from elastic.planning.pipeline.chunk_cost import ChunkCost
from support import architectures
from support.serving.generations import serve

LLAMA_2_70B = transformers.LlamaConfig(
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    max_position_embeddings=4096,
)


def test_a_config_is_left_as_it_was() -> None:
    """Transformers writes the dtype into it, in which the next estimate would be."""
    config = transformers.LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    before = copy.deepcopy(config)
    first = estimate(config, "h100", weights="full")
    estimate(config, "cpu=1GiB")
    estimate(config, "h100", dtype=torch.float64)
    assert estimate(config, "h100", weights="full") == first
    assert config.to_dict() == before.to_dict()
    for dtype in (torch.int8, torch.float8_e4m3fn, 5):
        with pytest.raises(ConfigError, match=r"dtype=.* must be a floating point dtype, such as torch.bfloat16"):
            estimate(config, "h100", dtype=dtype)  # type: ignore[arg-type]


def test_a_model_larger_than_this_machine_is_ranked_from_its_config() -> None:
    """Half of 138 GB of weights do not fit 48 GB; int4 fits one device, as full weights in four do."""
    load = elastic.Load(prompt=1024, new=100)
    found = estimate(LLAMA_2_70B, "4*a6000", load=load, weights=("full", "int4"), intent="latency")
    by_name = {str(each.configuration): each for each in found}
    assert len(by_name) == 14
    assert by_name["TP1 PP1 int4"].fits
    assert by_name["TP1 PP4 full"].fits
    assert "a6000#0 lacks" in by_name["TP1 PP2 full"].why_not
    assert "not shared by ranks" in by_name["TP2 PP1 int4"].why_not
    fitting = [each for each in found if each.fits]
    assert found[: len(fitting)] == tuple(fitting)
    assert [each.latency_s for each in fitting] == sorted(each.latency_s for each in fitting)
    assert {each.basis for each in found} == {"data sheet"}
    best = by_name["TP1 PP4 full"]
    least_s = 137e9 / 768e9  # to read the weights once
    assert least_s < best.tpot_s < 1.1 * least_s
    assert sum(rank.layers for rank in best.ranks) == pytest.approx(80 * 2 * 855_638_016 + 80 * 2 * 8192 * 2, rel=0.01)
    assert all(rank.used + rank.copied + rank.kv == rank.total for rank in best.ranks)
    hours = min(fitting, key=lambda each: each.gpu_hours)
    assert hours.configuration.ranks == 1


def test_intents_choose_configurations_of_their_own() -> None:
    """Of the model of the paper's figure 1 on its eight devices: many ranks are fast, fewer cheap, one is small."""
    load = elastic.Load(prompt=1024, new=100)
    chosen = {}
    for intent in OBJECTIVES:
        found = estimate(LLAMA_2_70B, "8*a6000", load=load, weights=("full", "int4"), intent=intent, planned=True)
        chosen[intent] = str(found[0].configuration)
        assert found[0].value(intent) == min(each.value(intent) for each in found if each.fits)
    assert chosen == {
        "latency": "TP8 PP1 int4",
        "cost": "TP4 PP1 int4",
        "memory": "TP1 PP1 int4",
        "gpu_hours": "TP1 PP1 int4",
    }


def test_the_chosen_configuration_computes_as_many_requests_at_a_time_as_it_says() -> None:
    """The best one of a config, for real: all of its requests have blocks at the same time, and end."""
    model = architectures.build("llama-gqa")
    load = elastic.Load(prompt=60, new=40)
    options: dict[str, Any] = {"weights": ("full", "int8", "2:4"), "kv": ("full", "int8"), "prefetch_buffers": 1}
    found = estimate(model.config, "cpu=4MiB", load=load, intent="memory", **options)
    best = next(each for each in found if each.fits)
    weights, kv = best.configuration.weights, best.configuration.kv
    elastic.wrap(model, places=f"cpu={best.ranks[0].place_bytes}", variants=(weights,) if weights != "full" else ())
    try:
        if weights != "full":
            model.elastic.swap(range(3), weights)
        engine = ContinuousEngine(model, share_prefixes=False, kv_cache_dtype="auto" if kv == "full" else kv)
        together: list[int] = []
        engine.reports.on_step = lambda report: together.append(engine.reports.load().running)
        with engine:
            requests = [Request((5,) * 60, 40, ignore_eos=True) for _ in range(best.requests)]
            heard = serve(engine, requests)
        assert all(heard.ends[request.id].finish == "length" for request in requests)
        assert max(together) == best.requests > 2
    finally:
        elastic.unwrap(model)


def test_keys_and_values_in_8_bits_leave_room_for_more_requests() -> None:
    """1,124 tokens are 36 blocks of 32, or 37 of half the bytes; a step copies 2 layers of 20 more, or thrice that."""
    load = elastic.Load(prompt=1024, new=100)
    found = estimate(LLAMA_2_70B, "4*a6000", load=load, weights=("full",), kv=("full", "int8"))
    by_name = {str(each.configuration): each for each in found if each.fits}
    assert sorted(name for name in by_name if "KV int8" in name) == [
        "TP1 PP3 full KV int8",
        "TP1 PP4 full KV int8",
        "TP2 PP2 full KV int8",
    ]
    full, int8 = by_name["TP1 PP4 full"].requests, by_name["TP1 PP4 full KV int8"].requests
    assert int8 / full == pytest.approx(2 * 36 / 37 * (20 / 26) / (20 / 22), rel=0.02)


def test_a_larger_device_has_room_for_more_requests_and_takes_no_more_memory_for_one() -> None:
    """Logits of requests that there is room for, and that do not run, take none; so a smaller cache saves memory."""
    config = transformers.LlamaConfig(num_hidden_layers=4, vocab_size=150_000)
    forms: dict[str, Any] = {"weights": ("full",), "kv": ("full", "int8"), "intent": "memory"}
    small, large = (estimate(config, f"a6000={size}", **forms) for size in ("5GiB", "8GiB"))
    assert [str(each.configuration) for each in small] == ["TP1 PP1 full KV int8", "TP1 PP1 full"]
    assert [each.memory_bytes for each in small] == [each.memory_bytes for each in large]
    assert all(one.requests < other.requests for one, other in zip(small, large, strict=True))
    assert all(each.running == 1 for each in small)


def test_the_memory_that_is_estimated_serves_as_many_requests_as_it_says() -> None:
    """A place of the estimated budget has room for the estimated requests and not for one more."""
    load = elastic.Load(prompt=100, new=28)
    forms: dict[str, Any] = {"weights": ("full", "int4"), "kv": ("full", "int8")}
    found = estimate(MODEL_DIR, "cpu=40MiB", load=load, prefetch_buffers=1, **forms)
    assert len(found) == 4
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    for each in found:
        weights = each.configuration.weights
        elastic.wrap(model, places=f"cpu={each.ranks[0].place_bytes}", variants=() if weights == "full" else (weights,))
        try:
            if weights != "full":
                model.elastic.swap(range(12), weights)
            dtype = "auto" if each.configuration.kv == "full" else "int8"
            engine = ContinuousEngine(model, share_prefixes=False, kv_cache_dtype=dtype)
            names = [str(number) for number in range(each.requests + 1)]
            for name in names:
                engine._blocks.expect([name], load.tokens)
            admitted = [engine._blocks.admit(n, [0] * load.tokens, load.tokens, share=False) is not None for n in names]
            for name in names:
                engine._blocks.forget(name)
            engine.stop()
            assert admitted == [True] * each.requests + [False]
            assert each.requests > 10
        finally:
            elastic.unwrap(model)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3-moe", "qwen2-sliding", "gemma2", "gpt-oss", "deepseek-v3"])
def test_batches_take_no_more_memory_than_is_estimated(name: str) -> None:
    """The most bytes of tensors that are alive in a step of the engine, at several lengths and batches."""
    model = architectures.build(name)
    elastic.wrap(model, places="cpu=16MiB")
    engine = ContinuousEngine(model, max_batch_tokens=128, share_prefixes=False)
    layout = layout_of(model)
    try:
        for mix in (((0, 128),), ((256, 64),), ((100, 1),) * 16, ((0, 64), (200, 1), (180, 32))):
            most, bound = peak_bytes(engine, mix), bound_bytes(layout, mix, FULL, "cpu")
            assert bound / 4 < most <= bound, mix
    finally:
        engine.stop()
        elastic.unwrap(model)


def test_measured_costs_count_for_the_devices_that_they_were_measured_on() -> None:
    (kind,) = layout_of(MODEL_DIR).kinds
    cost = ChunkCost(1e-8, 1e-8, 1e-5, 1e-4, 9e-5)
    profile = CostProfile("cpu", {(kind.name, "full"): cost}, {"full": cost})
    load = elastic.Load(prompt=100, new=50)
    full, int8 = estimate(MODEL_DIR, "cpu=40MiB", load=load, weights=("full", "int8"), profile=profile)
    assert full.basis == "measured"
    assert full.ttft_s == pytest.approx(13 * (100 * (1e-8 * 101 + 1e-5) + 1e-4))
    assert full.latency_s == pytest.approx(full.ttft_s + 49 * full.tpot_s)
    assert "measure it" in int8.why_not
    forms = ("full", "int8")
    same, eight = estimate(MODEL_DIR, "cpu=40MiB", load=load, weights=("full",), kv=forms, profile=profile)
    assert (same.latency_s, same.why_not, str(eight.configuration)) == (full.latency_s, "", "TP1 PP1 full KV int8")
    assert "measure it" in eight.why_not, "nobody measured keys and values in 8 bits"
    bound = full.ranks[0].activations
    profile = replace(profile, activations={"full": 0.5}, scratch_bytes={"full": 1000})
    measured, _ = estimate(MODEL_DIR, "cpu=40MiB", load=load, weights=("full", "int8"), profile=profile)
    assert measured.ranks[0].activations == pytest.approx(bound / 2 + 1000, abs=1)
    assert measured.ranks[0].kv > full.ranks[0].kv, "what batches do not take is room for keys and values"
    with pytest.raises(ConfigError, match="it was measured on cpu, the devices are h100"):
        estimate(MODEL_DIR, "h100", profile=profile)


@pytest.mark.parametrize(("devices", "more"), [("cpu#a=40MiB,cpu#b=40MiB", 2), ("2*h100", 1)])
def test_a_stage_on_a_cpu_keeps_memory_for_the_batches_of_each_instance(devices: str, more: int) -> None:
    found = {(each.configuration.tp, each.configuration.pp): each for each in estimate(MODEL_DIR, devices)}
    assert found[1, 2].ranks[0].activations == more * found[1, 1].ranks[0].activations


def test_one_rank_replays_decode_steps_and_several_do_not() -> None:
    (kind,) = layout_of(MODEL_DIR).kinds
    cost = LayerCost(((1, 1e-3), (64, 2e-3)), 0.0, 0.0, 0.0, 0.0)
    profiles = [
        CostProfile("cpu", {(kind.name, "full"): c}, {"full": c}) for c in (cost, replace(cost, replay_saving=2e-4))
    ]
    options = {"load": elastic.Load(prompt=100, new=50), "weights": ("full",)}
    called, replayed = (list(estimate(MODEL_DIR, "cpu#a=40MiB,cpu#b=40MiB", profile=p, **options)) for p in profiles)
    layers = len(layout_of(MODEL_DIR).decoder.layers)
    by_name = {str(each.configuration): each for each in called}
    assert len(by_name) > 1
    for each in replayed:
        other, alone = by_name[str(each.configuration)], (each.configuration.tp, each.configuration.pp) == (1, 1)
        assert each.ttft_s == other.ttft_s
        assert other.tpot_s - each.tpot_s == pytest.approx((layers + 1) * 2e-4 if alone else 0.0)


def test_devices_are_places_or_data_sheets() -> None:
    sheets = parse_devices("2*h100=70GiB, l40s")
    assert [(d.name, d.memory_bytes) for d in sheets] == [
        ("h100#0", 70 << 30),
        ("h100#1", 70 << 30),
        ("l40s#0", 48 * 10**9),
    ]
    (place,) = parse_devices("cuda:1=20GiB", "a100-80gb")
    assert (place.name, place.memory_bytes, place.kind.instructions) == ("cuda:1", 20 << 30, "sm80")
    for text, words in (
        ("h101", "neither a data sheet"),
        ("cuda:0=1GiB", "name its data sheet"),
        ("cpu=1GiB,cpu=1GiB", "or one twice"),
        ("a6000, a6000", r"or one twice; write such as '2\*a6000'"),
        ("cpu=1GiB/2MiB", "names a page size"),
        ("0*h100", "use 1 to 4096"),
        ("9" * 5000 + "*h100", "use 1 to 4096"),
        ("2*h100=81GiB", r"'2\*h100=81GiB': a device of h100 has 74.51 GiB, not 81.00 GiB; give less"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse_devices(text)
    (whole,) = parse_devices("cuda:0=80GiB", "a100-80gb")  # what a sheet calls 80 GB
    assert whole.memory_bytes == 80 << 30
    with pytest.raises(ConfigError, match=r"cuda:0: a device of h100 has 74\.51 GiB, not 500\.00 GiB"):
        parse_devices("cuda:0=500GiB", "h100")
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        parse_devices("cuda:0=1GiB", "h10")
    with pytest.raises(ConfigError, match="devices of one kind: ask for each by itself"):
        estimate(MODEL_DIR, sheets)
    for text, words in (
        ("a100-40,a100-80", "'a100-40' is neither .* did you mean 'a100-40gb'"),
        ("8*a100", "did you mean 'a100-40gb' or 'a100-80gb'"),
        ("H100", "did you mean 'h100'"),
        ("cpu#a=1e3GiB", "'1e3GiB' is not a size"),
        ("", r"'' is neither a data sheet \(a100-40gb, .*\) nor a place$"),
        ("2*h100,h100=40GiB,h100=80GB", r"devices=\['h100#0'\] names none, or one twice"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse_devices(text)


def test_devices_of_one_sheet_may_have_several_sizes() -> None:
    """As where other programs have a part of some: the numbers go on, and the larger ones come first."""
    devices = parse_devices("h100=1GiB,2*h100=2GiB")
    assert [(d.name, d.memory_bytes >> 30) for d in devices] == [("h100#0", 1), ("h100#1", 2), ("h100#2", 2)]
    load = elastic.Load(prompt=64, new=16)
    by_name = {str(e.configuration): e for e in estimate(str(MODEL_DIR), devices, load=load, weights="full")}
    assert [rank.device for rank in by_name["TP1 PP3 full"].ranks] == ["h100#1", "h100#2", "h100#0"]
    assert [rank.total >> 30 for rank in by_name["TP1 PP3 full"].ranks] == [2, 2, 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"load": {}}, "load={} cannot be"),
        ({"losses": {"int4": math.nan}}, "losses: int4=nan"),
        ({"losses": {"int4": -0.1}}, "losses: int4=-0.1"),
        ({"losses": {"KV int8": "1"}}, "losses: KV int8='1'"),
        ({"losses": {"int9": 0.1}}, "'int9' is not known"),
        ({"losses": {"full": 0.1}}, "losses: 'full' is not known; use 'KV int8' or one of int8, int4"),
        ({"losses": {4: 0.1}}, "losses: 4 is not known"),
        ({"profile": "fast"}, "profile='fast' cannot be"),
        ({"planned": "no"}, "planned='no' cannot be"),
        ({"weights": ["int4", "int4"]}, r"weights=\['int4', 'int4'\] cannot be"),
        ({"kv": ["full", "full"]}, r"kv=\['full', 'full'\] cannot be"),
        ({"weights": "int9"}, "'int9' is not known"),
        ({"devices": None}, "devices=None are none"),
        ({"devices": "cpu#a=1GiB", "kind": "h100"}, "kind='h100' is the data sheet of places on CUDA"),
        ({"devices": [3]}, r"devices=\[3\] are none"),
        ({"losses": [("int4", 1)]}, r"losses=\[\('int4', 1\)\] cannot be"),
        ({"losses": []}, r"losses=\[\] cannot be"),
        ({"weights": []}, r"weights=\[\] cannot be; it must be a name of a form"),
        ({"weights": [None]}, r"weights=\[None\] cannot be"),
        ({"weights": 5}, "weights=5 cannot be"),
        ({"kv": []}, r"kv=\[\] cannot be"),
        ({"kv": ["fp8"]}, "kv='fp8' is not known; use 'full' or 'int8'"),
        ({"step_tokens": 0}, "step_tokens=0 cannot be"),
        ({"step_tokens": 1.5}, "step_tokens=1.5 cannot be"),
        ({"block_tokens": 0}, "block_tokens=0 cannot be"),
        ({"block_tokens": -1}, "block_tokens=-1 cannot be"),
        ({"block_tokens": 2.5}, "block_tokens=2.5 cannot be"),
        ({"prefetch_buffers": -1}, "prefetch_buffers=-1 cannot be"),
    ],
)
def test_arguments_that_say_nothing_are_refused_in_words(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        estimate(LLAMA_2_70B, **{"devices": "8*h100", **options})


def test_more_memory_has_room_for_more_requests_also_where_their_logits_are_large() -> None:
    config = copy.deepcopy(LLAMA_2_70B)
    config.num_hidden_layers, config.vocab_size, config.hidden_size = 1, 1_000_000, 4096
    sizes = [f"h100={gib}GiB" for gib in range(18, 24)]
    every = [estimate(config, size, load=elastic.Load(5, 128), weights=("full",))[0] for size in sizes]
    assert all(each.fits for each in every), [each.why_not for each in every]
    requests = [each.requests for each in every]
    assert requests == sorted(requests)


@pytest.mark.parametrize("keys", [5, 64])
def test_heads_that_no_model_can_have_are_refused(keys: int) -> None:
    config = transformers.LlamaConfig(num_attention_heads=32, num_key_value_heads=keys)
    with pytest.raises(ConfigError, match=f"32 heads of queries cannot share {keys} heads of keys and values evenly"):
        estimate(config, "1*h100")


def test_a_checkpoint_of_quantized_weights_is_refused_for_they_would_be_taken_for_full_ones(tmp_path: Path) -> None:
    config = json.loads((Path(MODEL_DIR) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"its weights are quantized \(mxfp4\), which is not estimated; name the"):
        estimate(tmp_path, "h100")


def test_one_form_of_weights_can_stand_alone() -> None:
    forms = {each.configuration.weights for each in estimate(LLAMA_2_70B, "8*h100", weights="int8", kv="full")}
    assert forms == {"int8"}


def test_a_gpu_that_this_machine_lacks_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for measure in (lambda: measure_fingerprints(LLAMA_2_70B, device="cuda:0"), lambda: device_name("cuda")):
        with pytest.raises(elastic.BackendUnavailable, match="sees no CUDA device"):
            measure()
    with pytest.raises(ConfigError, match="device='meta' cannot be; it must be of one of the types cpu, cuda"):
        measure_fingerprints(MODEL_DIR, device="meta")


def test_the_command_cuts_no_value_and_has_a_document_for_programs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    asked = ["estimate", str(MODEL_DIR), "--devices", "2*h100", "--kv", "full,int8"]
    for more in ([], ["--characterize"]):
        assert main([*asked, *more]) == 0
        shown = capsys.readouterr().out
        assert "…" not in shown
        assert ("weights, %" in shown) != bool(more)
    assert main([*asked, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    ranked = estimate(str(MODEL_DIR), "2*h100", kv=("full", "int8"))
    assert [each["configuration"] for each in document["configurations"]] == [asdict(e.configuration) for e in ranked]
    first, last = document["configurations"][0], document["configurations"][-1]
    assert (first["fits"], first["latency_s"]) == (True, ranked[0].latency_s)
    assert (last["fits"], last["latency_s"], last["why_not"]) == (False, None, ranked[-1].why_not)


def test_the_command_prints_what_fits_and_why_the_others_do_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """From `config.json` alone."""
    config = json.loads((Path(MODEL_DIR) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = ["estimate", str(tmp_path), "--devices", "cpu#a=20MiB,cpu#b=20MiB", "--weights", "full,int4"]
    assert main([*command, "--prompt", "200", "--new-tokens", "100", "--intent", "memory"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "the least memory first" in lines[0]
    assert next(line for line in lines if "TP1" in line).split()[1:4] == ["TP1", "PP1", "int4"]
    assert any("of 6 configurations fit; seconds: assumed of one core" in line for line in lines)
    shared = "layers in a variant are not shared by ranks: packed matrices are not cut in this version; use stages"
    assert f"  TP2 PP1 int4: {shared}" in lines
    assert main([*command[:4], "--rate", "1e6"]) == 2
    assert "requests/s at most" in capsys.readouterr().out
    assert main([*command, "--prompt", "2000"]) == 2
    assert "longer than the 1024 that the model was made for" in capsys.readouterr().err
    assert main(["estimate", str(tmp_path), "--devices", "h100", "--profile"]) == 2
    assert "name its devices, such as cuda:0, not h100" in capsys.readouterr().err


def test_the_command_shows_what_each_choice_does_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["estimate", str(MODEL_DIR), "--devices", "cpu#a=64MiB,cpu#b=64MiB"]
    choices = ["--weights", "full,int4", "--kv", "full,int8", "--prompt", "64"]
    assert main([*command, *choices, "--json"]) == 0
    told = {tuple(e["configuration"].values()): e for e in json.loads(capsys.readouterr().out)["configurations"]}
    command += ["--characterize"]
    assert main([*command, *choices]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "multiples of TP1 PP1 full" in lines[0]
    rows = [line.strip("│ ").split("│") for line in lines if line.startswith("│")]
    names = ["TP1 PP2 full", "TP2 PP1 full", "TP1 PP1 int4", "TP1 PP1 full KV int8", "largest over smallest of all"]
    assert [name.strip() for name, *_ in rows] == names
    assert float(rows[2][4]) < 1 < float(rows[-1][4]), "fewer bits take less memory"
    base, *others = (told[key] for key in [(1, 1, "full", "full"), (1, 2, "full", "full"), (2, 1, "full", "full")])
    for each, row in zip(others, rows, strict=False):
        names = ("ttft_s", "tpot_s", "latency_s", "memory_bytes", "cost_gib_s", "gpu_hours")
        assert [float(text) for text in row[1:]] == pytest.approx([each[n] / base[n] for n in names], abs=0.0051)
    assert main([*command, "--weights", "int4"]) == 2
    assert "nothing fits in full weights" in capsys.readouterr().err


def test_by_the_papers_method_a_configuration_is_what_its_equations_say_of_counted_footprints() -> None:
    """Of Llama-2-70B: W once, A for each part, A_p for each rank of a pipeline; TTFT and TPOT whatever the stages."""
    load = elastic.Load(prompt=1024, new=100)
    options: dict[str, Any] = {"load": load, "weights": ("full", "int4"), "intent": "latency", "planned": True}
    paper = {each.configuration: each for each in estimate(LLAMA_2_70B, "8*a6000", method="paper", **options)}
    ours = {each.configuration: each for each in estimate(LLAMA_2_70B, "8*a6000", **options)}
    assert paper.keys() == ours.keys()
    for weights in ("full", "int4"):
        one = ours[Configuration(1, 1, weights)].ranks[0].used
        stages = sum(rank.used for rank in ours[Configuration(1, 2, weights)].ranks)
        parts = sum(rank.used for rank in ours[Configuration(2, 1, weights)].ranks)
        footprint = one + 3 * (parts - one) + 8 * (stages - one) / 2
        found = paper[Configuration(4, 2, weights)]
        assert found.memory_bytes == pytest.approx(footprint, rel=1e-9)
        alone = paper[Configuration(4, 1, weights)]
        assert (found.ttft_s, found.tpot_s) == (alone.ttft_s, alone.tpot_s)
        assert found.latency_s == pytest.approx(found.ttft_s + 100 * found.tpot_s)
        assert (found.ranks, found.requests, math.isnan(found.rate), math.isnan(found.tokens_s)) == ((), 1, True, True)
    alike = Configuration(4, 1, "int4")
    assert paper[alike].tpot_s == pytest.approx(ours[alike].tpot_s, rel=0.01), "of a few tokens, not of 50"
    full = paper[Configuration(1, 2)]
    assert "a6000#0 lacks" in full.why_not
    assert "of an even part" in full.why_not
    assert paper[Configuration(1, 4)].fits
    assert paper[Configuration(1, 4)].basis == "data sheet"


def test_what_the_papers_method_does_not_know_is_refused_in_words() -> None:
    for options, words in (
        ({"load": elastic.Load(64, 8, rate=2.0)}, "knows one request at a time, and no rate of 2 a second"),
        ({"kv": ("full", "int8")}, "counts no keys and values, and knows no kv=full, int8"),
    ):
        with pytest.raises(ConfigError, match=words):
            estimate(MODEL_DIR, "cpu=64MiB", method="paper", **options)
    with pytest.raises(ConfigError, match="method='M2' is not known; use one of ours, paper"):
        estimate(MODEL_DIR, "cpu=64MiB", method="M2")  # type: ignore[arg-type]
    (kind,) = layout_of(MODEL_DIR).kinds
    cost = ChunkCost(1e-8, 1e-8, 1e-5, 1e-4, 9e-5)
    profile = CostProfile("cpu", {(kind.name, "full"): cost}, {"full": cost})
    paper: dict[str, Any] = {"weights": ("full", "int8"), "method": "paper"}
    full, int8 = estimate(MODEL_DIR, "cpu=64MiB", profile=profile, **paper)
    assert (full.basis, full.why_not, int8.why_not) == ("measured", "", "its seconds are not known; measure it")
    _, lossy = estimate(MODEL_DIR, "cpu=64MiB", losses={"int8": 0.1}, intent=elastic.Intent(quality_loss=0.0), **paper)
    assert "int8 loses 0.1 nats a token" in lossy.why_not


def test_the_command_shows_what_the_papers_method_says(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["estimate", str(MODEL_DIR), "--devices", "cpu#a=64MiB,cpu#b=64MiB", "--weights", "full,int4"]
    assert main([*command, "--method", "paper", "--prompt", "64"]) == 0
    said = capsys.readouterr().out
    assert "by the paper's equations: one request at a time, no keys and values" in said
    assert "TP1 PP2 int4" in said
    assert "nan" not in said
    assert "staging" not in said, "it knows no bytes of ranks"
    assert main([*command, "--method", "paper", "--rate", "2"]) == 2
    assert "leave the rate out" in capsys.readouterr().err


def test_the_command_measures_fingerprints_of_a_checkpoint_and_says_what_fits_explain(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architectures.build("qwen2-sliding").save_pretrained(tmp_path)
    asked = ["estimate", str(tmp_path), "--devices", "cpu#a=32MiB", "--weights", "full"]
    load = ["--prompt", "24", "--new-tokens", "8"]
    measured: list[CostProfile] = []

    def noted(*given: Any, **options: Any) -> CostProfile:
        measured.append(measure_fingerprints(*given, **options))
        return measured[0]

    monkeypatch.setattr(command, "measure_fingerprints", noted)
    assert main([*asked, *load, "--profile"]) == 0
    shown = capsys.readouterr().out
    assert "1 of 1 configurations fit; seconds: fitted to fingerprints measured here; links are assumed" in shown
    explained = measured[0].r_squared
    assert {form for _, form in explained} == {"full"}
    assert len(explained) == 2, "a sliding and a full kind of layers"
    for (kind, form), share in explained.items():
        assert f"{kind}, {form}: {share:.2%} of the variance" in shown
    monkeypatch.setattr(command, "measure_fingerprints", lambda *_, **__: measured[0])
    for more, told in ((["--profile"], [[*about, share] for about, share in explained.items()]), ([], [])):
        assert main([*asked, *load, *more, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["r_squared"] == told


def test_the_command_measures_what_ranks_on_a_cpu_do_to_each_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = layout_of(MODEL_DIR).kinds[0]
    cost = ChunkCost(1e-8, 1e-8, 1e-5, 1e-4, 9e-5)
    known = CostProfile("cpu", {(kind.name, "full"): cost}, {"full": cost})
    monkeypatch.setattr(command, "measure_fingerprints", lambda *_, **__: known)
    monkeypatch.setattr(command.os, "sched_getaffinity", lambda _: {0, 1})
    links = CostProfile("cpu", {}, {}, LinearLatency(5.0, 0.0), contention=0.5, handovers=Handovers(0.1, 0.2))
    monkeypatch.setattr(command, "measure_two_ranks", lambda: links)
    asked: list[CostProfile] = []

    def noted(*given: Any, profile: CostProfile, **options: Any) -> Any:
        asked.append(profile)
        return estimate(*given, profile=profile, **options)

    monkeypatch.setattr(command, "estimate_all", noted)
    options = ["--weights", "full", "--prompt", "24", "--new-tokens", "8", "--profile"]
    for devices, measured in (("cpu#a=64MiB,cpu#b=64MiB", True), ("cpu#a=64MiB", False)):
        assert main(["estimate", str(MODEL_DIR), "--devices", devices, *options]) == 0
        assert f"links are {'measured, too' if measured else 'assumed'}" in capsys.readouterr().out
    several, one = asked
    assert several == replace(links, layers=known.layers, around=known.around)
    assert one is known
