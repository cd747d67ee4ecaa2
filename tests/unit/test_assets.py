"""The model that ships with Elastic is small, trained, and loses something measurable in int4."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from elastic.assets import MODEL_DIR

pytestmark = pytest.mark.slow

TRAINING = Path(__file__).parents[2] / "training"


SAMPLE = slice(3, None, 14)
"""Of the held-out texts: what is measured again each time."""


@pytest.fixture(scope="module")
def evaluation() -> Any:
    spec = importlib.util.spec_from_file_location("evaluate", TRAINING / "evaluate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    """The figures beside the model."""
    return json.loads((MODEL_DIR / "evaluation.json").read_text())


def test_it_is_small_and_deep(assets: Any) -> None:
    model, _ = assets
    assert 2_000_000 <= model.num_parameters() <= 4_000_000
    assert model.config.num_hidden_layers >= 12
    assert (MODEL_DIR / "model.safetensors").stat().st_size <= 8_000_000


def test_the_tokenizer_keeps_every_byte(assets: Any) -> None:
    _, tokenizer = assets
    text = "def f(x):\n\treturn 'é…🙂'  # \x00\x7f\n"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_it_has_learnt_more_than_a_compressor_sees(published: dict[str, Any]) -> None:
    assert published["held_out_bytes"] > 250_000
    assert published["bits_per_byte"] <= 0.85 * published["xz_bits_per_byte"]


def test_int4_costs_it_something_that_can_be_measured(published: dict[str, Any]) -> None:
    assert published["int4_rise_bits_per_byte"] >= 3 * published["int4_rise_standard_error"] > 0


def test_the_figures_beside_it_sum_up_its_texts(evaluation: Any, published: dict[str, Any]) -> None:
    figures = dict(published)
    texts = figures.pop("texts")
    assert [text["bytes"] for text in texts] == [len(text.encode()) for text in evaluation.held_out_texts()]
    assert figures == pytest.approx(evaluation.summarize(texts), rel=1e-6)
    facts = json.loads((MODEL_DIR / "training.json").read_text())
    assert {"date", "machine", "tokens_seen", "corpus", "seed"} <= set(facts)


@pytest.mark.parametrize("chosen", [SAMPLE, pytest.param(slice(None), marks=pytest.mark.long)], ids=["sample", "all"])
def test_the_figures_of_its_texts_are_its_own(evaluation: Any, published: dict[str, Any], chosen: slice) -> None:
    measured = evaluation.measure(MODEL_DIR, evaluation.held_out_texts()[chosen])
    for found, expected in zip(measured, published["texts"][chosen], strict=True):
        assert found == pytest.approx(expected, rel=1e-3)
