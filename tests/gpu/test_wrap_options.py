"""The options of `wrap`, and commands, where a GPU has a path of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import elastic
from elastic import ConfigError, Scale
from elastic.assets import MODEL_DIR
from elastic.cli.main import main
from elastic.controller.sensors.nvml import identify
from elastic.memory.host_store import host
from elastic.quant.formats.kernel_table import paths
from elastic.runtime import layer_benchmark
from support.architectures import build, prompt
from support.wrapped_model import assert_same_bits, bits

pytestmark = pytest.mark.cuda
TWO_DEVICES = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="there is one CUDA device")
HERE = "cuda:0"
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize("device", [HERE, pytest.param("cuda:1", marks=TWO_DEVICES)])
def test_without_places_a_model_gets_most_of_what_is_free_on_its_device(device: str) -> None:
    model, inputs = build("llama-gqa", device=device), prompt(2, device=device)
    expected, free = model.generate(**inputs, **GREEDY), torch.cuda.mem_get_info(device)[0]
    (place,) = elastic.wrap(model).elastic.status().places
    assert place.name == device
    assert 0.8 * free < place.budget_bytes < free
    assert torch.equal(model.generate(**inputs, **GREEDY), expected)
    assert torch.cuda.current_device() == 0
    elastic.unwrap(model)


@pytest.mark.parametrize("place", ["cuda:9=64MiB", "cuda:0=64TiB"])
def test_places_that_the_machine_does_not_have_are_refused(place: str) -> None:
    model = build("llama-gqa", device=HERE)
    with pytest.raises(ConfigError, match=r"there are \d+ CUDA devices|cuda:0 has"):
        elastic.wrap(model, places=["cuda:0#a=64MiB", place])
    assert not hasattr(model, "elastic")


@pytest.mark.parametrize("places", [None, ["cuda:0=256MiB"], ["cpu=64MiB", "cuda:0=256MiB"]])
def test_prepacked_matrices_are_refused_on_a_gpu(places: list[str] | None) -> None:
    model, inputs = build("llama-gqa", device=HERE), prompt(2, device=HERE)
    expected = model(**inputs).logits
    with pytest.raises(ConfigError, match=r"prepack=True does not go with places=\[.*cuda:0.*leave prepack out"):
        elastic.wrap(model, places=places, prepack=True)
    assert not hasattr(model, "elastic")
    assert torch.equal(model(**inputs).logits, expected)


def test_packed_variants_come_from_a_file_into_page_locked_memory(wrapped: Any, tmp_path: Path) -> None:
    model, inputs = build("llama-gqa", device=HERE), prompt(2, device=HERE)
    options = {"variants": ("int8",), "variant_cache": tmp_path}
    with paths.forced("reference"):
        wrapped(model, ["cuda:0=256MiB"], **options).elastic.swap([0, 1], "int8")
        packed = model(**inputs).logits
        elastic.unwrap(model)
        files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
        rt = wrapped(model, ["cuda:0=256MiB"], **options).elastic
        rt.swap([0, 1], "int8")
        assert torch.equal(model(**inputs).logits, packed)
    assert {path: path.stat().st_mtime_ns for path in files if path.suffix == ".safetensors"}.items() <= files.items()
    assert host.status().file_bytes == 0
    assert host.status().locked_bytes == host.status().memory_bytes > 0


def test_variants_are_of_weights_that_the_caller_has_queued_on_a_stream(wrapped: Any) -> None:
    plain, inputs = build("llama-gqa", device=HERE), prompt(2, device=HERE)
    with paths.forced("reference"):
        wrapped(plain, ["cuda:0=256MiB"], variants=("int8",)).elastic.swap([0, 1], "int8")
        packed, weights = plain(**inputs).logits, bits(build("llama-gqa", device=HERE))
        elastic.unwrap(plain)
        with torch.cuda.stream(torch.cuda.Stream(HERE)), torch.no_grad():
            model = build("llama-gqa", device=HERE)
            torch.cuda.synchronize()
            for name, parameter in model.named_parameters():
                parameter.zero_().add_(weights[name])
            rt = wrapped(model, ["cuda:0=256MiB"], variants=("int8",)).elastic
            rt.swap([0, 1], "int8")
            assert torch.equal(model(**inputs).logits, packed)


@pytest.mark.parametrize("there", ["cuda:0#b", pytest.param("cuda:1", marks=TWO_DEVICES), "cpu"])
def test_the_policy_scale_measures_its_places_and_replicates(
    there: str, wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_benchmark, "REPEATS", 1)
    model, inputs = build("llama-gqa", device=HERE), prompt(4, device=HERE)
    before, expected = bits(model), model(**inputs).logits
    settings = Scale(vacancy_ticks=1, cooldown_s=0.0, dwell_s=0.0, t_up=0.0, least_gain=0.0)
    rt = wrapped(model, ["cuda:0=256MiB", f"{there}=256MiB"], policy=settings, controller=False).elastic
    assert torch.equal(model(**inputs).logits, expected)
    seen = rt.snapshot()
    assert [place.name for place in seen.places] == [HERE, there]
    assert [reading.place for reading in seen.devices] == [name for name in (HERE, there) if name != "cpu"]
    assert seen.kv.created_bytes is not None
    rt.controller.tick()
    rt.kv.resize("max")  # comes after what was asked for
    assert rt.health().faults == ()
    torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-4, atol=1e-4)
    elastic.unwrap(model)
    assert_same_bits(model, before)


def test_autocast_reaches_the_threads_of_replicas(wrapped: Any) -> None:
    model, inputs = build("llama-gqa", device=HERE), prompt(4, device=HERE)
    with torch.autocast("cuda", torch.bfloat16):
        expected = model(**inputs).logits
        rt = wrapped(model, ["cuda:0=256MiB", "cuda:0#b=256MiB"]).elastic
        rt.replicate([0, 1, 2], "cuda:0#b")
        found = [model(**inputs).logits for _ in range(2)][-1]  # a pass is timed by the next one
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)
    assert len(rt.passes()) > 0


def test_text_is_generated_by_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "import os\n", "--max-new-tokens", "8", "--place", "cuda:0=1GiB"]) == 0
    assert capsys.readouterr().out.startswith("import os\n")
    assert main(["generate", "--prompt", "import os\n", "--place", "cuda:9=1GiB"]) == 2
    assert "CUDA devices, counted from 0" in capsys.readouterr().err
    assert MODEL_DIR.exists()


def test_a_device_has_the_names_by_which_nvml_knows_it() -> None:
    names = identify(0)
    assert names.ordinal == 0
    assert names.uuid is not None
    assert names.uuid.startswith("GPU-")
    assert names.bus_id is not None
    assert len(names.bus_id) == len("00000000:3B:00.0")
