"""GuideLLM, as a process of its own, against a server with the small model."""

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
    pytest.mark.skipif(find_spec("guidellm") is None, reason="GuideLLM comes with the extra `clients`"),
]
REQUESTS, PROMPT, OUTPUT, TIMEOUT_S = 6, 20, 8, 600


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_all_requests_complete(path: str, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    options = {
        "tokenizer": f"kind=huggingface_auto,model={MODEL_DIR}",
        "data": f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
        "profile": "kind=concurrent,streams=3",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "output": f"kind=json,path={result}",
    }
    with EMBEDDED.made() as engine, live(engine) as server:
        options["backend"] = f"kind=openai_http,target={server.url},model={NAME},request_format={path}"
        command = [sys.executable, "-m", "guidellm", "run", "--disable-progress"]
        command += [f"--{name}={value}" for name, value in options.items()]
        child = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert child.returncode == 0, child.stdout + child.stderr
    (benchmark,) = json.loads(result.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (requests["errored"], requests["incomplete"]) == ([], [])
    assert [request["output_tokens"] for request in requests["successful"]] == [OUTPUT] * REQUESTS
    assert all(request["time_to_first_token_ms"] > 0 for request in requests["successful"])
