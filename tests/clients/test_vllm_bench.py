"""`vllm bench serve` against a server with the small model. vLLM has a venv of its own: make test-vllm."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from elastic.assets import MODEL_DIR
from support.serving.live_server import EMBEDDED, NAME, live

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM has a venv of its own: make test-vllm"),
]
REQUESTS, PROMPT, OUTPUT, TIMEOUT_S = 6, 20, 8, 600
COMMAND = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What `vllm bench serve` runs; the command itself asks for a distribution named `vllm`, and that for CPUs is not."""


@pytest.mark.parametrize(("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
def test_all_requests_complete(backend: str, path: str, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    options = {
        "backend": backend,
        "endpoint": path,
        "model": NAME,
        "tokenizer": MODEL_DIR,
        "dataset-name": "random",
        "random-input-len": PROMPT,
        "random-output-len": OUTPUT,
        "num-prompts": REQUESTS,
        "result-dir": result.parent,
        "result-filename": result.name,
    }
    with EMBEDDED.made() as engine, live(engine) as server:
        options["base-url"] = server.url
        command = [sys.executable, "-c", COMMAND, "--save-result", "--save-detailed"]
        command += [f"--{name}={value}" for name, value in options.items()]
        child = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert child.returncode == 0, child.stdout + child.stderr
    found = json.loads(result.read_text())
    assert (found["completed"], found["failed"], found["errors"]) == (REQUESTS, 0, [""] * REQUESTS)
    assert found["output_lens"] == [OUTPUT] * REQUESTS
    assert all(ttft > 0 for ttft in found["ttfts"])
