"""Models that come one after another to places of this machine, by each policy, while they serve (iServe, figure 10).

    python benchmarks/placement_real.py [--load 0.1] [--keep FILE]

What `placement.py` simulates, with ranks that are processes: four models come to four places of two cores, one every so
many seconds, and a policy puts each by how busy places were. Requests rise and fall, and each is to one of the models
that serve by then; all policies get as many at the same times. Rounds have all three in random order. Told are the
places that are in use in the end, and latencies of requests, those of a policy over least-loaded's of the same round.
Target: hybrid's median at most 1.25 times least-loaded's, on at most 0.7 of its places. `others`: cores that other
processes kept busy meanwhile; figures are void where they are more than a few hundredths.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import transformers
from common import KEEP, SEED, Kept, arguments, finish, percentiles, table
from deploy_served import Clocked
from sim_runs import OthersWork

from elastic.bench.traces.generator import thinned
from elastic.cluster.deployment.deployments import Deployments
from elastic.planning.deployment.policies import POLICIES, PolicyName
from elastic.planning.estimate.performance import Load

PLACES = "abcd"
WAVES = 3
"""Times that requests rise and fall in a run."""
MOST_RATIO, MOST_PLACES = 1.25, 0.7


@dataclass(frozen=True)
class Setting:
    """Requests and models of a run."""

    load: Load
    """Of each model: the requests that it is placed for. All together get as many a second as one is placed for."""
    every_s: float
    """Between two models."""
    seconds: float
    """While requests come."""

    def arrivals(self) -> list[float]:
        """Return when requests come, at rates between 0 and twice the mean."""

        def rate(at_s: float) -> float:
            return self.load.rate * (1 - math.cos(2 * math.pi * WAVES * at_s / self.seconds))

        return list(thinned(random.Random(SEED), 2 * self.load.rate, rate, self.seconds))


class ServedModels:
    """Models of one directory that come to the places, and who sends to them."""

    def __init__(self, path: str, fleet: Deployments, setting: Setting, vocabulary: int) -> None:
        self._path, self._fleet, self._setting, self._vocabulary = path, fleet, setting, vocabulary
        self.clocked: list[Clocked] = []
        self.others = OthersWork([os.getpid()])

    def deploy(self) -> None:
        """Have one more."""
        name = f"model {len(self.clocked)}"
        self._fleet.deploy(self._path, "cost", name=name, load=self._setting.load)
        clocked = Clocked(self._fleet[name], self._setting.load, self._vocabulary)
        clocked.seconds()
        self.clocked.append(clocked)
        self.others.add(clocked.ranks)

    def serve(self) -> list[float]:
        """Have the others come while requests do; return the latencies of these."""
        choose, began_s = random.Random(SEED), time.perf_counter()
        coming = threading.Thread(target=self._come, args=(began_s,))
        coming.start()
        sent: list[tuple[Clocked, str]] = []
        for at_s in self._setting.arrivals():
            time.sleep(max(0.0, began_s + at_s - time.perf_counter()))
            clocked = self.clocked[int(choose.random() * len(self.clocked))]
            sent.append((clocked, clocked.send()))
        coming.join()
        for clocked in self.clocked:
            clocked.wait()
        return [clocked.told[request][-1] - clocked.told[request][0] for clocked, request in sent]

    def _come(self, began_s: float) -> None:
        for number in range(1, len(PLACES)):
            time.sleep(max(0.0, began_s + number * self._setting.every_s - time.perf_counter()))
            self.deploy()


def served(path: str, policy: PolicyName, setting: Setting, vocabulary: int) -> dict[str, Any]:
    """Place and serve all models by a policy; return the places that are in use in the end, and latencies."""
    devices = ",".join(f"cpu#{name}=1GiB" for name in PLACES)
    options: dict[str, Any] = {"policy": policy, "replanning": None, "fleet": {"beat_timeout_s": 20.0}}
    with Deployments(devices, **options) as fleet:
        models = ServedModels(path, fleet, setting, vocabulary)
        models.deploy()
        latencies_s = models.serve()
        places = sum(bool(device.models) for device in fleet.devices())
        [p95_s] = percentiles([latencies_s], 0.95)
        others = models.others.cores
    return {
        "places": places,
        "p50_s": statistics.median(latencies_s),
        "p95_s": p95_s,
        "requests": len(latencies_s),
        "others": others,
    }


def alone_s(path: str, load: Load, vocabulary: int) -> float:
    """Return how long one request takes that is alone."""
    with Deployments("cpu#a=1GiB", replanning=None) as fleet:
        fleet.deploy(path, "cost", name="model", load=load)
        clocked = Clocked(fleet["model"], load, vocabulary)
        return clocked.alone_s()


def compared(rounds: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return what came of each policy, beside least-loaded, in the median of rounds; of hybrid whether that is met."""
    rows: dict[str, dict[str, Any]] = {}
    for policy in POLICIES:
        pairs = [(each[policy], each["least-loaded"]) for each in rounds]
        rows[policy] = {
            "places": [mine["places"] for mine, _ in pairs],
            "share": max(mine["places"] / other["places"] for mine, other in pairs),
            **{key: statistics.median(mine[key] / other[key] for mine, other in pairs) for key in ("p50_s", "p95_s")},
        }
    hybrid = rows["hybrid"]
    hybrid["met"] = hybrid["p50_s"] <= MOST_RATIO and hybrid["share"] <= MOST_PLACES
    return rows


def main() -> None:
    more = {
        "load": {"type": float, "default": 0.1, "help": "the share of the time that places compute, if all are in use"}
    }
    options = arguments(__doc__.splitlines()[0], **more, keep=KEEP)
    layers, hidden, rounds, seconds = (4, 128, 1, 30.0) if options.quick else (8, 512, 3, 360.0)
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(SEED)
    load, kept = Load(96, 64), Kept(options.keep)
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoModelForCausalLM.from_config(config).eval().save_pretrained(folder)
        taken_s = kept.take("alone", partial(alone_s, folder, load, config.vocab_size))
        rate = options.load * len(PLACES) / taken_s
        setting = Setting(replace(load, rate=rate), seconds / (len(PLACES) + 1), seconds)
        print(f"a request that is alone takes {taken_s:.3f} s; {rate:.3g} requests/s")
        taken = []
        for number in range(rounds):
            for policy in random.sample(POLICIES, len(POLICIES)):
                take = partial(served, folder, policy, setting, config.vocab_size)
                kept.take(f"round {number}, {policy}", take)
            taken.append({policy: kept.take(f"round {number}, {policy}", dict) for policy in POLICIES})
    rows = compared(taken)
    header = ["policy", "places", "of least-loaded's", "P50 over its", "P95 over its"]
    table(
        header,
        [
            [name, row["places"], f"{row['share']:.2f}", f"{row['p50_s']:.2f}", f"{row['p95_s']:.2f}"]
            for name, row in rows.items()
        ],
    )
    finish("placement_real", options.device, {"setting": asdict(setting), "policies": rows, "rounds": taken})


if __name__ == "__main__":
    main()
