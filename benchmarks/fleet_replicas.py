"""What a rank gains when another one computes some of its layers too, for half of its requests.

    python benchmarks/fleet_replicas.py [--rounds 5]

Two ranks, pinned to a core each, serve the Llama of 40M parameters of `serving.py`. The second one is given no request:
it has copies of the last half of the first one's layers, or of all, or of none. Tokens a second of prompts (of 128
tokens, with one of an answer) and of answers (64 tokens each behind prompts of 16), of as many requests as `batch` says
at once. Each round starts fresh processes; within a round the order of what is replicated is drawn.

Beside each gain is CoCoServe's figure (section 4.1, equation 4): the layers over what is left of them, a layer with two
copies counting half. It takes layers to be all of the work, and work to be shared out for nothing. Reported; no target.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import SEED, arguments, finish, ratio, table
from overload import LAYERS
from serving import Load, flat, fleet, prompt, save_model, warm_up

import elastic
from elastic.engines.base import Request

CORES = [(0,), (1,)]
COPIED = {"none": 0, "half": LAYERS // 2, "all": LAYERS}
WORK = {"prompts": (128, 1), "answers": (16, 64)}
"""Tokens of a prompt, and of an answer."""


def throughput(engine: elastic.Fleet, batch: int, tokens: tuple[int, int], choose: random.Random) -> float:
    """Return tokens a second of requests that come at once; those of answers where there are several."""
    load, begin = Load(engine), time.perf_counter()
    for _ in range(batch):
        load.submit(Request(prompt(tokens[0], choose), tokens[1], ignore_eos=True))
    load.wait()
    return batch * (tokens[0] if tokens[1] == 1 else tokens[1]) / (time.perf_counter() - begin)


def measured(path: Path, batch: int, choose: random.Random) -> dict[str, dict[str, float]]:
    """Take a round: work -> what is replicated -> tokens a second."""
    found: dict[str, dict[str, float]] = {work: {} for work in WORK}
    with fleet(path, CORES) as engine:
        warm_up(engine)
        first, second = (instance.name for instance in engine.status().instances)
        engine._dispatcher.instances[second].limit_changes += 1  # as while its limit changes: it is given nothing
        for copied in choose.sample(list(COPIED), len(COPIED)):
            if COPIED[copied]:
                done = engine.replicate(first, range(LAYERS - COPIED[copied], LAYERS), second)
                if done.status != "applied":
                    raise RuntimeError(f"replication was {done.status}: {done.why}")
            for work, tokens in WORK.items():
                throughput(engine, batch, (16, 4), choose)
                found[work][copied] = throughput(engine, batch, tokens, choose)
            engine.evict(first)
    return found


def figures(path: Path, batch: int, rounds: int) -> dict[str, Any]:
    choose = random.Random(SEED)
    taken = [measured(path, batch, choose) for _ in range(rounds)]
    found: dict[str, Any] = {}
    for work in WORK:
        of = {copied: [each[work][copied] for each in taken] for copied in COPIED}
        found[work] = {"tokens_per_s": statistics.median(of["none"])} | {
            f"{copied} copied": ratio(of[copied], of["none"]) for copied in ("half", "all")
        }
    return found


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    if options.device != "cpu":
        sys.exit("this benchmark pins ranks to cores: it is for a CPU")
    rounds, results = 1 if options.quick else min(options.rounds, 5), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(Path(folder))
        for batch in (4,) if options.quick else (4, 16):
            results[f"{batch} requests"] = figures(path, batch, rounds)
    results["CoCoServe's figure"] = {
        f"{copied} copied": LAYERS / (LAYERS - COPIED[copied] / 2) for copied in ("half", "all")
    }
    table(["replicas", ""], list(flat(results)))
    finish("fleet_replicas", "cpu", results)


if __name__ == "__main__":
    main()
