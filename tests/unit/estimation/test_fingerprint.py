"""Fingerprints: a few layers of a model, read alone, that compute what they compute in the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.assets import MODEL_DIR
from elastic.engines.continuous import ContinuousEngine
from elastic.errors import ConfigError
from elastic.estimation import profile as measuring
from elastic.estimation.estimate import estimate
from elastic.estimation.fingerprint import fingerprint, take_layers
from elastic.estimation.model_layout import layout_of
from elastic.estimation.profile import PASSES, fingerprint_layers, least_bytes, measure_fingerprints, reading_rate
from elastic.memory.checkpoint_file import Checkpoint
from elastic.planning.estimate.layer_cost import LayerCost
from elastic.planning.estimate.performance import Load
from support import architectures
from support.estimation.fingerprints import paper_fingerprints

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen2-sliding", "deepseek-v3"])
def test_layers_of_any_kind_compute_as_in_the_model(name: str, tmp_path: Path) -> None:
    """Experts that the files have one by one, a window by the layer's number, dense layers before sparse ones."""
    model: Any = architectures.build(name)
    model.save_pretrained(tmp_path)
    before = [p.data_ptr() for p in model.parameters()]
    for layers in (range(3), *paper_fingerprints(layout_of(model).kinds), (2, 0)):
        small = fingerprint(tmp_path, layers, torch.float32)
        assert small.config.get_text_config().num_hidden_layers == len(layers)
        assert {id(m.config) for m in small.modules() if hasattr(m, "config")} == {id(small.config)}
        with torch.no_grad():
            assert torch.equal(small(IDS).logits, take_layers(model, layers)(IDS).logits)
    with torch.no_grad():
        whole = fingerprint(tmp_path, range(3), torch.float32)
        assert torch.equal(whole(IDS).logits, model(IDS).logits)
        cached = whole.generate(IDS, max_new_tokens=4, do_sample=False)
        assert torch.equal(cached, model.generate(IDS, max_new_tokens=4, do_sample=False))
    assert [p.data_ptr() for p in model.parameters()] == before
    assert model.config.num_hidden_layers == 3


def test_a_fingerprint_has_its_share_of_the_layers_and_no_more() -> None:
    small = fingerprint(MODEL_DIR, (3, 7))
    checkpoint = Checkpoint(MODEL_DIR)
    nbytes = {name: tensor.nbytes for name in checkpoint.names if (tensor := checkpoint.find(name)) is not None}
    layers = sum(size for name, size in nbytes.items() if ".layers." in name)
    fixed = sum(nbytes.values()) - layers
    assert sum(p.nbytes for p in small.parameters()) == fixed + layers * 2 // 12
    assert small.dtype == torch.float16
    found = checkpoint.find("model.layers.7.mlp.up_proj.weight")
    assert torch.equal(small.model.layers[1].mlp.up_proj.weight, found)


def test_the_papers_fingerprints_have_one_layer_of_each_kind_and_one_more() -> None:
    kinds = layout_of(architectures.CONFIGS["gpt-oss"]()).kinds
    assert paper_fingerprints(kinds) == ((0, 1), (0, 1, 2), (0, 1, 1))
    assert paper_fingerprints(layout_of(MODEL_DIR).kinds) == ((0,), (0, 1))
    assert fingerprint_layers(kinds[0]) == (0, 2)


def test_layers_and_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the model has layers 0 to 11"):
        fingerprint(MODEL_DIR, (12,))
    model: Any = architectures.build("llama-gqa")
    model.save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"num_hidden_layers": 3', '"num_hidden_layers": 5'))
    with pytest.raises(ConfigError, match=r"lack \d+ weights"):
        fingerprint(tmp_path, (4,))


def test_costs_of_every_kind_and_variant_are_measured_and_models_stay_as_they_are() -> None:
    model: Any = architectures.build("qwen2-sliding")
    with torch.no_grad():
        before = model(IDS).logits
    profile = measure_fingerprints(model, ("full", "int8"), context=32, step_tokens=16, most_s=0.05)
    names = {kind.name for kind in layout_of(model).kinds}
    assert profile.layers.keys() == {(name, weights) for name in names for weights in ("full", "int8")}
    assert profile.around.keys() == {"full", "int8"}
    assert all(cost.matrices[-1][1] > 0 for cost in profile.layers.values())
    assert all(share <= 1 for share in profile.r_squared.values())
    assert {cost.window for cost in profile.layers.values()} == {None, model.config.sliding_window}
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, before)
    assert not hasattr(model, "elastic")


def test_keys_and_values_in_8_bits_are_measured_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = architectures.build("llama-gqa")
    served = list[str]()

    class Heard(ContinuousEngine):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            served.append(self.kv_format.dtype)

    monkeypatch.setattr("elastic.estimation.profile.ContinuousEngine", Heard)
    forms = "int8", "int8 KV int8"
    profile = measure_fingerprints(model, forms, context=32, step_tokens=16, most_s=0.01)
    assert served == ["float32", "int8"] * PASSES
    assert profile.around.keys() == profile.activations.keys() == set(forms)
    assert {form for _, form in profile.layers} == set(forms)
    options: dict[str, Any] = {"load": Load(16, 16), "kv": ("full", "int8"), "profile": profile}
    full, eight = estimate(model, "cpu=4MiB", weights=("int8",), **options)
    assert (full.basis, full.why_not, eight.why_not) == ("measured", "", "")
    assert full.latency_s != eight.latency_s


@pytest.mark.parametrize(("rate", "overhead"), [(1e30, 1.0), (1e-30, 0.0)])
def test_what_a_layer_takes_besides_reading_its_weights_is_overhead(
    rate: float, overhead: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "reading_rate", lambda *_: rate)
    profile = measure_fingerprints(architectures.build("llama-gqa"), context=32, step_tokens=16, most_s=0.05)
    for cost in profile.layers.values():
        assert isinstance(cost, LayerCost)
        assert cost.overhead == pytest.approx(overhead * cost.matrices[0][1])


def test_the_rate_of_reading_is_measured_at_the_pace_of_who_measures() -> None:
    taken: list[float] = []
    assert reading_rate(1, torch.device("cpu"), taken.append) > 0
    assert len(taken) == measuring.ROUNDS + 1


def test_one_token_reads_all_weights_of_a_dense_layer_and_some_experts_of_a_sparse_one() -> None:
    dense, sparse = (layout_of(architectures.build(name)) for name in ("llama-gqa", "qwen3-moe"))
    weights = sum(parameter.nbytes for parameter in dense.kinds[0].module.parameters())
    assert least_bytes(dense, dense.kinds[0], "full", "cpu") == weights
    assert least_bytes(sparse, sparse.kinds[0], "full", "cpu") < sparse.kinds[0].full.nbytes
