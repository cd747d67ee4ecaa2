"""The cost in quality of the precision of runs: their requests replayed under the weights that were recorded.

    python benchmarks/evaluation_quality.py SPEC.json OUT.json

SPEC has `runs` (name -> file of a run), `requests` (how many of each), and the settings of the evaluation. OUT has the
figures of `quality.evaluate` for each run, and for the same requests with all layers packed (`static_int4`).
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from quality.evaluate import Quality, QualityReplayer, ReplayedRequest, share_of_loss

import elastic
from elastic.config import Place
from elastic.model_files import load_model


def load(spec: dict[str, Any], path: str) -> tuple[list[ReplayedRequest], list[list[str]]]:
    """Choose requests of a run that had two tokens or more, seeded; return them and the forms that they name."""
    run = json.loads(Path(path).read_text())
    able = [r for r in run["requests"] if len(r["weights"]) > 1] or run["requests"]
    chosen = random.Random(spec["seed"]).sample(able, min(spec["requests"], len(able)))
    requests = [ReplayedRequest(tuple(r["prompt"]), tuple(r["weights"])) for r in chosen]
    return requests, run["summary"]["elastic"]["weights"]


def figures(quality: Quality, static: Quality) -> dict[str, Any]:
    return quality.summary() | {"share_of_static_loss": share_of_loss(quality, static)}


def main(source: str, target: str) -> None:
    spec = json.loads(Path(source).read_text())
    torch.set_num_threads(1)
    device = torch.device(spec["device"])
    model, _ = load_model(spec["model"], device, option="model")
    page_bytes = spec["page_bytes"] if device.type == "cpu" else None
    place = Place(spec["device"], device, spec["budget_bytes"], page_bytes)
    elastic.wrap(model.to(device), places=[place], variants=(spec["variant"],), variant_cache=spec["variant_cache"])
    replayer = QualityReplayer(model)
    layers = model.elastic.status().layers
    results = {}
    for name, path in spec["runs"].items():
        requests, forms = load(spec, path)
        packed = [ReplayedRequest(r.prompt, (0,) * len(r.weights)) for r in requests]
        static = replayer.replay(packed, [(spec["variant"],) * layers])
        quality = replayer.replay(requests, forms)
        results[name] = {"run": figures(quality, static), "static_int4": figures(static, static)}
    Path(target).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:3])
