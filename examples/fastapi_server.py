"""A wrapped model behind an OpenAI-compatible server, in a program of your own.

python examples/fastapi_server.py MODEL [PORT]
curl -s localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "import os", "max_tokens": 20}'
"""

from __future__ import annotations

import argparse
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import elastic
from elastic.assets import MODEL_DIR
from elastic.engines.continuous import ContinuousEngine
from elastic.server import create_app, run


def main(path: str, port: int) -> int:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    elastic.wrap(model, variants=["int4"], policy="balanced")  # layers are swapped when the KV cache is short of pages
    engine = ContinuousEngine(model, max_queue=256)
    app = create_app(engine, AutoTokenizer.from_pretrained(path), "my-model", max_model_len=1024)

    @app.get("/layers")  # a FastAPI application like any other
    def layers() -> int:
        return model.elastic.status().layers

    try:
        return run(app, port=port)  # drains on SIGTERM; or any ASGI server: uvicorn.run(app)
    finally:
        engine.stop(drain=False)
        elastic.unwrap(model)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", nargs="?", default=str(MODEL_DIR), help="directory of a model")
    options.add_argument("port", nargs="?", type=int, default=8000)
    arguments = options.parse_args()
    sys.exit(main(arguments.model, arguments.port))
