"""The page of the evaluation is made of its results."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from evaluate import Evaluation
from evaluation_report import document

from elastic.assets import MODEL_DIR

ROOT = Path(__file__).parents[3]
MACHINE = "cpu-2core"


def test_the_page_shows_the_stored_results(tmp_path: Path) -> None:
    measured = json.loads((ROOT / "benchmarks" / "results" / f"evaluation-{MACHINE}.json").read_text())
    config = str(ROOT / "benchmarks" / "evaluation.toml")
    options = Namespace(config=config, full=False, model=str(MODEL_DIR), device="cpu", work=str(tmp_path))
    conditions = Evaluation(options).conditions
    page = document(measured, measured["runs"], conditions, measured["ratios"], MACHINE, "evaluation")
    assert (ROOT / "docs" / "evaluation.md").read_text() == page
