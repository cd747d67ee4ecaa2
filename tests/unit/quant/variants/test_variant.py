"""Variants: where they come from, what they cost, and their files."""

from __future__ import annotations

import gc
import hashlib
import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import elastic
from elastic import ConfigError
from elastic.kvcache.decode_table import table
from elastic.memory.checkpoint_file import CheckpointFile
from elastic.memory.host_store import host
from elastic.quant.formats.integer import Integers
from elastic.quant.variants.eligible import LayerParameters
from elastic.quant.variants.host_block import in_one_block
from elastic.quant.variants.pack_model import packer
from support.architectures import build, prompt
from support.child_process import in_fork

GOLDEN = Path(__file__).parents[1] / "golden"
FORMATS = sorted(path.name for path in GOLDEN.iterdir() if (path / "logits.safetensors").exists())
ROOMY = elastic.Place("cpu", torch.device("cpu"), 64 << 20, page_bytes=4096)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


# -- quantized from the model's weights


@torch.no_grad()
def with_outliers() -> Any:
    """A model some of whose channels are far larger than others, which is what the search for scales is for."""
    model = build("llama-mha")
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight[::8] *= 30
    return model


def test_calibration_text_makes_a_variant_better(wrapped: Any) -> None:
    text = prompt(4, 64, seed=5)["input_ids"]
    model, held_out = with_outliers(), prompt(2, 64, seed=6)
    full = model(**held_out).logits
    plain = elastic.Variant("plain", Integers(3, 32))
    searched = elastic.Variant("searched", Integers(3, 32), calibration=text)
    rt = wrapped(model, variants=[plain, searched]).elastic
    errors = {}
    for name in ("plain", "searched"):
        rt.swap([0, 1, 2], name)
        errors[name] = distance(model(**held_out).logits, full)
    assert errors["searched"] < 0.9 * errors["plain"]
    assert not any(module._forward_pre_hooks for name, module in model.named_modules() if name.endswith("proj"))
    shapes = (torch.ones(8, dtype=torch.long), torch.ones(0, 8, dtype=torch.long))
    for wrong in (torch.randn(2, 8), torch.ones(2, 8, dtype=torch.bool), *shapes):
        with pytest.raises(ConfigError, match="calibration: token ids"):
            elastic.wrap(build("llama-mha"), variants=[elastic.Variant("int4", calibration=wrong)])
    with pytest.raises(ConfigError, match="checkpoint=3 cannot be; it must be a path"):
        elastic.wrap(build("llama-mha"), variants=[elastic.Variant("mine", checkpoint=3)])  # type: ignore[arg-type]


@pytest.mark.slow
def test_host_memory_of_all_variants_is_at_most_twice_the_model(wrapped: Any) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).to(torch.float16).eval().requires_grad_(False)
    gc.collect()
    before = host.status()
    wrapped(model, places=[elastic.Place("cpu", torch.device("cpu"), 256 << 20)], variants=("int8", "int4", "int3"))
    held = host.status().memory_bytes - before.memory_bytes
    layers = sum(p.nbytes for p in model.model.layers.parameters())
    assert layers < held <= 2 * layers
    assert model.elastic.status().host.memory_bytes >= held


# -- files


def cached(directory: Path, model: Any, **options: Any) -> Any:
    return elastic.wrap(model, places=ROOMY, variants=("int4", "int8"), variant_cache=directory, **options)


def swapped_logits(model: Any) -> torch.Tensor:
    model.elastic.swap(range(model.elastic.status().layers), "int4")
    logits: torch.Tensor = model(**prompt(2)).logits
    return logits


@pytest.mark.parametrize("architecture", ["llama-gqa", "qwen3-moe", "gpt2"])
def test_the_second_start_reads_what_the_first_packed(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = cached(tmp_path, build(architecture))
    expected = swapped_logits(model)
    elastic.unwrap(model)
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {
        "elastic-int4.safetensors",
        "elastic-int8.safetensors",
    }
    monkeypatch.setattr("elastic.quant.variants.pack_model.packer", None)
    before = host.status()
    model = cached(tmp_path, build(architecture))
    try:
        status = model.elastic.status().host
        assert status.file_bytes - before.file_bytes >= sum(
            path.stat().st_size * 0.5 for path in tmp_path.glob("*.safetensors")
        ), "the blocks are read from the file where they lie"
        assert torch.equal(swapped_logits(model), expected)
    finally:
        elastic.unwrap(model)


def test_files_of_another_model_or_variant_are_refused(tmp_path: Path) -> None:
    elastic.unwrap(cached(tmp_path, build("llama-gqa")))
    for model, words in ((build("llama-gqa", seed=1), "is another one"), (build("gpt2"), "other layers")):
        with pytest.raises(ConfigError, match=f"elastic-int4.*{words}.*delete it, or choose another directory"):
            cached(tmp_path, model)
    finer = elastic.Variant("int4", Integers(4, 32))
    with pytest.raises(ConfigError, match=r"'group_size': 128.*asked for.*'group_size': 32"):
        elastic.wrap(build("llama-gqa"), places=ROOMY, variants=[finer], variant_cache=tmp_path)
    (tmp_path / "elastic-int4.safetensors").write_bytes((GOLDEN / "gptq-4bit/model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match="Elastic did not write it"):
        cached(tmp_path, build("llama-gqa"))


def rewritten(path: Path, about: str) -> None:
    """Give a file another description, with its checksum."""
    save_file(load_file(path), path, {"about": about, "sha256": hashlib.sha256(about.encode()).hexdigest()})


def test_what_is_in_the_place_of_a_file_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "elastic-int4.safetensors"
    elastic.unwrap(cached(tmp_path, build("llama-gqa")))
    about = json.loads(CheckpointFile(path).metadata["about"])
    layer = next(iter(about["layers"]))
    other = [
        [],
        {**about, "layers": 5},
        {**about, "target": {"device": "cpu"}},
        {key: value for key, value in about.items() if key != "variant"},
        {**about, "paths": [{"format": "Integers"}]},
        {**about, "layers": {**about["layers"], layer: {"digest": 0, "parameters": {"mlp": {"kind": "rounded"}}}}},
    ]
    for description in other:
        rewritten(path, json.dumps(description))
        with pytest.raises(ConfigError, match=f"{path} is damaged"):
            cached(tmp_path, build("llama-gqa"))
    rewritten(path, "{")
    with pytest.raises(ConfigError, match=f"{path} is damaged"):
        cached(tmp_path, build("llama-gqa"))
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=f"{path} cannot be read"):
        cached(tmp_path, build("llama-gqa"))


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("cache")
    elastic.unwrap(elastic.wrap(build("llama-gqa"), places=ROOMY, variants=("int4",), variant_cache=directory))
    return (directory / "elastic-int4.safetensors").read_bytes()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 10**9), flip=st.integers(1, 255), cut=st.booleans())
def test_a_file_damaged_anywhere_is_refused_or_unharmed(
    at: int, flip: int, cut: bool, whole_file: bytes, tmp_path: Path
) -> None:
    damaged = bytearray(whole_file)
    at %= len(damaged)
    damaged[at] ^= flip
    path = tmp_path / "elastic-int4.safetensors"
    path.unlink(missing_ok=True)
    path.write_bytes(damaged[:at] if cut else damaged)
    model = build("llama-gqa")
    try:
        elastic.wrap(model, places=ROOMY, variants=("int4",), variant_cache=tmp_path)
    except ConfigError as error:
        assert str(error).startswith(f"variant_cache: {path} is ")  # noqa: PT017
        assert "; delete it" in str(error)  # noqa: PT017
        return
    fresh = elastic.wrap(build("llama-gqa"), places="cpu#1=64MiB", variants=("int4",))
    assert torch.equal(swapped_logits(model), swapped_logits(fresh)), "the byte was one of padding"
    elastic.unwrap(model)
    elastic.unwrap(fresh)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / ("long" * 100)):
        with pytest.raises(ConfigError, match=r"variant_cache.*cannot be written"):
            cached(directory, build("llama-gqa"))


def test_a_disk_without_room_is_said_and_nothing_is_left_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_entries", {})  # a table of all that this process has measured is long
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"variant_cache: .*elastic-int4.safetensors cannot be written: .*large"):
            cached(tmp_path, build("llama-gqa"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [file.name for file in tmp_path.iterdir()] == ["elastic-attention.json"]


def test_layers_without_weights_of_their_own_have_no_variants(tmp_path: Path) -> None:
    model = build("llama-gqa")
    for i in range(len(model.model.layers)):
        model.model.layers[i] = model.model.layers[0]
    for cache in (None, tmp_path):
        with pytest.raises(ConfigError, match=r"no layer of this model has weights of its own.*without variants"):
            elastic.wrap(model, places=ROOMY, variants=("int4",), variant_cache=cache)
    elastic.unwrap(elastic.wrap(model, places=ROOMY))


def test_each_name_has_a_file_of_its_own(tmp_path: Path) -> None:
    """A colon becomes "of" in the name of a file, and a name may have that too, or be long."""
    names = ["a:b", "aofb", "2:4", "2of4", ":of:of:".strip(":"), "of" * 50, "x" + ":" * 99]
    for _ in range(2):
        variants = [elastic.Variant(name, Integers(4, 32)) for name in names]
        model = elastic.wrap(build("llama-gqa"), places=ROOMY, variants=variants, variant_cache=tmp_path)
        elastic.unwrap(model)
    files = {path.name for path in tmp_path.glob("elastic-*.safetensors")}
    assert len(files) == len(names)
    assert {"elastic-2of4.safetensors", "elastic-aofb.safetensors"} < files


def test_a_file_of_the_same_tokens_in_other_sequences_is_refused(tmp_path: Path) -> None:
    text = prompt(4, 32, seed=5)["input_ids"]

    def wrap(calibration: torch.Tensor) -> None:
        variant = elastic.Variant("int4", calibration=calibration)
        model = elastic.wrap(build("llama-mha"), places=ROOMY, variants=[variant], variant_cache=tmp_path)
        elastic.unwrap(model)

    wrap(text)
    wrap(text.int())
    for other in (text.reshape(8, 16), text.flip(0), text.roll(1, 1)):
        with pytest.raises(ConfigError, match=r"is not for this.*'calibration'.*asked for"):
            wrap(other)


CHILD = """
import torch, elastic
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({model!r})
elastic.wrap(model, places="cpu=64MiB", variants=("int8", "int4", "int3"), variant_cache={cache!r})
values = [w.packed.value() for v in ("int4", "int3") for l in model.elastic.weights.layers
          for w in l.variants[v].packings.values()]
torch.save([values, torch.backends.cpu.get_cpu_capability()], {out!r})
"""


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="has one instruction set only")
@pytest.mark.slow
def test_files_are_packed_again_for_another_instruction_set(tmp_path: Path) -> None:
    """The very same codes, in the layout of the kernels that run there."""
    found = []
    build("llama-gqa").save_pretrained(tmp_path / "model")
    for capability in ("default", "avx2"):
        out = tmp_path / capability
        code = CHILD.format(model=str(tmp_path / "model"), cache=str(tmp_path / "cache"), out=str(out))
        in_fork(code, ATEN_CPU_CAPABILITY=capability)
        found.append(torch.load(out))
    (first, one), (second, other) = found
    assert (one, other) == ("DEFAULT", "AVX2")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_refused_page_lock_is_a_warning_and_the_block_is_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("elastic.memory.host_store.page_lock", lambda tensor: False)
    monkeypatch.setattr(host, "_warned", False)
    layer = LayerParameters.of(build("llama-gqa").model.layers[0])
    packings = packer(elastic.Variant.parse("int4"), {})(layer)
    packed = in_one_block(packings, torch.device("cuda"))  # whose blocks are to be locked
    assert caplog.text.count("page-lock") == 1
    for name, packing in packings.items():
        assert all(torch.equal(packed.packings[name].parts[part], tensor) for part, tensor in packing.parts.items())
