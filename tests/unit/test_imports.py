"""Importing Elastic costs little and touches nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import elastic
from support.child_process import in_fork

ROOT = Path(elastic.__file__).parent


def test_the_public_names_are_these() -> None:
    assert sorted(elastic.__all__) == elastic.__all__
    assert all(getattr(elastic, name) is not None for name in elastic.__all__)
    assert callable(elastic.wrap)
    assert callable(elastic.runtime)


@pytest.mark.slow
def test_importing_elastic_or_what_measures_links_imports_no_transformers_and_starts_nothing() -> None:
    code = """
        import sys, threading
        import torch
        before = set(sys.modules)
        import elastic
        import elastic.cluster.peers.link_profile
        added = set(sys.modules) - before
        heavy = {"transformers", "pynvml", "cuda", "accelerate", "rich", "torch._dynamo"} & added
        print(sorted(heavy), threading.active_count(), torch.cuda.is_initialized())
    """
    code = "\n".join(line.strip() for line in code.splitlines())
    child = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.split() == ["[]", "1", "False"]


@pytest.mark.slow
def test_a_small_program_imports_nothing_of_fleets() -> None:
    code = """
        import sys
        import torch
        from transformers import AutoModelForCausalLM
        import elastic
        from elastic.assets import MODEL_DIR
        model = elastic.wrap(AutoModelForCausalLM.from_pretrained(MODEL_DIR))
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)
        elastic.unwrap(model)
        print(sorted({"elastic.cluster", "multiprocessing.forkserver", "ray"} & sys.modules.keys()))
    """
    assert in_fork(code).strip() == "[]"
    using = {file.relative_to(ROOT).parts[0] for file in ROOT.rglob("*.py") if "multiprocessing" in file.read_text()}
    assert using <= {"cluster"}


def test_functions_and_files_stay_short() -> None:
    for file in ROOT.rglob("*.py"):
        source = file.read_text()
        assert source.count("\n") <= 400, file
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno <= 60, f"{file}: {node.name}"
